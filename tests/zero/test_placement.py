"""Where state lives, how masters are kept and how a model begins change memory, never the mathematics."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap

import pytest
import torch
from torch import nn

import dist_train as dt
from dist_train import checkpoint
from dist_train.model.build import empty_model
from dist_train.model.init import init_weight
from dist_train.zero import Precision, ShardPolicy, ZeroEngine
from dist_train.zero.residency import Residency
from tests.ranks import run_ranks
from tests.toy import toy_config, toy_model
from tests.zero.helpers import distance, gathered, train_steps, weights

LIVE = [11, 1, 7, 3, 2, 11, 5, 9, 4, 8, 6, 10]
BF16, SPLIT = Precision(compute=torch.bfloat16), Precision(compute=torch.bfloat16, split=True)


def _train(mesh, comm, stage, optimizer, micro=1, residency=None, precision=None, steps=3):
    recipe = {"adamw": dt.AdamW(1e-2), "momentum": dt.SGD(0.1, 0.9)}[optimizer]
    options = {"policy": ShardPolicy.from_stage(stage), "precision": precision, "clip_norm": 0.5, "bucket_bytes": 9000}
    engine = ZeroEngine(toy_model(), recipe, mesh, comm, residency=residency, **options)
    log = train_steps(engine, mesh, LIVE, steps, micro)
    held = engine.held_bytes()
    state = gathered(engine, mesh, comm)
    engine.put_away()
    assert engine.held_bytes() == held == engine.predicted_bytes()
    return log, state, held, engine._state.held_bytes


def assert_equal(found, expected):
    assert found[0] == expected[0] and found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize(
    ("stage", "place", "parameters"),
    [
        (0, "host", "device"),
        (1, "nvme", "device"),
        (2, "host", "device"),
        (2, "nvme", "device"),
        (3, "host", "host"),
        (3, "nvme", "nvme"),
    ],
)
def test_offloaded_state_gives_the_same_bits(tmp_path, stage, place, parameters, micro):
    expected = run_ranks(2, _train, stage, "adamw", micro)
    residency = Residency(place, parameters, tmp_path if place == "nvme" else None)
    found = run_ranks(2, _train, stage, "adamw", micro, residency)
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)
        held = one[2]
        assert held["masters"] > 0 and held["moments"] == other[2]["moments"]
        in_place = held["masters"] + held["moments"] + (held["parameters"] if parameters == "nvme" else 0)
        assert one[3] == in_place if place == "nvme" else one[3] >= in_place  # all of it, and nothing else
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("stage", [1, 3])
def test_offload_works_with_bf16_and_on_one_rank(tmp_path, stage):
    for ranks in (1, 2):
        expected = run_ranks(ranks, _train, stage, "momentum", 1, None, BF16)
        found = run_ranks(ranks, _train, stage, "momentum", 1, Residency("nvme", folder=tmp_path), BF16)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)


def test_a_split_master_is_exact_and_its_high_half_the_nearest_bf16():
    layer = nn.Linear(1 << 12, 3, bias=False)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 1 << 12, generator=generator) * torch.logspace(-30, 30, 1 << 12)
    bits = values.view(torch.int32)
    bits[:, :64] = (bits[:, :64] & ~0xFFFF) | 0x8000  # ties
    bits[:, 64:128] |= 0xFFFF
    layer.weight.data = values.clone()
    engine = dt.shard(layer, dt.SGD(0.0), dt.ParallelMesh.single(), stage=1, precision=SPLIT)
    (master,) = (piece.tensor for piece in engine.pieces() if piece.name == "model/weight")
    assert torch.equal(master.view(torch.int32), values.view(torch.int32))
    error = (layer.weight.double() - values.double()).abs()
    nearest = (values.to(torch.bfloat16).double() - values.double()).abs()
    assert torch.equal(error, nearest)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_split_masters_take_four_bytes_with_the_weight_and_train_as_whole_ones(tmp_path, stage):
    whole, split = (run_ranks(2, _train, stage, "adamw", 1, None, precision) for precision in (BF16, SPLIT))
    for (log, state, held, _), (expected_log, expected, before, _) in zip(split, whole, strict=True):
        torch.testing.assert_close(torch.tensor(log), torch.tensor(expected_log), rtol=1e-4, atol=0)  # ties round elsewhere
        assert distance(weights(state), weights(expected)) < 1e-3
        assert held["masters"] * 2 == before["masters"] and held["parameters"] == before["parameters"]
    on_nvme = run_ranks(2, _train, stage, "adamw", 1, Residency("nvme", folder=tmp_path), SPLIT)
    for one, other in zip(on_nvme, split, strict=True):
        assert_equal(one, other)


def _resumed(mesh, comm, folder, precision, other):
    def engine(which, stage):
        policy = ShardPolicy.from_stage(stage)
        return ZeroEngine(toy_model(), dt.AdamW(1e-2), mesh, comm, policy=policy, precision=which, bucket_bytes=9000)

    first = engine(precision, 1)
    train_steps(first, mesh, LIVE, 2)
    checkpoint.save(folder, 2, list(first.pieces()), {}, comm, mesh.world)
    first.put_away()
    train_steps(first, mesh, LIVE, 2, first=2)
    second = engine(precision, 1)
    checkpoint.load(folder / "step_00000002", second.pieces())
    second.restored()
    train_steps(second, mesh, LIVE, 2, first=2)
    third = engine(other, 3)
    checkpoint.load(folder / "step_00000002", third.pieces())
    third.restored()
    return gathered(first, mesh, comm), gathered(second, mesh, comm), gathered(third, mesh, comm)


@pytest.mark.parametrize(("precision", "other"), [(SPLIT, BF16), (BF16, SPLIT)])
def test_checkpoints_of_split_and_whole_masters_are_one_format(tmp_path, precision, other):
    for straight, resumed, elsewhere in run_ranks(2, _resumed, tmp_path, precision, other):
        assert all(torch.equal(resumed[name], value) for name, value in straight.items())
        assert elsewhere.keys() == straight.keys()


def _begun(mesh, comm, stage, meta, tied, dtype):
    config = toy_config(f"model.tie_embeddings={tied}")
    init = lambda name, values: init_weight(name, values, config.model, 0)
    model = empty_model(config) if meta else toy_model(f"model.tie_embeddings={tied}")
    for param in model.blocks[1].parameters():
        param.requires_grad_(False)
    precision = Precision(compute=dtype)
    options = {"policy": ShardPolicy.from_stage(stage), "precision": precision, "init": init if meta else None}
    engine = ZeroEngine(model, dt.AdamW(1e-2), mesh, comm, **options)
    start = gathered(engine, mesh, comm)
    return train_steps(engine, mesh, LIVE, 2), start, gathered(engine, mesh, comm)


@pytest.mark.parametrize("tied", ["false", "true"])
@pytest.mark.parametrize(("stage", "dtype"), [(0, None), (1, torch.bfloat16), (3, None), (3, torch.bfloat16)])
def test_a_model_on_meta_starts_from_the_same_bits(stage, dtype, tied):
    on_meta, filled = (run_ranks(2, _begun, stage, meta, tied, dtype) for meta in (True, False))
    for found, expected in zip(on_meta, filled, strict=True):
        assert found[0] == expected[0]
        for one, other in zip(found[1:], expected[1:], strict=True):
            assert one.keys() == other.keys() and all(torch.equal(one[name], value) for name, value in other.items())


def test_a_module_on_meta_without_init_is_refused_by_name():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match=r"0\.weight is on the meta device.*init="):
        dt.shard(module, dt.SGD(), dt.ParallelMesh.single(), stage=3)


def test_buffers_on_meta_are_filled_too():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    init = lambda name, values: values.fill_(len(name))
    engine = dt.shard(module, dt.SGD(), dt.ParallelMesh.single(), init=init)
    mean, bias = module[1].running_mean.detach(), engine.module[0].bias.detach()
    assert float(mean[0]) == len("1.running_mean") and float(bias[1]) == len("0.bias")


def test_peak_memory_of_a_start_on_meta_is_the_shards_and_one_unit():
    """Two fresh ranks, 16 units of 16 MB: a rank's memory never grows by more than its shards and the unit being made."""
    program = textwrap.dedent("""
        import resource, sys, torch, torch.distributed as dist
        from torch import nn
        import dist_train as dt
        from dist_train.mesh.shape import MeshShape
        dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=int(sys.argv[2]), world_size=2)
        mesh = dt.ParallelMesh.from_process_group(MeshShape(dp=2), timeout_seconds=30)
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        def module(width):
            with torch.device("meta"):
                return nn.Sequential(nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(16)))
        start = lambda width: dt.shard(module(width), dt.SGD(0.1), mesh, stage=3, init=lambda name, values: values.normal_())
        start(64)
        before = peak()
        engine = start(2000)
        print(peak() - before, sum(engine.held_bytes().values()))
        dist.barrier()
    """)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen([sys.executable, "-c", program, f"{folder}/store", str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        for rank in ranks:
            grown, held = map(int, rank.communicate(timeout=100)[0].split())
            unit = 4 * 2000 * 2000
            assert held == 2 * 16 * unit // 2  # shards of parameters and of gradients
            assert grown <= held + 1.5 * unit
