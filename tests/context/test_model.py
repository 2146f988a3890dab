"""Whole models over context-parallel ranks against one process: losses, gradients, recompute, generation, memory."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dist_train.comm.collectives import Collectives
from dist_train.comm.trace import TrafficCounter
from dist_train.context import Split, apply_context, split_micro_batch
from dist_train.model import build_model
from dist_train.model.attention import AttentionCore
from dist_train.model.generate import generate
from dist_train.remat import apply_remat
from tests.context.rows import close, context_mesh, numbers_of, packed_rows
from tests.model.toy import shake, toy
from tests.ranks import run_ranks

ROWS = {
    12: numbers_of([12], [5, 1, 6], [2, 10]),
    13: numbers_of([13], [2, 10, 1], [6, 7]),
}
SHAPES = {2: {"kv_heads": 2}, 3: {"heads": 6, "kv_heads": 3, "hidden": 24}, 4: {"kv_heads": 4}}


def model_of(family, dtype=torch.float32, policy="none", **shape):
    model = build_model(toy(family, **shape))
    shake(model)
    apply_remat(model, policy)
    return model.to(dtype)


def losses(model, micro):
    """(objective, entropy) summed over the micro-batch's tokens."""
    return model(micro.tokens_BT, micro.positions_BT, micro.documents_BT, labels_BT=micro.labels_BT, z_loss=1e-3)


def learnt(model, micro):
    """[objective, entropy, gradient of each parameter]."""
    objective, entropy = losses(model, micro)
    objective.backward()
    found = [objective.detach(), entropy.detach(), *(parameter.grad for parameter in model.parameters())]
    assert len(found) == 2 + len(list(model.parameters())) and not any(x is None for x in found)
    return found


def _learn(mesh, comm, kind, family, shape, numbers, dtype, policy="none", evaluate=False):
    """This rank's losses and gradients."""
    group = context_mesh(mesh).cp
    model = model_of(family, dtype, policy, **shape)
    apply_context(model, group, kind, comm)
    micro = split_micro_batch(packed_rows(numbers), group)
    torch.manual_seed(mesh.rank)
    if evaluate:
        with torch.no_grad():
            return [x.clone() for x in losses(model.eval(), micro)]
    return learnt(model, micro)


