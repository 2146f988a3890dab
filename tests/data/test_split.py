"""The held-out split depends on each document's content alone, and never takes the training split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_train.data.split import certainly_held_out, content_bits, held_out


def bits_of(texts: list[bytes]) -> np.ndarray:
    return np.asarray([content_bits(text) for text in texts], dtype=np.uint64)


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=30), fraction=st.floats(0, 0.5), salt=st.binary(max_size=4))
def test_the_training_split_is_never_empty(lengths: list[int], fraction: float, salt: bytes) -> None:
    sizes = np.asarray(lengths, dtype=np.int64)
    mask = held_out(bits_of([salt + bytes([i]) for i in range(len(lengths))]), sizes, fraction)
    assert not mask.all() and sizes[mask].sum() * 2 <= sizes.sum()
    if len(lengths) >= 8 and fraction > 0 and max(lengths) * 4 <= sum(lengths):
        assert mask.any()


def test_about_the_fraction_asked_for_is_held_out() -> None:
    texts = [str(i).encode() for i in range(20_000)]
    lengths = np.ones(len(texts), dtype=np.int64)
    for fraction in (0.01, 0.1, 0.5):
        assert abs(held_out(bits_of(texts), lengths, fraction).mean() - fraction) < 0.012
    assert not held_out(bits_of(texts), lengths, 0.0).any()


def test_adding_documents_moves_none_of_the_others_and_copies_stay_together() -> None:
    texts = [str(i).encode() for i in range(3000)]
    ones = np.ones(len(texts), dtype=np.int64)
    before = held_out(bits_of(texts[:2000]), ones[:2000], 0.05)
    after = held_out(bits_of(texts[::-1]), ones, 0.05)[::-1]
    assert np.array_equal(before, after[:2000])
    twice = held_out(bits_of(texts + texts), np.ones(6000, dtype=np.int64), 0.05)
    assert np.array_equal(twice[:3000], twice[3000:])
    assert [certainly_held_out(content_bits(t), 0.05) for t in texts] == after.tolist()


@pytest.mark.parametrize("copies", [2, 50])
def test_a_corpus_of_one_repeated_document_can_be_trained_on(copies: int) -> None:
    for text in (b"a", b"b", b"c"):
        mask = held_out(bits_of([text] * copies), np.full(copies, 9, dtype=np.int64), 0.5)
        assert not mask.all()
