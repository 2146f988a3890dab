"""Overlap, on a clock of its own: compute and collectives are stand-ins that take one tick a layer, so every figure is exact."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import dist_train as dt
from dist_train.comm.collectives import Collectives, Handle
from dist_train.mesh.mesh import Group, ParallelMesh
from dist_train.zero import ShardPolicy, ZeroEngine

LAYERS = 6


class Clock:
    """The host's time: computing moves it, and waiting moves it to where the awaited thing is done."""

    def __init__(self) -> None:
        self.now = 0.0

    def wait_until(self, done: float) -> None:
        self.now = max(self.now, done)


class _Compute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock):
        ctx.clock = clock
        clock.now += 1
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.now += 1
        return grad, None


class Layer(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.linear, self.clock = nn.Linear(8, 8), clock

    def forward(self, x):
        return _Compute.apply(self.linear(x), self.clock)


class Model(nn.Module):
    def __init__(self, clock):
        super().__init__()
        self.blocks = nn.ModuleList(Layer(clock) for _ in range(LAYERS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Wire(Collectives):
    """A link that works beside the host: a bucket's collective takes one tick, one after the other."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock, self.free_at, self.busy = clock, 0.0, 0.0

    def _travel(self, x: Tensor, group: Group) -> Handle:
        if group.size == 1 or x.numel() <= 16:  # nothing to send, or only the scalars of a step
            return Handle()
        self.free_at = done = max(self.free_at, self.clock.now) + 1
        self.busy += 1
        return Handle(then=lambda: self.clock.wait_until(done))

    def all_reduce(self, x, group, op="sum"):
        return self._travel(x, group)

    def reduce_scatter(self, out, x, group):
        out.copy_(x[: out.numel()])
        return self._travel(x, group)

    def all_gather(self, out, x, group):
        out.view(group.size, -1).copy_(x.expand(group.size, -1))
        return self._travel(out, group)

    def broadcast(self, x, group, source=0):
        return Handle()

    def broadcast_object(self, value, group, source=0):
        return value


def ticks(stage: int, overlap: bool) -> tuple[float, float]:
    """Ticks of a step once the order of units is known, and those for which the link was busy in it."""
    clock, single = Clock(), ParallelMesh.single()
    pair = Group("dp", (0, 1), 0)  # two ranks by name: the wire stands in for the other one
    mesh = replace(single, dp=pair, data=pair)
    wire = Wire(clock)
    engine = ZeroEngine(
        Model(clock), dt.SGD(0.1), mesh, wire, policy=ShardPolicy.from_stage(stage), overlap=overlap, bucket_bytes=300
    )
    assert len(engine.buckets) == LAYERS
    for _ in range(2):
        start, wire.busy = clock.now, 0.0
        engine.backward(engine.module(torch.ones(2, 8, requires_grad=True)).sum())
        engine.step()
    return clock.now - start, wire.busy


COMPUTE = 2 * LAYERS


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_reductions_travel_while_backward_computes(stage):
    publish = LAYERS if stage else 0  # gathers after the step
    assert ticks(stage, overlap=False) == (COMPUTE + LAYERS + publish, LAYERS + publish)
    # Each reduction but the last hides behind the backward of the layer before.
    assert ticks(stage, overlap=True) == (COMPUTE + 1 + publish, LAYERS + publish)


def test_stage_3_gathers_the_next_unit_while_this_one_computes():
    total, busy = ticks(3, overlap=True)
    assert busy == 3 * LAYERS  # a gather for forward, one for backward, a reduction
    # Forward: the first gather is waited for, the others hide. Backward: each layer's tick of compute hides one of its two
    # collectives, so it is bound by the link.
    assert total <= (1 + LAYERS) + 2 * LAYERS + 1
    assert total >= max(COMPUTE, busy)
