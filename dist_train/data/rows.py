"""From a stream of documents to rows of a batch, in numpy: who is whose neighbour, and what is to be predicted.

Shapes: B rows, T = seq_len tokens. Offsets, row numbers and their products are 64-bit everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IGNORED = -100  # label of a position that is not counted


def document_offsets(lengths: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Start of each document in the stream, and the end of the last: int64 of len(lengths) + 1, whatever the lengths' dtype."""
    lengths = np.asarray(lengths)
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, dtype=np.int64, out=offsets[1:])
    if len(lengths) and int(lengths.min()) < 1:
        raise ValueError(f"document {int(np.argmin(lengths))} has {int(lengths.min())} tokens; an index takes 1 or more")
    return offsets


@dataclass(frozen=True)
class TokenSplit:
    """Documents end to end: document d is tokens[offsets[d]:offsets[d + 1]].

    packing: `stream` cuts rows from the stream wherever they end; `whole` never cuts a document that fits a row, and pads.
    """

    tokens: npt.NDArray[np.integer]  # in memory or memory-mapped
    offsets: npt.NDArray[np.int64]
    text_bytes: int  # UTF-8 bytes of the text that these tokens stand for
    packing: str = "stream"

    @property
    def documents(self) -> int:
        return len(self.offsets) - 1

    @property
    def predicted(self) -> int:
        """How many tokens have a label: all but the last of each document."""
        return len(self.tokens) - self.documents


@dataclass(frozen=True)
class RowBlock:
    """B rows as arrays; `batch.MicroBatch` documents the meaning of each."""

    tokens_BT: npt.NDArray[np.int64]
    labels_BT: npt.NDArray[np.int64]
    positions_BT: npt.NDArray[np.int64]
    documents_BT: npt.NDArray[np.int32]

    @property
    def live_tokens(self) -> int:
        return int(np.count_nonzero(self.labels_BT != IGNORED))


class Rows:
    """The rows of a split at one sequence length. Every label of the split is in exactly one row; the last row may be padded."""

    def __init__(self, split: TokenSplit, seq_len: int) -> None:
        self.split, self.seq_len = split, int(seq_len)
        self._starts = _whole_document_rows(split.offsets, self.seq_len) if split.packing == "whole" else None

    def __len__(self) -> int:
        if self._starts is not None:
            return len(self._starts) - 1
        labels = max(len(self.split.tokens) - 1, 0)
        return (labels + self.seq_len - 1) // self.seq_len

    def span(self, row: int) -> tuple[int, int]:
        """First token of the row in the stream, and one past its last."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        if self._starts is not None:
            return int(self._starts[row]), int(self._starts[row + 1])
        start = int(row) * self.seq_len
        return start, min(start + self.seq_len, len(self.split.tokens))


def _whole_document_rows(offsets: npt.NDArray[np.int64], seq_len: int) -> npt.NDArray[np.int64]:
    """Row borders in the stream when the next document goes to a new row if it does not fit (next-fit).

    A document longer than a row is cut in pieces of seq_len, the last of which may share its row.
    """
    pieces = [np.arange(a, b, seq_len, dtype=np.int64) for a, b in zip(offsets[:-1].tolist(), offsets[1:].tolist())]
    borders = np.concatenate([*pieces, offsets[-1:]]) if pieces else offsets
    starts, place = [0], 0
    while place < len(borders) - 1:
        place = int(np.searchsorted(borders, borders[place] + seq_len, side="right")) - 1
        starts.append(int(borders[place]))
    return np.asarray(starts, dtype=np.int64)


def read_rows(picks: Sequence[tuple[Rows, int] | None], seq_len: int) -> RowBlock:
    """Rows as arrays; a pick of None is a row of padding. Work in Python is per row, never per token."""
    count = len(picks)
    tokens = np.zeros((count, seq_len + 1), dtype=np.int64)  # one more: the label of the last position
    begins = np.zeros((count, seq_len + 1), dtype=bool)  # a document, or the padding, begins here
    content = np.zeros((count, 1), dtype=np.int64)
    for b, pick in enumerate(picks):
        if pick is None:
            continue
        rows, row = pick
        start, stop = rows.span(row)
        end = min(stop + 1, len(rows.split.tokens))
        tokens[b, : end - start] = rows.split.tokens[start:end]
        offsets = rows.split.offsets
        # what a row begins with is document 0, so only documents that begin after it count
        inside = slice(np.searchsorted(offsets, start, side="right"), np.searchsorted(offsets, end, side="left"))
        begins[b, offsets[inside] - start] = True
        content[b] = stop - start
        if stop - start < seq_len or stop == end:  # padding follows, or the stream ends with the row
            begins[b, stop - start] = True
    columns = np.arange(seq_len + 1, dtype=np.int64)
    documents = np.cumsum(begins, axis=1, dtype=np.int32)
    positions = columns - np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    counted = (documents[:, 1:] == documents[:, :-1]) & (columns[:-1] < content)
    return RowBlock(
        tokens_BT=np.where(columns[:-1] < content, tokens[:, :-1], 0),
        labels_BT=np.where(counted, tokens[:, 1:], IGNORED),
        positions_BT=np.ascontiguousarray(positions[:, :-1]),
        documents_BT=np.ascontiguousarray(documents[:, :-1]),
    )
