"""Attention over ranks against attention in one process: outputs, gradients, bits, bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dist_train.comm.collectives import Collectives
from dist_train.comm.trace import TrafficCounter
from dist_train.context import Split, split_micro_batch
from dist_train.context.ring import RingCore, prepare_ring
from dist_train.context.ulysses import UlyssesCore, prepare_ulysses
from dist_train.model.transformer import Context
from dist_train.ops.attention import Documents, attention
from tests.context.rows import close, context_mesh, numbers_of, packed_rows
from tests.ranks import run_ranks

CPU = torch.device("cpu")
# Documents that end in chunks, at their borders, and reach over several; rows of one document, of many, and neighbours alike.
ROWS = {
    12: numbers_of([12], [5, 1, 6], [1] * 12, [3, 9], [3, 9]),
    13: numbers_of([13], [2, 10, 1], [13], [13], [4, 4, 5]),
    48: numbers_of([48], [7, 33, 8], [24, 24]),
}
HEADS = {2: (4, 2), 3: (6, 3), 4: (8, 4)}


def draw(numbers: Tensor, heads: int, kv_heads: int, dtype: torch.dtype = torch.float32, width: int = 8) -> list[Tensor]:
    """q, k, v and the gradient of the output, whole: (B, T, heads, H)."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(*numbers.shape, n, width, generator=generator).to(dtype) for n in (heads, kv_heads, kv_heads, heads)]


def one_process(whole: list[Tensor], numbers: Tensor, dtype: torch.dtype, backend: str = "auto") -> list[Tensor]:
    q, k, v = (x.to(dtype).requires_grad_() for x in whole[:3])
    out = attention(*(x.transpose(1, 2) for x in (q, k, v)), Documents(numbers), 0.0, backend).transpose(1, 2)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), whole[3].to(dtype))]


def core_of(kind, group, comm, numbers, dtype, backend="auto", dropout=0.0):
    """(core, context) of a row split over `group`."""
    documents = split_micro_batch(packed_rows(numbers), group).documents_BT
    split = Split(documents.size(1), group.size)
    given = (group, documents, dtype, CPU, 8, dropout, backend)
    shape = numbers.size(0), 2 * split.chunk
    if kind == "ring":
        return RingCore(backend, group, comm), Context(shape, None, prepare_ring(*given))
    return UlyssesCore(backend, dropout, group, comm), Context(shape, None, prepare_ulysses(*given))


def parts_of(whole: list[Tensor], group) -> list[Tensor]:
    split = Split(whole[0].size(1), group.size)
    missing = split.padded - split.tokens
    padded = [torch.cat([x, x.new_zeros(x.size(0), missing, *x.shape[2:])], 1) for x in whole]
    return [split.take(x, group.index) for x in padded]


def _attend(mesh, comm, kind, whole, numbers, backend="auto", tp=1):
    """This rank's out and gradients, (B, L, heads, H). With tensor parallelism it has a part of the heads."""
    mesh = context_mesh(mesh, tp)
    whole = [x.chunk(tp, 2)[mesh.tp.index] for x in whole]
    q, k, v, grad = parts_of(whole, mesh.cp)
    core, context = core_of(kind, mesh.cp, comm, numbers, q.dtype, backend)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = core(*(x.transpose(1, 2) for x in inputs), context).transpose(1, 2)
    found = torch.autograd.grad(out, inputs, grad)
    with torch.no_grad():
        assert torch.equal(core(*(x.transpose(1, 2) for x in inputs), context).transpose(1, 2), out)
    return [out.detach(), *found]


