"""The arithmetic of context parallelism against counting token by token: who has which token, who sees which key."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_train.context import Split, split_micro_batch
from dist_train.context.visible import rectangles
from dist_train.data.batch import MicroBatch
from dist_train.mesh.mesh import Group
from dist_train.ops.attention.documents import document_runs
from tests.context.rows import numbers_of, packed_rows

ranks_of = st.sampled_from([2, 3, 4, 5])


@st.composite
def documents(draw, rows=3):
    """Rows cut in documents anywhere."""
    tokens = draw(st.integers(1, 40))
    cuts = st.lists(st.integers(1, tokens), max_size=6)
    drawn = draw(st.lists(cuts, min_size=1, max_size=rows))
    return torch.tensor([[sum(cut <= t for cut in row) for t in range(tokens)] for row in drawn])


def group(ranks: int, index: int) -> Group:
    return Group("cp", tuple(range(ranks)), index)


@given(st.integers(1, 70), ranks_of)
def test_every_token_has_one_place_and_all_ranks_have_equal_causal_work(tokens, ranks):
    split = Split(tokens, ranks)
    assert tokens <= split.padded < tokens + 2 * ranks and split.padded == 2 * ranks * split.chunk
    held = [split.take(torch.arange(split.padded)[None], rank) for rank in range(ranks)]
    assert sorted(torch.cat(held, 1)[0].tolist()) == list(range(split.padded))
    assert len({int((part + 1).sum()) for part in held}) == 1  # a query at t sees t+1 keys
    assert torch.equal(split.join(held), torch.arange(tokens)[None])
    whole = torch.randn(2, tokens, 3)
    padded = torch.cat([whole, torch.zeros(2, split.padded - tokens, 3)], 1)
    assert torch.equal(split.join([split.take(padded, rank) for rank in range(ranks)]), whole)


@given(documents(), ranks_of)
@settings(max_examples=60, deadline=None)
def test_rectangles_cover_what_a_token_sees_once(numbers, ranks):
    """Against the definition: a query sees the keys at or before it in its document. A rank's own keys are packed rows."""
    micro = packed_rows(numbers)
    numbers = split_micro_batch(micro, group(ranks, 0)).documents_BT
    split, runs = Split(numbers.size(1), ranks), document_runs(numbers)
    at = torch.arange(split.padded)
    visible = (runs[:, :, None] == runs[:, None, :]) & (at[:, None] >= at)
    for rank in range(ranks):
        mine = split.take(at[None], rank)[0]
        for source in range(ranks):
            theirs = split.take(at[None], source)[0]
            wanted = visible[:, mine][:, :, theirs].int()
            if source == rank:
                own = split.take(runs, rank)
                order = torch.arange(own.size(1))
                assert torch.equal(wanted.bool(), (own[:, :, None] == own[:, None, :]) & (order[:, None] >= order))
                continue
            found = torch.zeros_like(wanted)
            for rows, queries, keys in rectangles(runs, split, rank, source):
                found[rows, queries, keys] += 1
            assert torch.equal(found, wanted)


def test_one_document_is_one_rectangle_of_half_the_square_for_each_rank():
    split, runs = Split(48, 4), torch.zeros(3, 48, dtype=torch.int32)
    for rank in range(4):
        for source in set(range(4)) - {rank}:
            (only,) = rectangles(runs, split, rank, source)
            assert only.rows == slice(0, 3)
            early = slice(0, 12), slice(0, 6)
            late = slice(6, 12), slice(0, 12)
            assert (only.queries, only.keys) == (early if source < rank else late)


@given(documents(), ranks_of)
@settings(max_examples=60, deadline=None)
def test_a_micro_batch_is_split_and_put_together(numbers, ranks):
    micro = packed_rows(numbers)
    parts = [split_micro_batch(micro, group(ranks, rank)) for rank in range(ranks)]
    split = Split(numbers.size(1), ranks)
    for name in ("tokens_BT", "labels_BT", "positions_BT"):
        assert torch.equal(split.join([getattr(part, name) for part in parts]), getattr(micro, name)), name
    assert sum(part.live_tokens for part in parts) == micro.live_tokens
    for part in parts:
        assert part.live_tokens == int((part.labels_BT != -100).sum())
        assert torch.equal(part.documents_BT, parts[0].documents_BT) and part.sample_ids == micro.sample_ids
    whole = parts[0].documents_BT
    assert torch.equal(whole[:, : split.tokens], numbers) and whole.dtype == numbers.dtype
    padding = whole[:, split.tokens :]
    assert torch.all(padding == numbers[:, -1:] + 1)


def test_padding_counts_for_nothing_and_a_group_of_one_changes_nothing():
    micro = packed_rows(numbers_of([9, 4]))
    assert split_micro_batch(micro, group(1, 0)) is micro
    last = split_micro_batch(micro, group(3, 0))  # the chunks of rank 0 are the first and the last
    assert (
        last.tokens_BT.tolist()[0][4:] == [0, 0]
        and last.labels_BT.tolist()[0][4:] == [-100, -100]
        and isinstance(last, MicroBatch)
    )
    assert last.positions_BT.tolist()[0][4:] == [0, 0]


@pytest.mark.parametrize("tokens", [12, 13])
def test_rows_without_padding_or_from_another_split_are_refused(tokens):
    split = Split(tokens, 4)
    with pytest.raises(ValueError, match=f"{tokens} tokens.*multiple of 8.*split_micro_batch"):
        split.require_padded()
    Split(16, 4).require_padded()
    Split(16, 4).require_held(4)
    with pytest.raises(ValueError, match="16 tokens of each row.*it has 4"):
        Split(16, 4).require_held(16)
