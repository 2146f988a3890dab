from __future__ import annotations

import functools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dist_train as dt
from dist_train.comm.collectives import Collectives
from dist_train.comm.trace import DelayedCollectives, TrafficCounter
from dist_train.mesh.mesh import ParallelMesh
from dist_train.ops.cross_entropy import cross_entropy_sum
from dist_train.zero import Precision, ShardPolicy, ZeroEngine
from dist_train.zero.norm import sum_of_squares
from tests.ranks import RankFailure, run_ranks
from tests.toy import toy_batch, toy_model

SGD = dt.SGD(lr=0.1)


def weights(module):
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def assert_close(found, expected, tolerance=1e-5):
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= tolerance * value.abs().max().clamp(min=1e-3) if value.numel() else True, name


def train_toy(mesh, comm, live, micro, steps, optimizer=SGD, remat="none", dtype=None, loss_scale=1.0, **options):
    """`live`: live tokens of every row of the global batch; rank r takes its own run of rows, `micro` at a time."""
    model = toy_model()
    if remat != "none":
        from dist_train.remat.policy import apply_remat

        apply_remat(model, remat)
    engine = ZeroEngine(model, optimizer, mesh, comm, precision=Precision(compute=dtype), **options)
    engine.loss_scale = loss_scale
    each = len(live) // mesh.data.size
    mine = range(mesh.data.index * each, (mesh.data.index + 1) * each)
    log = []
    for step in range(steps):
        tokens, labels = toy_batch(live, seed=step)
        loss_sum, count = 0.0, 0
        for start in range(mine.start, mine.stop, micro):
            rows = slice(start, start + micro)
            objective, entropy = cross_entropy_sum(model(tokens[rows]), labels[rows])
            engine.backward(objective, last=start + micro >= mine.stop)
            loss_sum, count = loss_sum + float(entropy), count + int((labels[rows] != -100).sum())
        report = engine.step(weight=float(count), sums=(loss_sum, count))
        log.append((float(report.sums[0] / report.sums[1]), float(report.grad_norm)))
    return log, weights(model)