def summed(parts):
    return [sum(x.double() for x in each) for each in zip(*parts)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", ROWS)
@pytest.mark.parametrize("kind, family, cp", [
    *(("ring", "llama", cp) for cp in SHAPES), ("ring", "gpt", 2), ("ring", "gpt", 4),
    *(("ulysses", "llama", cp) for cp in SHAPES), ("ulysses", "gpt", 2),
])  # fmt: skip
def test_losses_and_gradients_are_those_of_one_process(kind, family, cp, tokens, dtype):
    shape = SHAPES[cp] if family == "llama" else {}
    numbers = ROWS[tokens]
    found = summed(run_ranks(cp, _learn, kind, family, shape, numbers, dtype))
    own, exact = (learnt(model_of(family, each, **shape), packed_rows(numbers)) for each in (dtype, torch.float64))
    if dtype != torch.float32:
        own = [x.double() for x in own]  # the sums over ranks are, and losses are fp32 whatever the model
    tiny = 1e-6 if dtype == torch.float32 else 1e-3  # sums over tokens have another order
    for ours, theirs, right in zip(found, own, exact):
        close(ours, theirs, right.double(), tiny, scale=1.0)  # gradients of key biases are zero, but for rounding


@pytest.mark.parametrize("kind, shape", [("ring", {}), ("ulysses", {}), ("ulysses", {"dropout": 0.3})])
def test_F41_recompute_changes_no_bit_and_evaluation_sees_the_same_loss(kind, shape):
    numbers = ROWS[13]
    kept, selective, full = (
        run_ranks(2, _learn, kind, "llama", shape, numbers, torch.float32, policy) for policy in ("none", "selective", "full")
    )
    for rank in range(2):
        for a, b, c in zip(kept[rank], selective[rank], full[rank]):
            assert torch.equal(a, b) and torch.equal(a, c)
    evaluated = run_ranks(2, _learn, kind, "llama", shape, numbers, torch.float32, "selective", True)
    for found, trained in zip(evaluated, kept):
        assert all(torch.equal(a, b) for a, b in zip(found, trained)) != bool(shape)


def _sent(mesh, comm, policy):
    """Bytes that this rank sends in a forward and backward of a model with two layers."""
    counter, group = TrafficCounter(), context_mesh(mesh).cp
    model = model_of("llama", policy=policy)
    apply_context(model, group, "ring", Collectives(counter))
    learnt(model, split_micro_batch(packed_rows(ROWS[12]), group))
    return counter.bytes["send", "cp"]


def test_selective_recompute_keeps_what_came_round_the_ring():
    sent = {policy: run_ranks(2, _sent, policy) for policy in ("none", "selective", "full")}
    layers, keys = 2, 1 / 2 * 2 * 3 * 12 * 2 * 4 * 4
    assert sent["none"] == sent["selective"] == [layers * 3 * keys] * 2  # forward, backward, gradients
    assert sent["full"] == [layers * 4 * keys] * 2


def _logits(mesh, comm, kind, numbers, change):
    group = context_mesh(mesh).cp
    model = model_of("llama")
    apply_context(model, group, kind, comm)
    whole = packed_rows(numbers)
    if change is not None:
        whole.tokens_BT[:, change] = (whole.tokens_BT[:, change] + 1) % 53
    micro = split_micro_batch(whole, group)
    return model(micro.tokens_BT, micro.positions_BT, micro.documents_BT).detach()


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_F25_a_documents_logits_move_by_no_bit_when_another_one_changes(kind):
    numbers, middle = numbers_of([5, 14, 1, 6], [5, 14, 7, 0]), slice(5, 19)
    before, after = (Split(26, 2).join(run_ranks(2, _logits, kind, numbers, change)) for change in (None, middle))
    assert torch.equal(before[:, :5], after[:, :5]) and torch.equal(before[:, 19:], after[:, 19:])
    assert (before[:, middle] - after[:, middle]).abs().amax(-1).min() > 0
    micro = packed_rows(numbers)
    alone = model_of("llama")(micro.tokens_BT, micro.positions_BT, micro.documents_BT)
    torch.testing.assert_close(before, alone, rtol=1e-5, atol=1e-5)


def _generate(mesh, comm, kind):
    model = model_of("llama")
    plain = generate(model, [3, 1, 4], 20, 0.0)
    apply_context(model, context_mesh(mesh).cp, kind, comm)
    return generate(model, [3, 1, 4], 20, 0.0) == plain and len(plain) == 20


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_generation_reads_whole_prompts(kind):
    assert run_ranks(2, _generate, kind) == [True, True]


def test_a_group_of_one_leaves_the_model_as_it_is():
    (same,) = run_ranks(1, _applied_alone)
    assert same


def _applied_alone(mesh, comm):
    model = model_of("llama")
    before = [model.prepare_documents, *(block.attention.core for block in model.blocks.children())]
    apply_context(model, mesh.cp, "ring", comm)
    return [model.prepare_documents, *(block.attention.core for block in model.blocks.children())] == before and all(
        type(core) is AttentionCore for core in before[1:]
    )


def _refused(mesh, comm):
    group = context_mesh(mesh).cp
    for shape, kind, words in (
        ({"heads": 4, "kv_heads": 1}, "ulysses", "2 must divide 4 heads and 1 key/value heads.*context=ring"),
        ({"heads": 4, "kv_heads": 2, "dropout": 0.1}, "ring", "model.dropout=0.1.*context=ulysses, or model.dropout=0"),
        ({}, "star", "context=star.*ring, ulysses"),
    ):
        model = model_of("llama", **shape)
        prepare = model.prepare_documents
        with pytest.raises(ValueError, match=words):
            apply_context(model, group, kind, comm)
        assert model.prepare_documents is prepare
    return True


def test_what_a_kind_cannot_do_is_refused_with_the_remedy():
    assert run_ranks(2, _refused) == [True, True]


class Held(TorchDispatchMode):
    """The largest number of bytes in tensors that were alive at once, of those that were made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self._see(x.untyped_storage())
        return result

    def _see(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or not size:
            return
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def _long_row(mesh, comm, kind, tokens, policy, layers=4):
    """(peak bytes of tensors, entropy) of forward and backward of one row."""
    group = context_mesh(mesh).cp
    heads = {"heads": 4, "kv_heads": 4, "hidden": 32} if kind == "ulysses" else {"heads": 1, "kv_heads": 1, "hidden": 8}
    model = model_of("llama", torch.float32, policy, layers=layers, ffn=16, **heads)
    apply_context(model, group, kind, comm)
    micro = split_micro_batch(packed_rows(numbers_of([tokens - 100, 100])), group)
    with Held() as held:
        objective, entropy = losses(model, micro)
        objective.backward()
    return held.peak, float(entropy.detach())


@pytest.mark.parametrize("policy", ["none", "selective"])
@pytest.mark.parametrize("kind, tokens, bound", [("ring", 4096, 0.3), ("ulysses", 2048, 0.35)])
def test_a_rank_holds_its_part_of_a_long_row(kind, tokens, bound, policy, cp=4):
    """What is alive at the worst moment falls with the number of ranks, but for one layer's keys on their way."""
    ((whole, right),) = run_ranks(1, _long_row, kind, tokens, policy)
    parts = run_ranks(cp, _long_row, kind, tokens, policy)
    assert all(1 / cp < peak / whole < bound for peak, _ in parts)
    assert abs(sum(entropy for _, entropy in parts) - right) <= 1e-5 * right
