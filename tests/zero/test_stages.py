"""Stages 1 to 3 beside stage 0: the same mathematics, less memory, the bytes that the arithmetic says."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import dist_train as dt
from dist_train.comm.collectives import Collectives
from dist_train.comm.trace import DelayedCollectives, TrafficCounter
from dist_train.ops.cross_entropy import cross_entropy_sum
from dist_train.zero import Precision, ShardPolicy, ZeroEngine
from tests.ranks import run_ranks
from tests.toy import toy_batch, toy_model
from tests.zero.helpers import gathered

LIVE = [11, 1, 7, 3, 2, 11, 5, 9, 4, 8, 6, 10]
OPTIMIZERS = {"sgd": dt.SGD(0.1), "adamw": dt.AdamW(1e-2)}


def train(mesh, comm, stage, micro=None, optimizer="sgd", dtype=None, remat="none", overrides=(), steps=3, **options):
    from dist_train.remat.policy import apply_remat

    model = toy_model(*overrides)
    apply_remat(model, remat)
    policy = ShardPolicy.from_stage(stage)
    engine = ZeroEngine(model, OPTIMIZERS[optimizer], mesh, comm, policy=policy, precision=Precision(compute=dtype), **options)
    each = len(LIVE) // mesh.data.size
    micro = micro or each
    log = []
    for step in range(steps):
        tokens, labels = toy_batch(LIVE, seed=step)
        torch.manual_seed(step)
        total, count = 0.0, 0
        for start in range(mesh.data.index * each, (mesh.data.index + 1) * each, micro):
            rows = slice(start, min(start + micro, (mesh.data.index + 1) * each))
            objective, entropy = cross_entropy_sum(model(tokens[rows]), labels[rows])
            engine.backward(objective, last=rows.stop == (mesh.data.index + 1) * each)
            total, count = total + float(entropy), count + int((labels[rows] != -100).sum())
        report = engine.step(weight=float(count), sums=(total, count))
        log.append((float(report.sums[0] / report.sums[1]), float(report.grad_norm)))
    return log, gathered(engine, mesh, comm)


def run(ranks, **options):
    results = run_ranks(ranks, functools.partial(train, **options))
    assert all(log == results[0][0] for log, _ in results)
    return results[0]


def assert_equal(a, b):
    assert a[0] == b[0]
    assert a[1].keys() == b[1].keys()
    for name in a[1]:
        assert torch.equal(a[1][name], b[1][name]), name


@pytest.mark.parametrize("remat", ["selective", "full"])
def test_F41_stage_3_with_recompute_and_dropout_is_stage_0_without(remat):
    options = {"micro": 2, "overrides": ("model.dropout=0.3",)}
    assert_equal(run(2, stage=3, remat=remat, **options), run(2, stage=2, remat="none", **options))


class Checkpointed(nn.Module):
    """A user's own recompute: it calls whole units again in the middle of backward, hooks included."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def _checkpointed(mesh, comm, stage, early_stop):
    torch.manual_seed(0)
    engine = dt.shard(Checkpointed(), dt.SGD(0.1), mesh, stage=stage)
    with set_checkpoint_early_stop(early_stop):
        for step in range(3):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + mesh.rank))
            engine.backward(engine.module(x).square().mean())
            engine.step()
    return gathered(engine, mesh, comm)


