"""Seeded documents of unequal length with a structure that a model can learn: a noisy Markov chain over ids."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dist_train.config.compose import ConfigError
from dist_train.config.schema import DataConfig
from dist_train.data.order import fold64
from dist_train.data.rows import TokenSplit, document_offsets
from dist_train.data.split import held_out

_STATES = 64  # ids that the chain moves among; noise takes any id
_NOISE = 0.1  # share of tokens drawn at random; the others follow from the token before


def synthetic_splits(config: DataConfig, stream: int) -> tuple[TokenSplit, TokenSplit]:
    """Training and held-out documents in memory: synthetic_min..max_tokens tokens each, the last of them the end token.

    A pure function of the config and `stream` (the place in a blend). Rows hold whole documents and padding, so they differ
    in live tokens. Raises ConfigError for sizes that make no sense.
    """
    low, high, vocab = config.synthetic_min_tokens, config.synthetic_max_tokens, config.tokenizer_vocab
    count = min(config.synthetic_documents, config.max_documents or config.synthetic_documents)
    if not 1 <= low <= high or high < 2:
        raise ConfigError(f"data.synthetic_min_tokens={low}, synthetic_max_tokens={high}: need 1 <= min <= max and 2 <= max.")
    if count < 1:
        raise ConfigError(f"data.synthetic_documents={count}: give at least 1.")
    if vocab < 2:
        raise ConfigError(
            f"data.tokenizer_vocab={vocab}: synthetic documents need an id and an end token; set model.vocab=2 or more."
        )
    rng = np.random.Generator(np.random.PCG64(fold64(count, low, high, vocab, stream)))
    lengths = low + (rng.random(count) * (high - low + 1)).astype(np.int64)
    tokens = _chains(rng, lengths, vocab)
    bits = np.asarray([fold64(stream, d) for d in range(count)], dtype=np.uint64)
    held = held_out(bits, lengths, config.eval_fraction)
    owner = np.repeat(held, lengths)

    def split(side: bool) -> TokenSplit:
        chosen = lengths[held == side]
        return TokenSplit(tokens[owner == side], document_offsets(chosen), int(chosen.sum()), "whole")

    train, evaluation = split(False), split(True)
    if train.predicted < 1:
        raise ConfigError(f"data.synthetic_max_tokens={high}: the documents hold nothing to predict; make them more or longer.")
    return train, evaluation


def _chains(rng: np.random.Generator, lengths: npt.NDArray[np.int64], vocab: int) -> npt.NDArray[np.int64]:
    """All documents end to end; one vectorised pass per position."""
    ids = vocab - 1  # the last id is the end token
    states = min(ids, _STATES)
    width = int(lengths.max())
    table = np.empty((len(lengths), width), dtype=np.int64)
    table[:, 0] = (rng.random(len(lengths)) * states).astype(np.int64)
    for t in range(1, width):
        chance, noise = rng.random((2, len(lengths)))
        follows = (table[:, t - 1] * 5 + 3) % states
        table[:, t] = np.where(chance < _NOISE, (noise * ids).astype(np.int64), follows)
    table[np.arange(len(lengths)), lengths - 1] = ids
    return table[np.arange(width) < lengths[:, None]]
