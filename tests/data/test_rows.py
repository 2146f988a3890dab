"""Rows: what is in them, which document each token belongs to, and what is to be predicted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_train.data.rows import IGNORED, Rows, TokenSplit, document_offsets, read_rows
from tests.data.corpora import numbered, slow_row, split_of

LENGTHS = st.lists(st.integers(1, 23), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(1, 17), packing=st.sampled_from(["stream", "whole"]))
def test_F25_rows_are_what_a_token_by_token_reading_gives(lengths: list[int], seq_len: int, packing: str) -> None:
    rows = Rows(split_of(numbered(lengths), packing), seq_len)
    block = read_rows([(rows, row) for row in range(len(rows))], seq_len)
    for row in range(len(rows)):
        fast = zip(block.tokens_BT[row], block.labels_BT[row], block.positions_BT[row], block.documents_BT[row])
        assert [tuple(map(int, place)) for place in fast] == slow_row(rows.split, *rows.span(row), seq_len)
    assert block.documents_BT.dtype == np.int32
    assert {a.dtype for a in (block.tokens_BT, block.labels_BT, block.positions_BT)} == {np.dtype(np.int64)}


@settings(max_examples=200, deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(1, 17), packing=st.sampled_from(["stream", "whole"]))
def test_F27_every_label_of_a_split_is_in_one_row(lengths: list[int], seq_len: int, packing: str) -> None:
    documents = numbered(lengths)
    rows = Rows(split_of(documents, packing), seq_len)
    block = read_rows([(rows, row) for row in range(len(rows))], seq_len)
    labels = np.sort(block.labels_BT[block.labels_BT != IGNORED])
    assert labels.tolist() == [token for document in documents for token in document[1:]]
    assert block.live_tokens == rows.split.predicted == len(labels)


def test_F25_documents_of_5_1_and_6_tokens_in_a_row_of_12() -> None:
    rows = Rows(split_of(numbered([5, 1, 6])), 12)
    block = read_rows([(rows, 0)], 12)
    assert block.documents_BT.tolist() == [[0] * 5 + [1] + [2] * 6]
    assert block.positions_BT.tolist() == [[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5]]
    assert block.labels_BT.tolist() == [[1, 2, 3, 4, -100, -100, 7, 8, 9, 10, 11, -100]]


def test_F25_the_label_at_the_end_of_a_full_row_is_not_the_next_document() -> None:
    rows = Rows(split_of(numbered([4, 4, 3])), 4)
    block = read_rows([(rows, row) for row in range(len(rows))], 4)
    assert block.labels_BT.tolist() == [[1, 2, 3, -100], [5, 6, 7, -100], [9, 10, -100, -100]]
    cut = Rows(split_of(numbered([9])), 4)  # but it is the next token of the same document
    assert read_rows([(cut, 0)], 4).labels_BT.tolist() == [[1, 2, 3, 4]]


def test_F12_a_row_of_padding_counts_nothing() -> None:
    block = read_rows([None], 5)
    assert block.labels_BT.tolist() == [[-100] * 5] and block.live_tokens == 0
    assert block.documents_BT.tolist() == [[0] * 5] and block.positions_BT.tolist() == [[0, 1, 2, 3, 4]]


def test_whole_rows_never_cut_a_document_that_fits_and_waste_less_than_a_document() -> None:
    lengths = np.random.default_rng(0).integers(1, 96, 300).tolist()
    rows = Rows(split_of(numbered(lengths), "whole"), 128)
    borders = set(rows.split.offsets.tolist())
    for row in range(len(rows)):
        start, stop = rows.span(row)
        assert start in borders and stop in borders and 0 < stop - start <= 128
    live = [read_rows([(rows, row)], 128).live_tokens for row in range(len(rows))]
    assert len(set(live)) > 10  # rows differ in what they count, which shows token weighting


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_F23_document_offsets_are_64_bit_above_2_to_31(dtype: type) -> None:
    offsets = document_offsets(np.full(3000, 1_000_000, dtype=dtype))
    assert offsets.dtype == np.int64 and int(offsets[-1]) == 3_000_000_000
    assert np.all(np.diff(offsets) == 1_000_000)


def test_F23_document_offsets_of_small_dtypes_do_not_wrap() -> None:
    assert int(document_offsets(np.full(100_000, 65_535, dtype=np.uint16))[-1]) == 6_553_500_000
    assert int(document_offsets(np.full(1000, 255, dtype=np.uint8))[-1]) == 255_000


def test_F23_first_middle_and_last_rows_of_three_billion_tokens(tmp_path: Path) -> None:
    total, length, seq_len = 3_000_000_000, 1_000_000, 1000
    path = tmp_path / "sparse.bin"
    with open(path, "wb") as file:
        file.truncate(total * 2)  # no blocks on the disk
    marks = np.memmap(path, dtype=np.uint16, mode="r+")
    for at in (0, 2**31, total - 1):
        marks[at] = 7
    marks.flush()
    split = TokenSplit(np.asarray(marks), document_offsets(np.full(total // length, length, dtype=np.int32)), total)
    rows = Rows(split, seq_len)
    assert len(rows) == 3_000_000
    for row in (0, len(rows) // 2, len(rows) - 1, np.int32(2**31 // seq_len), np.int32(len(rows) - 1)):
        start, stop = rows.span(row)
        assert start == int(row) * seq_len and stop - start == seq_len
        block = read_rows([(rows, row)], seq_len)
        assert block.positions_BT.tolist() == [list(range(seq_len))] and block.live_tokens in (seq_len, seq_len - 1)
    block = read_rows([(rows, 2**31 // seq_len)], seq_len)
    assert int(block.tokens_BT[0, 2**31 % seq_len]) == 7
    assert read_rows([(rows, len(rows) - 1)], seq_len).tokens_BT[0, -1] == 7


def test_rows_out_of_range_and_empty_documents_are_refused() -> None:
    rows = Rows(split_of(numbered([9])), 4)
    for row in (-1, len(rows)):
        with pytest.raises(IndexError):
            rows.span(row)
    with pytest.raises(ValueError, match="document 1 has 0 tokens"):
        document_offsets([3, 0, 2])