@pytest.mark.parametrize("early_stop", [True, False])
def test_recompute_does_not_release_what_backward_still_needs(early_stop):
    (expected, *_), (found, *_) = run_ranks(2, _checkpointed, 0, early_stop), run_ranks(2, _checkpointed, 3, early_stop)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def _timed(mesh, comm, stage, overlap, seed, bucket_bytes):
    import random

    shake = random.Random(seed * 100 + mesh.rank)
    late = DelayedCollectives(lambda: shake.random() * 0.003)
    return train(mesh, late, stage, micro=2, optimizer="adamw", overlap=overlap, bucket_bytes=bucket_bytes, clip_norm=0.3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_F42_timing_overlap_and_bucket_size_change_no_bit_of_a_sharded_step(stage):
    (base, *_) = run_ranks(2, _timed, stage, False, 0, 25e6)
    for overlap, seed, bucket_bytes in [(True, 1, 600), (True, 2, 4000), (False, 3, 100)]:
        (found, *_) = run_ranks(2, _timed, stage, overlap, seed, bucket_bytes)
        assert_equal(found, base)


@pytest.mark.parametrize("tied", ["false", "true"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_F07_every_row_of_a_tied_or_untied_embedding_moves_as_in_one_process(ranks, tied):
    overrides = (f"model.tie_embeddings={tied}",)
    expected = run(1, stage=0, overrides=overrides)
    found = run(ranks, stage=3, overrides=overrides)
    start = toy_model(*overrides).embed.weight
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-7, msg=name)
    moved = [(result[1]["model/embed.weight"] != start).any(dim=1).sum() for result in (found, expected)]
    assert moved[0] == moved[1] > 0


def _frozen_base(mesh, comm, stage, remat):
    from dist_train.remat.policy import apply_remat

    class Adapted(nn.Module):
        """A frozen linear layer with a trainable low-rank correction beside it."""

        def __init__(self, base):
            super().__init__()
            self.base = base
            generator = torch.Generator().manual_seed(1)
            self.down = nn.Parameter(torch.randn(2, base.in_features, generator=generator) * 0.1)
            self.up = nn.Parameter(torch.randn(base.out_features, 2, generator=generator) * 0.1)

        def forward(self, x):
            return self.base(x) + (x @ self.down.t()) @ self.up.t()

    model = toy_model()
    for param in model.parameters():
        param.requires_grad_(False)
    for block in model.blocks:
        for name in ("q", "v"):
            setattr(block.attention, name, Adapted(getattr(block.attention, name)))
    apply_remat(model, remat)
    engine = ZeroEngine(model, dt.SGD(0.1), mesh, comm, policy=ShardPolicy.from_stage(stage))
    before = gathered(engine, mesh, comm)
    for step in range(3):
        tokens, labels = toy_batch([5] * 2, seed=10 * step + mesh.rank)
        engine.backward(cross_entropy_sum(model(tokens), labels)[0], last=True)
        engine.step()
    after = gathered(engine, mesh, comm)
    return before, after, engine.held_bytes()


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_F08_frozen_parameters_work_at_every_stage_with_recompute(stage, remat):
    (_, expected, full), *_ = run_ranks(2, _frozen_base, 0, "none")
    for before, after, held in run_ranks(2, _frozen_base, stage, remat):
        moved = {name for name in after if name.startswith("model/") and not torch.equal(before[name], after[name])}
        assert moved and all(name.endswith(("down", "up")) for name in moved)
        for name, value in expected.items():
            assert torch.equal(after[name], value), name
        assert held["parameters"] < full["parameters"] if stage == 3 else True


def _traffic(mesh, comm, stage, micro):
    counter = TrafficCounter()
    model = toy_model()
    engine = ZeroEngine(model, dt.SGD(0.1), mesh, Collectives(counter), policy=ShardPolicy.from_stage(stage), bucket_bytes=4000)
    tokens, labels = toy_batch([5] * 2, seed=mesh.rank)
    for _ in range(2):
        counter.reset()
        for index in range(micro):
            engine.backward(cross_entropy_sum(model(tokens), labels)[0], last=index == micro - 1)
        engine.step()
    padded = sum(bucket.layout.numel for bucket in engine.buckets)
    sizes = [p.numel() for p in model.parameters()]
    return counter.per_step(1), padded, sizes, len(engine.buckets)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_traffic_of_a_step_is_the_arithmetic(ranks, stage, micro):
    times = {0: 2, 1: 2, 2: micro + 1, 3: 3 * micro}[stage]  # passes over all parameters, each (N-1)/N of their bytes
    for per_step, padded, sizes, buckets in run_ranks(ranks, _traffic, stage, micro):
        assert sum(sizes) <= padded <= sum(sizes) + 63 * len(sizes) + buckets * ranks * 64
        scalars = 3 * 2 * 8 * (ranks - 1) / ranks
        sent = sum(kind["bytes"] for kind in per_step.values()) - scalars
        assert sent == pytest.approx(times * 4 * padded * (ranks - 1) / ranks, abs=times * buckets)


def _held(mesh, comm, stage, dtype):
    model = toy_model()
    precision = Precision(compute=dtype, grad=dtype or torch.float32, reduce=dtype or torch.float32)
    policy = ShardPolicy.from_stage(stage)
    engine = ZeroEngine(model, dt.AdamW(), mesh, comm, policy=policy, precision=precision, bucket_bytes=9000)
    tokens, labels = toy_batch([5] * 2, seed=mesh.rank)
    for _ in range(2):
        engine.backward(cross_entropy_sum(model(tokens), labels)[0])
        engine.step()
    from dist_train.zero.layout import state_bytes

    layouts, size = [bucket.layout for bucket in engine.buckets], precision.grad.itemsize
    master = 4 if dtype else 0
    moments = {"decay": 8, "no_decay": 8}
    predicted = state_bytes(layouts, engine.policy, mesh.data.index, compute=size, grad=size, master=master, moments=moments)
    sizes = [p.numel() for p in model.parameters()]
    return engine.held_bytes(), predicted, sum(sizes), len(layouts) + len(sizes)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 4])
