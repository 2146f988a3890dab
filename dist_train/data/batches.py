"""Micro-batches of a rank: batch i is a pure function of (seed, i), and evaluation sees each held-out row once.

There is no state to save or to move between ranks: the number of samples consumed is the position. Changing the number of
data-parallel ranks, or the micro-batch, changes who reads a row and when, never which rows make a step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from dist_train.config.compose import ConfigError
from dist_train.config.schema import TrainConfig
from dist_train.data.batch import MicroBatch
from dist_train.data.corpus import Corpus, check_corpus
from dist_train.data.order import BlendSchedule, Int64s, shuffled
from dist_train.data.rows import Rows, TokenSplit, read_rows


class RowTable:
    """The rows of several splits under one numbering: those of the first split, then those of the second, and so on."""

    def __init__(self, splits: tuple[TokenSplit, ...], seq_len: int) -> None:
        self.seq_len = seq_len
        self.parts = [Rows(split, seq_len) for split in splits]
        self.counts = [len(rows) for rows in self.parts]
        self.starts = np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def micro_batch(self, ids: list[int]) -> MicroBatch:
        """The rows of these numbers; -1 is a row of padding."""
        parts = np.searchsorted(self.starts, ids, side="right") - 1
        picks = [(self.parts[p], i - int(self.starts[p])) if i >= 0 else None for p, i in zip(parts.tolist(), ids)]
        return MicroBatch.from_rows(read_rows(picks, self.seq_len), tuple(ids))


class TrainBatches:
    """This rank's micro-batches of any step.

    The global batch of step i is the rows at positions i·global_batch … (i+1)·global_batch - 1 of the infinite shuffled order.
    Rank r reads the r-th of dp_size equal stretches of it, cut into micro-batches. Raises ConfigError where the corpus holds
    nothing to predict or the batch does not divide.
    """

    def __init__(self, corpus: Corpus, train: TrainConfig, shuffle: bool, dp_size: int, dp_index: int) -> None:
        check_corpus(corpus, train)
        if train.global_batch % (train.micro_batch * dp_size):
            raise ConfigError(
                f"train.global_batch={train.global_batch}: must be a multiple of train.micro_batch={train.micro_batch} times "
                f"{dp_size} data-parallel ranks; give a multiple of {train.micro_batch * dp_size}."
            )
        self.rows = RowTable(corpus.train, train.seq_len)
        self._schedule = BlendSchedule(corpus.weights)
        self._train, self._shuffle = train, shuffle
        self._per_rank = train.global_batch // dp_size
        self._first = dp_index * self._per_rank

    def __len__(self) -> int:
        """Micro-batches of one step on this rank."""
        return self._per_rank // self._train.micro_batch

    @property
    def rows_per_epoch(self) -> int:
        """Rows of the training split, of all sources together."""
        return len(self.rows)

    def step(self, index: int) -> list[MicroBatch]:
        """The micro-batches of 0-based step `index`."""
        return self.at(int(index) * self._train.global_batch)

    def at(self, position: int) -> list[MicroBatch]:
        """The micro-batches of the global batch that begins when `position` samples have been consumed, whatever batch
        sizes were used before."""
        ids = self.sample_ids(position + self._first + np.arange(self._per_rank, dtype=np.int64)).tolist()
        size = self._train.micro_batch
        return [self.rows.micro_batch(ids[at : at + size]) for at in range(0, len(ids), size)]

    def sample_ids(self, positions: Int64s) -> Int64s:
        """Row numbers at these positions of the infinite order."""
        sources, ordinals = self._schedule.locate(positions)
        ids = np.empty_like(ordinals)
        for source in sorted(set(sources.tolist())):
            here = sources == source
            rows = shuffled(ordinals[here], self.rows.counts[source], self._train.seed, source, self._shuffle)
            ids[here] = self.rows.starts[source] + rows
        return ids


class EvalBatches:
    """Every row of the held-out split once over all ranks, in as many batches on each rank; rows of padding make up the rest.

    May be empty. Sum losses and live tokens over batches and ranks, then divide: the result does not depend on the layout.
    """

    def __init__(self, corpus: Corpus, seq_len: int, micro_batch: int, dp_size: int, dp_index: int) -> None:
        self.rows = RowTable(corpus.evaluation, seq_len)
        self._micro_batch, self._dp_size, self._dp_index = micro_batch, dp_size, dp_index

    def __len__(self) -> int:
        together = self._micro_batch * self._dp_size
        return (len(self.rows) + together - 1) // together

    def __iter__(self) -> Iterator[MicroBatch]:
        for batch in range(len(self)):
            first = (batch * self._dp_size + self._dp_index) * self._micro_batch
            yield self.rows.micro_batch([i if i < len(self.rows) else -1 for i in range(first, first + self._micro_batch)])
