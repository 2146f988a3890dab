"""Engines whose gradients and weights travel in fewer bytes (comm/compress.py)."""

from __future__ import annotations

import json

import pytest
import torch

import dist_train as dt
from dist_train import checkpoint
from dist_train.comm.collectives import Collectives
from dist_train.comm.compress import Bf16Wire, Exact, Int8Blocks, Int8Weights, TopK
from dist_train.comm.trace import TrafficCounter
from dist_train.config.check import check
from dist_train.zero import Precision, ShardPolicy, ZeroEngine
from tests.ranks import run_ranks
from tests.toy import toy_config, toy_model
from tests.train.test_run import launch, saved
from tests.zero.helpers import gathered, train_steps, weights

LIVE = [11, 1, 7, 3, 2, 11, 5, 9, 4, 8, 6, 10]
WIRES = {"exact": Exact(), "bf16": Bf16Wire(), "int8": Int8Blocks(), "topk": TopK(0.1)}


def _engine(mesh, comm, stage, wire, weight_wire=None, optimizer=None, **options):
    policy, optimizer = ShardPolicy.from_stage(stage), optimizer or dt.SGD(0.1)
    return ZeroEngine(
        toy_model(), optimizer, mesh, comm, policy=policy, wire=WIRES[wire], weight_wire=weight_wire, bucket_bytes=9000, **options
    )


def _train(mesh, comm, stage, wire, weight_wire=None, micro=1, steps=20):
    counter = TrafficCounter()
    engine = _engine(mesh, Collectives(counter), stage, wire, weight_wire, dt.SGD(0.3))
    log = [train_steps(engine, mesh, LIVE, 1, micro)[0] for _ in range(steps)]  # one batch again and again: the loss falls
    traffic, held, padded = counter.per_step(steps), engine.held_bytes(), sum(b.layout.numel for b in engine.buckets)
    assert held == engine.predicted_bytes()
    return log, weights(gathered(engine, mesh, comm)), traffic, padded


@pytest.mark.parametrize(("stage", "micro"), [(0, 1), (1, 3), (2, 1), (3, 3)])
@pytest.mark.parametrize("wire", ["bf16", "int8", "topk"])
def test_a_compressed_run_goes_where_the_exact_one_goes_in_fewer_bytes(wire, stage, micro):
    ranks = 3
    exact = run_ranks(ranks, _train, stage, "exact", None, micro)
    found = run_ranks(ranks, _train, stage, wire, None, micro)
    assert all(log == found[0][0] and all(torch.equal(w[name], found[0][1][name]) for name in w) for log, w, *_ in found)
    start, end, reached = exact[0][0][0][0], exact[0][0][-1][0], found[0][0][-1][0]
    assert end < start - 0.3  # it does train
    assert abs(reached - end) < {"bf16": 0.02, "int8": 0.02, "topk": 0.35}[wire] * (start - end)
    assert reached != end  # and something was lost on the way
    kinds = {0: ["all_reduce/dp"], 1: ["reduce_scatter/dp"], 2: ["reduce_scatter/dp"], 3: ["reduce_scatter/dp"]}[stage]
    before = sum(exact[0][2][kind]["bytes"] for kind in kinds)
    now = sum(kind["bytes"] for name, kind in found[0][2].items() if name.startswith(("all_to_all", *kinds)))
    if stage == 0:
        now += found[0][2]["all_gather/dp"]["bytes"]
    ratio = {"bf16": 0.5, "int8": (1 + 4 / 256) / 4, "topk": 0.1 * 2 * (ranks / 2 if stage == 0 else 1)}[wire]
    assert now / before == pytest.approx(ratio, rel=0.06)  # small slices round up to whole blocks and values


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_quantised_weights_are_seen_by_all_ranks_alike_while_masters_stay_exact(stage):
    exact = run_ranks(2, _train, stage, "exact")
    found = run_ranks(2, _train, stage, "exact", Int8Weights())
    assert found[0][0] == found[1][0]
    start, end, reached = exact[0][0][0][0], exact[0][0][-1][0], found[0][0][-1][0]
    assert abs(reached - end) < 0.1 * (start - end)
    gathers = "all_gather/dp"
    assert found[0][2][gathers]["bytes"] < 0.3 * exact[0][2][gathers]["bytes"]
    first = gather_of_first_step(stage)
    assert all(torch.equal(value, first[1][name]) for name, value in first[0].items())


def gather_of_first_step(stage):
    """Masters after no step at all: what the wire rounds must not come back into them."""
    (found, *_) = run_ranks(2, _untouched, stage)
    return found


def _untouched(mesh, comm, stage):
    engine = _engine(mesh, comm, stage, "exact", Int8Weights(), optimizer=dt.SGD(0.0))
    before = weights(gathered(engine, mesh, comm))
    train_steps(engine, mesh, LIVE, 2)
    return before, weights(gathered(engine, mesh, comm))


