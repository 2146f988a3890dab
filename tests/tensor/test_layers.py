"""The layers by themselves: adjoints, overlap, deferred gradients, recompute, random draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dist_train.comm.collectives import Collectives, Handle
from dist_train.comm.differentiable import gather_features, sum_to_copies, sum_to_tokens
from dist_train.comm.trace import TrafficCounter
from dist_train.mesh.mesh import Group
from dist_train.remat import apply_remat
from dist_train.tensor import WeightGradients, defer_weight_gradients
from dist_train.tensor.linear import ColumnFanOut, RowLinear
from dist_train.tensor.random import own_draws
from tests.ranks import run_ranks
from tests.tensor.helpers import GPT, LLAMA, batch, split_model, step, tensor_group, whole_model


def adjoints(mesh, comm) -> None:
    group = tensor_group(mesh)
    everyone = torch.Generator().manual_seed(5)
    addends = torch.randn(group.size, 2 * group.size, 3, generator=everyone)
    loss_weights = torch.randn(2 * group.size, 3, generator=everyone)
    own = slice(2 * group.index, 2 * group.index + 2)

    x = addends[group.index].clone().requires_grad_()
    y = sum_to_copies(x, group, comm)
    torch.testing.assert_close(y, addends.sum(0))
    (y * loss_weights).sum().backward()
    assert torch.equal(x.grad, loss_weights)
    assert torch.equal(x.detach(), addends[group.index])

    x = addends[group.index].clone().requires_grad_()
    y = sum_to_tokens(x, group, comm)
    torch.testing.assert_close(y, addends.sum(0)[own])
    (y * loss_weights[own]).sum().backward()
    assert torch.equal(x.grad, loss_weights)

    sizes = [3] * (group.size - 1) + [1]
    whole = torch.randn(4, sum(sizes), generator=everyone)
    x = whole.split(sizes, 1)[group.index].clone().requires_grad_()
    y = gather_features(x, sizes, group, comm)
    assert torch.equal(y, whole)
    (y * whole).sum().backward()
    assert torch.equal(x.grad, x.detach())


@pytest.mark.parametrize("ranks", [2, 3])
def test_collectives_and_their_adjoints(ranks: int) -> None:
    run_ranks(ranks, adjoints)


class Timeline(Collectives):
    """Writes down when collectives start and end."""

    def __init__(self, events: list[str]) -> None:
        super().__init__(lambda op, group, tensor: events.append(f"start {op}"))
        self.events = events

    def _ending(self, op: str, handle: Handle) -> Handle:
        def end() -> None:
            handle.wait()
            self.events.append(f"end {op}")

        return Handle(then=end)

    def all_gather(self, out: Tensor, x: Tensor, group: Group) -> Handle:
        return self._ending("all_gather", super().all_gather(out, x, group))

    def reduce_scatter(self, out: Tensor, x: Tensor, group: Group) -> Handle:
        return self._ending("reduce_scatter", super().reduce_scatter(out, x, group))

    def all_reduce(self, x: Tensor, group: Group, op: str = "sum") -> Handle:
        return self._ending("all_reduce", super().all_reduce(x, group, op))


class Products(TorchDispatchMode):
    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            left, right = args[-2:]
            self.events.append(f"{left.size(0)}x{left.size(1)}x{right.size(1)}")
        return function(*args, **(kwargs or {}))


N, D, F1, F2 = 5, 8, 6, 7  # tokens of a rank, width, outputs of two linear layers


def timeline(mesh, comm, sequence: bool) -> dict[str, list[str]]:
    group = tensor_group(mesh)
    events: list[str] = []
    timed = Timeline(events)
    torch.manual_seed(0)
    fan_out = ColumnFanOut(group, timed, sequence)
    row = RowLinear(nn.Linear(F1, D, bias=False), group, timed, sequence)
    linears = nn.Linear(D, F1), nn.Linear(D, F2)
    x = torch.randn(N, D, requires_grad=True)
    found = {}

    def record(name: str, run: Any) -> Any:
        events.clear()
        with Products(events):
            result = run()
        found[name] = list(events)
        return result

    outputs = record("fan_out forward", lambda: fan_out(x, *linears))
    record("fan_out backward", lambda: torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs]))
    hidden = torch.randn(N * group.size if sequence else N, F1, requires_grad=True)
    y = record("row forward", lambda: row(hidden))
    record("row backward", lambda: y.backward(torch.ones_like(y)))
    return found


def test_collectives_travel_during_products_when_tokens_are_split() -> None:
    own, all_, others = N, 2 * N, N
    for found in run_ranks(2, timeline, True):
        forward, backward = found["fan_out forward"], found["fan_out backward"]
        assert forward == [
            "start all_gather", f"{own}x{D}x{F1}", f"{own}x{D}x{F2}",
            "end all_gather", f"{others}x{D}x{F1}", f"{others}x{D}x{F2}",
        ]  # fmt: skip
        assert backward == [
            "start all_gather", f"{all_}x{F2}x{D}", f"{all_}x{F1}x{D}", "start reduce_scatter", "end all_gather",
            f"{F1}x{all_}x{D}", f"{F2}x{all_}x{D}", "end reduce_scatter",
        ]  # fmt: skip
        assert found["row forward"] == [f"{all_}x{F1}x{D}", "start reduce_scatter", "end reduce_scatter"]
        assert found["row backward"] == [
            "start all_gather", f"{own}x{D}x{F1}", "end all_gather", f"{others}x{D}x{F1}", f"{D}x{all_}x{F1}",
        ]  # fmt: skip


def test_the_input_gradient_travels_during_products_when_the_stream_is_whole() -> None:
    for found in run_ranks(2, timeline, False):
        assert found["fan_out forward"] == [f"{N}x{D}x{F1}", f"{N}x{D}x{F2}"]
        assert found["fan_out backward"] == [
            f"{N}x{F2}x{D}", f"{N}x{F1}x{D}", "start all_reduce", f"{F1}x{N}x{D}", f"{F2}x{N}x{D}", "end all_reduce",
        ]  # fmt: skip
        assert found["row forward"] == [f"{N}x{F1}x{D}", "start all_reduce", "end all_reduce"]
        assert found["row backward"] == [f"{N}x{D}x{F1}", f"{D}x{N}x{F1}"]


def saved_elements(mesh, comm) -> int:
    group = tensor_group(mesh)
    fan_out, linears = ColumnFanOut(group, comm, True), (nn.Linear(D, F1), nn.Linear(D, F2))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        fan_out(torch.randn(N, D, requires_grad=True), *linears)
    return sum(x.numel() for x in saved if not isinstance(x, nn.Parameter))


def test_of_its_input_a_fan_out_keeps_only_this_ranks_tokens() -> None:
    assert run_ranks(2, saved_elements) == [N * D] * 2


def deferred(mesh, comm, sequence: bool, model: dict[str, Any], policy: str) -> None:
    group = tensor_group(mesh)
    at_once, later = (split_model(whole_model(model), group, comm, sequence) for _ in range(2))
    queue = WeightGradients()
    defer_weight_gradients(later, queue)
    for each in (at_once, later):
        apply_remat(each, policy)
    inputs = batch(3, 13)
    assert torch.equal(step(at_once, inputs)[0], step(later, inputs)[0])
    linear = "attention.q attention.k attention.v attention.out mlp.gate mlp.up mlp.down".split()
    waiting = {n for n, p in later.named_parameters() if n.rpartition(".")[0].partition(".")[2].partition(".")[2] in linear}
    names = {parameter: name for name, parameter in later.named_parameters()}
    assert {name for name, parameter in later.named_parameters() if parameter.grad is None} == waiting
    assert len(queue) == len(waiting) > 0
    first = [names[parameter] for parameter, _ in _take(queue, 2)]
    assert all(name.startswith("blocks.1.mlp.down") for name in first[:1]) and len(queue) == len(waiting) - 2
    for _ in _take(queue, None):
        pass
    assert len(queue) == 0
    for (name, true), mine in zip(at_once.named_parameters(), later.parameters(), strict=True):
        assert torch.equal(true.grad, mine.grad), name
    defer_weight_gradients(later, None)
    later.zero_grad()
    step(later, inputs)
    assert len(queue) == 0
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(at_once.parameters(), later.parameters(), strict=True))


def _take(queue: WeightGradients, count: int | None) -> list[tuple[nn.Parameter, Tensor]]:
    found = list(queue.take(count))
    for parameter, gradient in found:
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    return found


@pytest.mark.parametrize("ranks, sequence", [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("model, policy", [(LLAMA, "none"), (GPT, "selective")])
def test_deferred_gradients_of_weights_are_the_same_bits(ranks, sequence, model, policy) -> None:
    """On one rank those of the plain layers."""
    run_ranks(ranks, deferred, sequence, model, policy)


def recomputed(mesh, comm, sequence: bool, model: dict[str, Any], backend: str) -> None:
    group = tensor_group(mesh)
    traffic = TrafficCounter()
    counted = Collectives(traffic)
    found = {}
    for policy in ("none", "selective", "full"):
        traffic.reset()
        shared = split_model(whole_model(model | {"dropout": 0.3}, backend=backend), group, counted, sequence)
        apply_remat(shared, policy)
        torch.manual_seed(11)
        loss, _ = step(shared, batch(3, 13))
        found[policy] = loss, [parameter.grad for parameter in shared.parameters()], torch.get_rng_state(), dict(traffic.calls)
    for policy in ("selective", "full"):
        assert torch.equal(found["none"][0], found[policy][0])
        assert all(torch.equal(a, b) for a, b in zip(found["none"][1], found[policy][1], strict=True))
        assert torch.equal(found["none"][2], found[policy][2])
    assert found["none"][3] == found["selective"][3]  # what it keeps, it does not ask other ranks for again
    assert found["none"][3] != found["full"][3]
    states = comm.all_gather_object(found["none"][2], group)
    assert all(torch.equal(states[0], other) for other in states)  # default generators go on alike


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("model, backend", [(LLAMA, "sdpa"), (GPT, "math")])
def test_F41_recompute_changes_no_bit(model: dict[str, Any], backend: str, sequence: bool) -> None:
    run_ranks(2, recomputed, sequence, model, backend)


def draws(mesh, comm, sequence: bool) -> list[Tensor]:
    """What this rank drops of ones: on the stream, in attention of its heads, and of the stream again."""
    group = tensor_group(mesh)
    shared = split_model(whole_model({"family": "llama", "dropout": 0.5}, backend="math"), group, comm, sequence)
    torch.manual_seed(7)
    found = [shared.dropout(torch.ones(4, 64))]
    heads = torch.ones(1, 2, 9, 4)
    context = shared.context(torch.zeros(1, 9, dtype=torch.int64), torch.arange(9)[None], None, torch.float32)
    found.append(shared.blocks.get_submodule("0").attention.core(heads, heads, heads, context))
    found.append(shared.blocks.get_submodule("0").dropout(torch.ones(4, 64)))
    found.append(torch.rand(3))
    shared.eval()
    assert torch.equal(shared.dropout(torch.ones(4)), torch.ones(4))
    return found


@pytest.mark.parametrize("sequence", [False, True])
def test_F50_draws_differ_where_ranks_hold_different_parts(sequence: bool) -> None:
    a, b = run_ranks(2, draws, sequence)
    assert [torch.equal(x, y) for x, y in zip(a, b)] == [not sequence, False, not sequence, True]
    assert not torch.equal(a[0], a[2])
    again, _ = run_ranks(2, draws, sequence)
    assert all(torch.equal(x, y) for x, y in zip(a, again))


def test_own_draws_leave_the_default_generator_one_draw_further() -> None:
    states = []
    for index in range(2):
        torch.manual_seed(1)
        with own_draws(Group("tp", (0, 1), index), torch.device("cpu")):
            torch.rand(100 + index)
        states.append(torch.get_rng_state())
    torch.manual_seed(1)
    torch.randint(1 << 62, ())
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], torch.get_rng_state())


def test_frozen_weights_and_inputs_get_no_gradient() -> None:
    alone, comm = Group("tp", (0,), 0), Collectives()
    fan_out, frozen, trained = ColumnFanOut(alone, comm, False), nn.Linear(D, F1), nn.Linear(D, F2)
    frozen.requires_grad_(False)
    x = torch.randn(2, N, D)
    one, two = fan_out(x, frozen, trained)
    assert torch.equal(one, frozen(x)) and torch.equal(two, trained(x))
    (one.sum() + two.sum()).backward()
    assert frozen.weight.grad is None and frozen.bias.grad is None
    torch.testing.assert_close(trained.weight.grad, x.sum((0, 1)).expand(F2, D))

    row = RowLinear(nn.Linear(F1, D), alone, comm, False)
    row.weight.requires_grad_(False)
    hidden = torch.randn(N, F1, requires_grad=True)
    y = row(hidden)
    assert torch.equal(y, F.linear(hidden, row.weight, row.bias))
    y.sum().backward()
    assert row.weight.grad is None and row.bias.grad is not None
    torch.testing.assert_close(hidden.grad, row.weight.sum(0).expand(N, F1))