def joined(parts: list[list[Tensor]], tokens: int) -> list[Tensor]:
    return [Split(tokens, len(parts)).join(each) for each in zip(*parts)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("tokens", ROWS)
@pytest.mark.parametrize("cp", HEADS)
def test_out_and_gradients_are_those_of_one_process(cp, tokens, kind, dtype):
    numbers = ROWS[tokens]
    whole = draw(numbers, *HEADS[cp], dtype)
    found = joined(run_ranks(cp, _attend, kind, whole, numbers), tokens)
    own, exact = one_process(whole, numbers, dtype), one_process(whole, numbers, torch.float64)
    for ours, theirs, right in zip(found, own, exact):
        close(ours, theirs, right)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("backend", ["math", "flash"])
def test_named_backends(backend, kind):
    numbers = ROWS[13]
    whole = draw(numbers, 4, 2)
    found = joined(run_ranks(2, _attend, kind, whole, numbers, backend), 13)
    own, exact = one_process(whole, numbers, torch.float32, backend), one_process(whole, numbers, torch.float64)
    for ours, theirs, right in zip(found, own, exact):
        close(ours, theirs, right)


def test_a_ring_needs_no_number_of_heads():
    numbers = ROWS[13]
    whole = draw(numbers, 3, 1)
    found = joined(run_ranks(4, _attend, "ring", whole, numbers), 13)
    for ours, theirs, right in zip(found, one_process(whole, numbers, torch.float32), one_process(whole, numbers, torch.float64)):
        close(ours, theirs, right)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_heads_split_over_another_axis(kind):
    numbers = ROWS[12]
    whole = draw(numbers, 8, 4)
    parts = run_ranks(4, _attend, kind, whole, numbers, "auto", 2)  # ranks: cp, then tp, which varies fastest
    halves = [joined(parts[tp::2], 12) for tp in range(2)]
    own, exact = one_process(whole, numbers, torch.float32), one_process(whole, numbers, torch.float64)
    for *pair, theirs, right in zip(*halves, own, exact):
        close(torch.cat(pair, 2), theirs, right)


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_a_rerun_gives_the_same_bits(kind):
    numbers = ROWS[48]
    whole = draw(numbers, 8, 4)
    first, second = (run_ranks(4, _attend, kind, whole, numbers) for _ in range(2))
    for ours, again in zip(first, second):
        assert all(torch.equal(a, b) for a, b in zip(ours, again))


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize("cp", [2, 3])
def test_F25_documents_move_each_others_results_by_no_bit(cp, kind):
    numbers = numbers_of([7, 14, 2, 13])
    whole = draw(numbers, *HEADS[cp])
    moved = [x.clone() for x in whole]
    for x in moved[:3]:
        x[:, 7:21] += 3.0  # a document over many chunks; those before and behind it stay
    before, after = (joined(run_ranks(cp, _attend, kind, given, numbers), 36) for given in (whole, moved))
    for a, b in zip(before, after):
        assert torch.equal(a[:, :7], b[:, :7]) and torch.equal(a[:, 21:], b[:, 21:]) and not torch.equal(a[:, 7:21], b[:, 7:21])


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_F48_rows_without_an_upstream_and_padding_have_gradient_zero(kind):
    numbers = ROWS[13]
    whole = draw(numbers, 6, 3)
    whole[3][0] = 0.0
    parts = run_ranks(3, _attend, kind, whole, numbers)  # the last of the 18 tokens is with the first rank
    for part in parts:
        assert all(torch.isfinite(x).all() for x in part) and all(torch.all(gradient[0] == 0) for gradient in part[1:])
    assert all(torch.all(gradient[:, -3:] == 0) for gradient in parts[0][1:])


def test_F48_queries_that_no_key_reaches_are_left_alone():
    """Every query sees at least itself, in the first step; where a later step brings it nothing, nothing is merged."""
    numbers = numbers_of([1] * 16)
    whole = draw(numbers, 4, 2)
    out, grad_q, grad_k, grad_v = joined(run_ranks(4, _attend, "ring", whole, numbers), 16)
    torch.testing.assert_close(out, whole[2].repeat_interleave(2, 2), rtol=1e-6, atol=1e-6)  # each token's own value
    torch.testing.assert_close(grad_v, whole[3].unflatten(2, (2, 2)).sum(3), rtol=1e-6, atol=1e-6)
    assert grad_q.abs().max() < 1e-6 and grad_k.abs().max() < 1e-6


def _count(mesh, comm, kind, whole, numbers):
    """Bytes sent by this rank in forward, and in backward."""
    counter = TrafficCounter()
    group = context_mesh(mesh).cp
    q, k, v, grad = parts_of(whole, group)
    core, context = core_of(kind, group, Collectives(counter), numbers, q.dtype)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    out = core(*(x.transpose(1, 2) for x in inputs), context).transpose(1, 2)
    forward = dict(counter.bytes)
    counter.reset()
    torch.autograd.grad(out, inputs, grad)
    return forward, dict(counter.bytes)


@pytest.mark.parametrize("dtype, size", [(torch.float32, 4), (torch.bfloat16, 2)])
@pytest.mark.parametrize("cp", HEADS)
def test_bytes_on_the_wire_are_the_formulas(cp, dtype, size):
    numbers, (heads, kv_heads) = ROWS[48], HEADS[cp]
    rows, tokens = numbers.shape
    whole, share = draw(numbers, heads, kv_heads, dtype), (cp - 1) / cp
    for forward, backward in run_ranks(cp, _count, "ring", whole, numbers):
        keys = share * 2 * rows * tokens * kv_heads * 8
        assert forward == {("send", "cp"): keys * size} and backward == {("send", "cp"): keys * (size + 4)}
    for forward, backward in run_ranks(cp, _count, "ulysses", whole, numbers):
        elements = share * rows * tokens / cp * (2 * heads + 2 * kv_heads) * 8
        assert forward == backward == {("all_to_all", "cp"): elements * size}


def _drop(mesh, comm, seeds):
    """Attention with dropout over values of one, in heads that are all alike."""
    group = context_mesh(mesh).cp
    numbers = numbers_of([60])
    core, context = core_of("ulysses", group, comm, numbers, torch.float32, "auto", 0.5)
    whole = [x[:, :, :1].expand(-1, -1, 4, -1) for x in draw(numbers, 4, 4)]
    q, k, v, _ = parts_of([whole[0], whole[1], torch.ones_like(whole[0]), whole[3]], group)
    torch.manual_seed(seeds[mesh.rank])
    return core(*(x.transpose(1, 2) for x in (q, k, v)), context).transpose(1, 2)


def test_F50_dropout_of_attention_is_drawn_apart_on_each_rank():
    found, again, alike = (Split(60, 2).join(run_ranks(2, _drop, seeds)) for seeds in ([1, 2], [1, 2], [3, 3]))
    assert torch.equal(found, again)
    heads = [found[:, :, head, 0] for head in range(4)]
    assert all(not torch.equal(heads[a], heads[b]) for a in range(4) for b in range(a))
    assert 0.9 < found.mean() < 1.1 and found.std() > 0.1
    assert torch.equal(alike[:, :, 0], alike[:, :, 2])  # which is why ranks have seeds of their own


def _wrong_heads(mesh, comm, heads, kv_heads):
    group = context_mesh(mesh).cp
    numbers = ROWS[12]
    core, context = core_of("ulysses", group, comm, numbers, torch.float32)
    with pytest.raises(ValueError, match=f"2 must divide {heads} heads and {kv_heads} key/value heads.*context=ring"):
        core(*(x.transpose(1, 2) for x in parts_of(draw(numbers, heads, kv_heads)[:3], group)), context)
    core, context = core_of("ring", group, comm, numbers, torch.float32)
    with pytest.raises(ValueError, match="12 tokens of each row on one of 2 .* it has 6"):
        core(*(x.transpose(1, 2) for x in draw(numbers, heads, kv_heads)[:3]), context)
    return True


@pytest.mark.parametrize("heads, kv_heads", [(3, 3), (4, 1)])
def test_heads_that_do_not_come_out_equal_and_rows_that_are_not_split_are_refused(heads, kv_heads):
    assert run_ranks(2, _wrong_heads, heads, kv_heads) == [True, True]