def _owing(mesh, comm, stage, folder):
    straight = _engine(mesh, comm, stage, "topk")
    train_steps(straight, mesh, LIVE, 3)
    checkpoint.save(folder, 3, list(straight.pieces()), {}, comm, mesh.world)
    owed = [bucket.residual().clone() for bucket in straight.buckets]
    log = train_steps(straight, mesh, LIVE, 3, first=3)
    resumed = _engine(mesh, comm, stage, "topk")
    checkpoint.load(folder / "step_00000003", resumed.pieces())
    resumed.restored()
    assert all(torch.equal(bucket.residual(), one) and one.any() for bucket, one in zip(resumed.buckets, owed, strict=True))
    assert train_steps(resumed, mesh, LIVE, 3, first=3) == log
    return gathered(straight, mesh, comm), gathered(resumed, mesh, comm)


@pytest.mark.parametrize("stage", [0, 2])
def test_what_waits_to_be_sent_is_in_the_checkpoint(tmp_path, stage):
    for straight, resumed in run_ranks(3, _owing, stage, tmp_path):
        assert all(torch.equal(resumed[name], value) for name, value in straight.items())


def _scaled(mesh, comm, scales, spoil):
    engine = _engine(mesh, comm, 2, "topk", precision=Precision())
    log, owed = [], []
    for step, scale in enumerate(scales):
        engine.loss_scale = scale
        log += train_steps(engine, mesh, LIVE, 1, first=step, spoil=spoil)
        owed.append(torch.cat([bucket.residual() / scale for bucket in engine.buckets]))
    return log, owed


def test_F06_what_waits_follows_the_loss_scale():
    plain, scaled = (run_ranks(2, _scaled, scales, None) for scales in ([1.0] * 4, [1024.0, 1024.0, 512.0, 4096.0]))
    for (log, owed), (expected_log, expected) in zip(scaled, plain, strict=True):
        torch.testing.assert_close(torch.tensor(log), torch.tensor(expected_log), rtol=1e-5, atol=0)
        torch.testing.assert_close(owed[-1], expected[-1], rtol=1e-5, atol=1e-9)


def test_F10_a_skipped_step_leaves_what_waits_as_it_was():
    for log, owed in run_ranks(3, _scaled, [1.0] * 4, 2):
        assert [skipped for *_, skipped in log] == [False, False, True, False]
        assert torch.equal(owed[1], owed[2]) and not torch.equal(owed[2], owed[3]) and all(one.isfinite().all() for one in owed)


RUN = ["train.micro_batch=2", "train.global_batch=8", "data.eval_fraction=0", "optim=adamw", "optim.lr=0.01"]
CASES = [
    ["shard.compress=topk", "shard.compress_fraction=0.2", "shard.stage=1"],
    ["shard.compress=int8", "shard.compress_weights=int8", "shard.stage=3"],
    ["shard.offload=nvme", "shard.offload_params=nvme", "shard.stage=3"],
    ["precision=bf16", "precision.master=split", "shard.stage=2", "shard.offload=host"],
]


@pytest.mark.parametrize("overrides", CASES, ids=[" ".join(case) for case in CASES])
def test_a_run_with_these_keys_resumes_bitwise_and_tells_its_memory(tmp_path, overrides):
    if "nvme" in overrides[0]:
        overrides = [*overrides, f"shard.offload_dir={tmp_path}"]
    assert launch(2, tmp_path / "a", *RUN, *overrides, "train.steps=6") == 0
    for steps in (2, 4, 6):
        assert launch(2, tmp_path / "b", *RUN, *overrides, f"train.steps={steps}") == 0
    a, b = saved(tmp_path / "a", 6), saved(tmp_path / "b", 6)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    memory = json.loads((tmp_path / "b" / "summary.json").read_text())["memory"]
    assert memory["measured"] == memory["predicted"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["shard.compress=int8", "shard.reduce_dtype=bf16"], "shard.reduce_dtype"),
        (["shard.compress_weights=int8"], "shard.compress_weights"),
        (["shard.compress=topk", "shard.compress_fraction=0"], "shard.compress_fraction"),
        (["shard.offload_params=host", "shard.stage=2"], "shard.offload_params"),
        (["shard.offload=nvme"], "shard.offload_dir"),
        (["shard.offload=nvme", "shard.offload_dir=no/such/folder"], "shard.offload_dir"),
        (["shard.offload=host", "shard.offload_dir=configs"], "shard.offload_dir"),
        (["precision.master=split"], "precision.master"),
        (["shard.engine=ddp", "mesh.dp=2", "shard.offload=host"], "shard.offload"),
    ],
)
def test_what_does_not_go_together_is_refused_before_ranks_start(overrides, key):
    (problem,) = check(toy_config(*overrides), 2 if "mesh.dp=2" in overrides else 1)
    assert problem.key == key