def test_U01_memory_between_steps_is_the_arithmetic_of_ZeRO(ranks, stage):
    results = run_ranks(ranks, _held, stage, torch.bfloat16)
    for held, predicted, psi, places in results:
        assert held == predicted
        law = {0: 16 * psi, 1: 4 * psi + 12 * psi / ranks, 2: 2 * psi + 14 * psi / ranks, 3: 16 * psi / ranks}[stage]
        assert sum(held.values()) <= law + 16 * 64 * 3 * places  # padding of slots and shards
    assert sum(sum(held.values()) for held, *_ in results) >= ranks * law
    for held, predicted, _, _ in run_ranks(ranks, _held, stage, None):
        assert held == predicted


def _replicated(mesh, comm, stage, replicas):
    counter = TrafficCounter()
    log, whole = train(mesh, Collectives(counter), stage, optimizer="adamw", clip_norm=0.5, replicas=replicas, steps=3)
    model = toy_model()
    engine = ZeroEngine(
        model, dt.AdamW(), mesh, Collectives(counter), policy=ShardPolicy.from_stage(stage), replicas=replicas, bucket_bytes=4000
    )
    tokens, labels = toy_batch([5] * 2, seed=mesh.rank)
    for _ in range(2):  # in the first step of stage 3 ranks compare what they gather
        counter.reset()
        engine.backward(cross_entropy_sum(model(tokens), labels)[0])
        engine.step()
    return log, whole, counter.per_step(1), sum(b.layout.numel for b in engine.buckets), engine.held_bytes()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_replicas_shard_inside_a_run_and_sum_across_runs(stage):
    base = run(4, stage=0, optimizer="adamw", clip_norm=0.5)
    results = run_ranks(4, _replicated, stage, 2)
    for log, whole, traffic, padded, held in results:
        torch.testing.assert_close(torch.tensor(log), torch.tensor(base[0]), rtol=1e-6, atol=0)
        for name, value in base[1].items():
            torch.testing.assert_close(whole[name], value, rtol=2e-5, atol=1e-6, msg=name)
        assert 0.8 * 4 * padded < held["moments"] <= 4 * padded  # half of 8 bytes each, as on two ranks
        gathers = {1: 1, 2: 1, 3: 2}[stage]
        assert traffic["reduce_scatter/shard"]["bytes"] == 4 * padded / 2
        assert traffic["all_gather/shard"]["bytes"] == gathers * 4 * padded / 2
        assert traffic["all_reduce/replica"]["bytes"] == 4 * padded / 2  # 2(R-1)/R of the slice
        assert "all_reduce/shard" not in traffic and traffic["all_reduce/world"]["calls"] == 1


class Skips(nn.Module):
    """Units of every kind: convolution and batch norm, nested lists, a skip connection, a parameter used outside its module."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.down = nn.ModuleList([nn.ModuleList([nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)]) for _ in range(2)])
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True)
        self.up = nn.ModuleDict({"a": nn.Conv2d(8, 4, 1), "b": nn.Conv2d(8, 3, 1)})
        self.scale = nn.ParameterList([torch.ones(()), torch.ones(1), torch.zeros(0)])

    def forward(self, x):
        x = self.stem(x)
        skips = [x]
        for conv, norm in self.down:
            x = torch.relu(norm(conv(x)))
            skips.append(x)
        flat = x.flatten(2).transpose(1, 2)
        x = (flat + self.mix(flat, flat, flat, need_weights=False)[0]).transpose(1, 2).view_as(x)
        x = self.up["a"](torch.cat([x, skips[1]], 1)) * self.scale[0]
        return self.up["b"](torch.cat([x, skips[0]], 1)) * self.scale[1]


def _skips(mesh, comm, stage):
    torch.manual_seed(0)
    model = Skips()
    engine = dt.shard(model, dt.AdamW(1e-2), mesh, stage=stage, bucket_bytes=500)
    for step in range(3):
        x = torch.randn(4, 1, 6, 6, generator=torch.Generator().manual_seed(step * 10 + mesh.rank))
        engine.backward(engine.module(x).square().mean())
        engine.step()
    return gathered(engine, mesh, Collectives())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_F05_any_module_trains_the_same_at_every_stage(stage):
    (expected, *_), (found, *_) = run_ranks(2, _skips, 0), run_ranks(2, _skips, stage)
    for name, value in expected.items():
        if "running" not in name and "batches" not in name:  # statistics are of each rank's own batch
            assert torch.equal(found[name], value), name
