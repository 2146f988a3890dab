"""The executor on real ranks with stand-ins for compute: the order of work, and the bubble that its clock shows.

The clock is simulated, so that no other process can disturb it: a stand-in moves its rank's clock on, a message carries the
time at which it was sent, and who waits for it is at that time at least.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from dist_train.comm.collectives import Handle
from dist_train.mesh.shape import MeshShape
from dist_train.model.transformer import Cut
from dist_train.pipeline import executor
from dist_train.pipeline.executor import Executor
from dist_train.pipeline.orders import SCHEDULES
from dist_train.pipeline.schedule import Schedule
from dist_train.pipeline.timeline import ideal_bubble
from tests.ranks import mesh_of, run_ranks

CASES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero_bubble": 1, "zero_bubble_v": 2}


@dataclass
class Rows:
    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor
    positions_BT: torch.Tensor
    documents_BT: torch.Tensor


class Clock:
    """Simulated seconds of a rank: one for a forward and for each half of a backward."""

    def __init__(self):
        self.now = 0.0


class Wire:
    """Sends and receives whose last feature is the time."""

    def __init__(self, comm, clock):
        self.comm, self.clock = comm, clock

    def send(self, x, group, to):
        stamped = torch.cat([x[..., :-1], torch.full_like(x[..., -1:], self.clock.now)], -1)
        return self.comm.send(stamped, group, to)

    def receive(self, out, group, source):
        handle = self.comm.receive(out, group, source)

        def arrive():
            handle.wait()
            self.clock.now = max(self.clock.now, out[..., -1].max().item())

        return Handle(then=arrive)


class Worker(nn.Module):
    """A model in parts that takes its time and passes on what it got plus one."""

    def __init__(self, cuts, layers, clock):
        super().__init__()
        self.cuts, self.config, self.blocks, self.clock = cuts, SimpleNamespace(layers=layers), nn.ModuleList(), clock
        self.embed, self.positions, self.norm, self.head = nn.Module(), None, nn.Module(), nn.Module()
        for cut in cuts:
            for layer in range(*cut):
                self.blocks.add_module(str(layer), nn.Module())

    def forward(self, tokens_BT, positions_BT, documents_BT, labels_BT=None, z_loss=0.0, cut=0, x_BTD=None):
        self.clock.now += 1
        x_BTD = tokens_BT[..., None].expand(-1, -1, 2).clone().requires_grad_() if x_BTD is None else x_BTD
        out = x_BTD + 1
        return out if labels_BT is None else (out.sum(), out[..., 0].detach().sum())


class Engine:
    def __init__(self, clock):
        self.clock = clock

    def begin_pass(self, training):
        pass

    def backward(self, loss, last=True, gradients=None, part=0):
        halves = 1 if isinstance(loss, list) else 2
        self.clock.now += halves
        if halves == 2:
            torch.autograd.backward(loss, gradients)

    def input_gradients(self, outputs, gradient, inputs):
        self.clock.now += 1
        return torch.autograd.grad(outputs, inputs, gradient) if inputs else ()


class NoProducts:
    def __len__(self):
        return 0

    def take(self, count=None):
        return ()


def _bubble(pool, comm, name, microbatches):
    ranks = pool.world.size
    mesh = mesh_of(MeshShape(pp=ranks), pool)
    chunks, clock = CASES[name], Clock()

    def schedule(count, training):
        return Schedule(name, ranks, count, chunks, training)

    cuts = [Cut(stage, stage + 1) for stage in (schedule(1, True).stage_of(mesh.pp.index, chunk) for chunk in range(chunks))]
    model = Worker(cuts, ranks * chunks, clock)
    stream = lambda rows, tokens: (rows, tokens, 2)
    run = Executor(model, Engine(clock), mesh, Wire(comm, clock), schedule, stream, torch.float32, NoProducts())
    micro = [Rows(*[torch.full((1, 2), float(i)) for _ in range(4)]) for i in range(microbatches)]
    with mock.patch.object(executor, "time", SimpleNamespace(perf_counter=lambda: clock.now)):
        entropy = run.train(micro, 1.0, 0.0)
        run.read_clocks()
    return run.busy_seconds, run.step_seconds, float(entropy)


def measured(name, ranks, microbatches):
    """(bubble of a step, its formula)."""
    busy, elapsed, entropies = zip(*run_ranks(ranks, _bubble, name, microbatches), strict=True)
    stages = ranks * CASES[name]
    # Each of a micro-batch's two tokens has come through all stages, and only one rank tells.
    assert sum(entropies) == sum(2 * (i + stages) for i in range(microbatches))
    assert set(busy) == {3 * microbatches * CASES[name]}
    return 1 - sum(busy) / (ranks * max(elapsed)), ideal_bubble(Schedule(name, ranks, microbatches, CASES[name]))


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_measured_bubble_is_that_of_the_formula(name):
    found, formula = measured(name, 4, 8)
    assert found == pytest.approx(formula, rel=1e-9)


def test_a_zero_bubble_schedule_idles_less_than_1f1b():
    assert measured("zero_bubble", 4, 8)[0] < measured("1f1b", 4, 8)[0] - 0.05
