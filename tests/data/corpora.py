"""Small corpora in memory, and what a batch must be, written the slow and obvious way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dist_train.data.corpus import Corpus
from dist_train.data.rows import TokenSplit, document_offsets
from dist_train.data.tokenizer import IdTokenizer


def split_of(documents: Sequence[Sequence[int]], packing: str = "stream") -> TokenSplit:
    tokens = np.asarray([token for document in documents for token in document], dtype=np.uint16)
    return TokenSplit(tokens, document_offsets([len(document) for document in documents]), len(tokens), packing)


def numbered(lengths: Sequence[int]) -> list[list[int]]:
    """Documents in which every token of the corpus is another number."""
    ends = np.cumsum(lengths).tolist()
    return [list(range(end - length, end)) for end, length in zip(ends, lengths)]


def corpus_of(*train: TokenSplit, weights: Sequence[float] | None = None, evaluation: TokenSplit | None = None) -> Corpus:
    held = evaluation or split_of([])
    return Corpus(
        tokenizer=IdTokenizer(1 << 16),
        fingerprint="memory",
        train=tuple(train),
        weights=tuple(weights or [1.0] * len(train)),
        evaluation=(held, *[split_of([])] * (len(train) - 1)),
        names=tuple(f"source {i}" for i in range(len(train))),
        folders=(None,) * len(train),
    )


def slow_row(split: TokenSplit, start: int, stop: int, seq_len: int) -> list[tuple[int, int, int, int]]:
    """(token, label, position, document) of each place of the row of tokens start..stop, token by token."""
    owners = np.repeat(np.arange(split.documents), np.diff(split.offsets)).tolist()
    tokens, row = split.tokens.tolist(), []
    document = position = 0
    for t in range(start, stop):
        if t > start and owners[t] != owners[t - 1]:
            document, position = document + 1, 0
        more = t + 1 < len(tokens) and owners[t + 1] == owners[t]
        row.append((tokens[t], tokens[t + 1] if more else -100, position, document))
        position += 1
    padding = seq_len - len(row)
    return row + [(0, -100, place, document + 1) for place in range(padding)]