def reference_toy(live, steps, clip=0.0, kind=torch.optim.SGD, **options):
    """One process, one batch, torch alone."""
    model = toy_model()
    optimizer = kind(model.parameters(), **(options or {"lr": 0.1}))
    log = []
    for step in range(steps):
        tokens, labels = toy_batch(live, seed=step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip if clip else float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        log.append((loss.item(), norm.item()))
    return log, weights(model)


LIVE = [11, 1, 7, 3, 2, 11, 5, 9]


@pytest.mark.parametrize(("ranks", "micro"), [(1, 8), (1, 3), (2, 1), (2, 2), (4, 1), (4, 2)])
def test_F01_every_split_of_a_global_batch_gives_the_token_weighted_gradient(ranks, micro):
    expected_log, expected = reference_toy(LIVE, 3)
    for log, found in run_ranks(ranks, functools.partial(train_toy, live=LIVE, micro=micro, steps=3)):
        torch.testing.assert_close(torch.tensor(log), torch.tensor(expected_log), rtol=1e-5, atol=0)
        assert_close(found, expected)


@pytest.mark.parametrize("dead", [[0, 0], [7, 0], [0, 9]])
def test_F12_ranks_without_live_tokens_add_nothing_and_an_empty_step_changes_nothing(dead):
    results = run_ranks(2, functools.partial(train_toy, live=dead, micro=1, steps=2))
    start = weights(toy_model())
    for _, found in results:
        assert all(value.isfinite().all() for value in found.values())
        if sum(dead) == 0:
            assert all(torch.equal(found[name], start[name]) for name in start)
        else:
            assert_close(found, reference_toy(dead, 2)[1])


def test_F06_unscaling_comes_before_the_norm_and_clipping_acts_on_the_true_norm():
    (log, _), *_ = run_ranks(1, functools.partial(train_toy, live=LIVE, micro=8, steps=1))
    limit = log[0][1] / 2
    expected_log, expected = reference_toy(LIVE, 3, clip=limit)
    for scale in (1.0, 1024.0):
        train = functools.partial(train_toy, live=LIVE, micro=1, steps=3, clip_norm=limit, loss_scale=scale)
        for log, found in run_ranks(2, train):
            torch.testing.assert_close(torch.tensor(log), torch.tensor(expected_log), rtol=1e-5, atol=0)
            assert_close(found, expected)
    ((_, loose),) = run_ranks(1, functools.partial(train_toy, live=LIVE, micro=8, steps=3, clip_norm=100 * limit))
    assert_close(loose, reference_toy(LIVE, 3)[1])  # a norm below the limit is left alone


def _timed(mesh, comm, overlap, seed, bucket_bytes):
    shake = random.Random(seed * 100 + mesh.rank)
    late = DelayedCollectives(lambda: shake.random() * 0.004)
    optimizer = dt.AdamW(lr=1e-2)
    return train_toy(mesh, late, LIVE, 2, 2, optimizer=optimizer, overlap=overlap, bucket_bytes=bucket_bytes, clip_norm=0.1)


def test_F42_neither_overlap_nor_timing_nor_bucket_size_changes_a_bit():
    base = run_ranks(2, _timed, False, 0, 25e6)
    for overlap, seed, bucket_bytes in [(True, 1, 600), (True, 2, 600), (True, 3, 4000), (False, 4, 100), (True, 5, 1)]:
        for (log, found), (base_log, expected) in zip(run_ranks(2, _timed, overlap, seed, bucket_bytes), base, strict=True):
            assert log == base_log
            assert all(torch.equal(found[name], expected[name]) for name in expected)


def _careless(mesh, comm, pattern, last):
    """A user's loop that never says which micro-batch is the last, with another count in each step."""
    model = toy_model()
    engine = ZeroEngine(model, SGD, mesh, comm, bucket_bytes=2000)
    for step, count in enumerate(pattern):
        for index in range(count):
            tokens, labels = toy_batch([5] * mesh.data.size, seed=10 * step + index)
            row = slice(mesh.data.index, mesh.data.index + 1)
            logits = model(tokens[row])
            engine.backward(F.cross_entropy(logits.flatten(0, 1), labels[row].flatten()) / count, last=last)
        engine.step()
    return weights(model)


def test_F43_backward_called_several_times_accumulates_whatever_the_loop_tells():
    model = toy_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, count in enumerate([3, 1, 2]):
        for index in range(count):
            tokens, labels = toy_batch([5, 5], seed=10 * step + index)
            (F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    for last in (True, False):
        for found in run_ranks(2, _careless, [3, 1, 2], last):
            assert_close(found, weights(model))


class Odd(nn.Module):
    """Parameters of every awkward kind; `branch` is used only where asked."""

    def __init__(self, shapes=((8,), (0,), (24,), (1,), (3,), ())):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.values = nn.ParameterList([torch.randn(shape, generator=generator) for shape in shapes])
        self.transposed = nn.Parameter(torch.randn(5, 3, generator=generator).t())
        self.tied = self.values[0]
        self.branch, self.never = nn.Linear(3, 5), nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        with torch.no_grad():
            for param in (*self.branch.parameters(), *self.never.parameters()):
                param.copy_(torch.randn(param.shape, generator=generator))

    def forward(self, x, branch=True):
        total = sum((value * x.mean()).square().sum() for value in self.values) + (self.tied * 2).sum()
        total = total + (x @ self.transposed).square().sum() * self.frozen.sum()
        return total + self.branch(x).square().sum() if branch else total


def _odd(mesh, comm, steps, branch_ranks, shapes):
    model = Odd(shapes)
    engine = ZeroEngine(model, dt.SGD(lr=1e-3, momentum=0.9), mesh, comm, bucket_bytes=100)
    with pytest.warns(UserWarning, match=r"never\.weight"):
        for step in range(steps):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(step * 10 + mesh.rank))
            engine.backward(model(x, branch=mesh.rank in branch_ranks))
            engine.step()
    return weights(model)


SHAPES = [((8,), (0,), (24,), (1,), (3,), ()), ((1,), (1,)), ((3,), (0,))]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_F04_F05_F09_odd_unused_and_strided_parameters_train_like_one_process(ranks, shapes):
    branch_ranks = list(range(ranks))[:1]  # every other rank skips a branch
    model = Odd(shapes)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3, momentum=0.9)
    for step in range(3):
        for rank in range(ranks):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(step * 10 + rank))
            (model(x, branch=rank in branch_ranks) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(ranks, _odd, 3, branch_ranks, shapes):
        assert_close(found, weights(model))


def _poisoned(mesh, comm, culprit, value):
    model = toy_model()
    engine = ZeroEngine(model, dt.AdamW(lr=1e-2), mesh, comm, clip_norm=0.5)
    skipped, snapshots = [], []
    for step in range(3):
        tokens, labels = toy_batch([5], seed=step * 10 + mesh.rank)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        if step == 1 and mesh.rank == culprit:
            loss = loss + (model.blocks[0].attention_norm.weight[3] * value)
        engine.backward(loss)
        report = engine.step()
        skipped.append(float(report.skipped))
        snapshots.append((weights(model), {float(p.tensor) for p in engine.pieces() if p.name.endswith("/step")}))
    return skipped, snapshots


@pytest.mark.parametrize(("culprit", "value"), [(0, float("inf")), (3, float("inf")), (1, float("nan"))])
def test_F10_one_rank_with_a_non_finite_gradient_makes_all_skip_together(culprit, value):
    for skipped, snapshots in run_ranks(4, _poisoned, culprit, value):
        assert skipped == [0.0, 1.0, 0.0]
        (first, _), (second, count), (third, final) = snapshots
        assert all(torch.equal(first[name], second[name]) for name in first)
        assert any(not torch.equal(second[name], third[name]) for name in first)
        assert (count, final) == ({1.0}, {2.0})
        assert all(value.isfinite().all() for value in third.values())


def test_F44_bf16_keeps_an_fp32_master_and_moments_and_the_weights_are_its_rounding():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    bf16 = Precision(compute=torch.bfloat16)
    engine = ZeroEngine(model, dt.Adam(lr=1e-4), ParallelMesh.single(), precision=bf16)
    plain = nn.Parameter(torch.ones(1, 1))
    optimizer = torch.optim.Adam([plain], lr=1e-4, betas=(0.9, 0.95))
    for _ in range(200):
        engine.backward(model(torch.ones(1, 1, dtype=torch.bfloat16)).sum().float())
        engine.step()
        plain.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    pieces = {piece.name: piece.tensor for piece in engine.pieces()}
    assert {name: tensor.dtype for name, tensor in pieces.items()} == dict.fromkeys(pieces, torch.float32)
    moved = 1 - pieces["model/weight"].item()
    assert abs(moved - (1 - plain.item())) < 0.01 * moved and moved > 0.015
    assert model.weight.dtype == torch.bfloat16
    assert torch.equal(model.weight.detach(), pieces["model/weight"].bfloat16())


def _restored(mesh, comm, dtype):
    kind = functools.partial(ZeroEngine, optimizer=dt.AdamW(lr=0.0, weight_decay=0.0), mesh=mesh, comm=comm)
    first, second = toy_model(), toy_model()
    a = kind(first, precision=Precision(compute=dtype), bucket_bytes=500)
    with torch.no_grad():
        for param in second.parameters():
            param.add_(1.0)
    b = kind(second, precision=Precision(compute=dtype))
    saved = {piece.name: piece.tensor.clone() for piece in a.pieces()}
    for piece in b.pieces():
        piece.tensor.copy_(saved[piece.name])
    b.restored()
    before = weights(second)
    tokens, labels = toy_batch([5], seed=mesh.rank)
    b.backward(cross_entropy_sum(second(tokens), labels)[0])
    b.step()
    return weights(first), before, weights(second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_F13_loaded_weights_reach_master_and_module_alike(dtype):
    for saved, loaded, stepped in run_ranks(2, _restored, dtype):
        for name in saved:
            assert torch.equal(saved[name], loaded[name]) and torch.equal(loaded[name], stepped[name])


def _traffic(mesh, comm, micro):
    counter = TrafficCounter()
    model = toy_model()
    comm = Collectives(counter)
    engine = ZeroEngine(model, SGD, mesh, comm, bucket_bytes=4000)
    counter.reset()
    tokens, labels = toy_batch([5] * 3, seed=mesh.rank)
    for index in range(micro):
        engine.backward(cross_entropy_sum(model(tokens), labels)[0], last=index == micro - 1)
    engine.step()
    padded = sum(bucket.layout.numel for bucket in engine.buckets)
    sizes = [p.numel() for p in model.parameters()]
    return counter.per_step(1), padded, sizes, len(engine.buckets)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_traffic_is_one_all_reduce_of_the_parameters_and_one_of_scalars(ranks, micro):
    for per_step, padded, sizes, buckets in run_ranks(ranks, _traffic, micro):
        assert set(per_step) == {"all_reduce/dp", "all_reduce/world"}
        assert per_step["all_reduce/dp"]["calls"] == buckets and per_step["all_reduce/world"]["calls"] == 1
        # Sum of squares, weight, parameters without a gradient: fp64.
        assert per_step["all_reduce/world"]["bytes"] == pytest.approx(3 * 8 * 2 * (ranks - 1) / ranks, abs=1)
        assert per_step["all_reduce/dp"]["bytes"] == pytest.approx(2 * 4 * padded * (ranks - 1) / ranks, abs=buckets)
        assert sum(sizes) <= padded <= sum(sizes) + 63 * len(sizes) + buckets * ranks * 64


def test_held_bytes_are_the_arithmetic_of_the_precision():
    model = toy_model()
    sizes = [p.numel() for p in model.parameters()]
    precision = Precision(compute=torch.bfloat16, grad=torch.bfloat16, reduce=torch.bfloat16)
    engine = ZeroEngine(model, dt.AdamW(), ParallelMesh.single(), precision=precision)
    padded = engine.buckets[0].layout.numel
    expected = {"parameters": 2, "masters": 4, "gradients": 2, "moments": 8}
    assert engine.held_bytes() == {kind: each * padded for kind, each in expected.items()}
    assert sum(sizes) <= padded <= sum(-(-size // 64) * 64 for size in sizes)


def _seeds_differ(mesh, comm):
    torch.manual_seed(mesh.rank)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    model[1].running_mean.fill_(float(mesh.rank))
    ZeroEngine(model, SGD, mesh, comm)
    return weights(model), model[1].running_mean.clone()


def test_all_ranks_start_from_the_weights_and_buffers_of_rank_0():
    (first, mean), *others = run_ranks(3, _seeds_differ)
    for found, other_mean in others:
        assert all(torch.equal(found[name], first[name]) for name in first) and torch.equal(mean, other_mean)


def _asleep(mesh, comm):
    ZeroEngine(toy_model(), SGD, mesh, comm).step()


def test_misuse_is_told_at_once():
    model = toy_model()
    engine = dt.shard(model, SGD, ParallelMesh.single())
    with pytest.raises(RuntimeError, match="without a backward"):
        engine.step()
    tokens, labels = toy_batch([5])
    with pytest.raises(RuntimeError, match="engine.backward"):
        cross_entropy_sum(model(tokens), labels)[0].backward()
    with pytest.raises(ValueError, match="nothing to train"):
        dt.shard(nn.ReLU(), SGD, ParallelMesh.single())
    with pytest.raises(ValueError, match="sharded"):
        ShardPolicy(param=True)
    with pytest.raises(RankFailure, match="without a backward"):
        run_ranks(2, _asleep)


def test_sum_of_squares_is_that_of_fp64_for_any_cut():
    x = torch.randn(200_003, generator=torch.Generator().manual_seed(0))
    exact = x.double().square().sum()
    for cuts in ([200_003], [1, 200_002], [70_000, 130_003]):
        found = sum_of_squares(x.split(cuts), torch.device("cpu"))
        assert abs(found - exact) <= 1e-14 * exact
