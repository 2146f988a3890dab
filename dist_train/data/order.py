"""Which row is read when: pure functions of (seed, epoch, position), with random access and no table of the corpus.

An epoch's order is a keyed permutation of 0..n-1 by a Feistel network with cycle walking (Black and Rogaway, "Ciphers with
Arbitrary Finite Domains", CT-RSA 2002), so a corpus of any size costs no memory, and the arithmetic is ours: an upgrade of
numpy cannot change the order under a run. Blends follow a fixed block of slots in which each source is spread evenly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

_ROUNDS = 8
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_BLOCK_SLOTS = 10_000  # weights are met to 1e-4, and decimal weights such as 0.25 exactly


def mix64(value: int) -> int:
    """The finalizer of SplitMix64 (Steele et al., OOPSLA 2014) of an integer modulo 2**64."""
    value &= _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def fold64(*values: int) -> int:
    """One 64-bit word of several integers; changing any of them changes it."""
    word = 0
    for value in values:
        word = mix64(word * 3 + _GOLDEN + mix64(value))
    return word


def _mix64s(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def permute(index: Int64s, size: int, key: int) -> Int64s:
    """The places of `index` (each in 0..size-1) in the permutation of 0..size-1 that `key` (64 bits) names; a bijection.

    The generalized Feistel network of the paper over pairs in Z_a × Z_b, the smallest near-square that holds `size`: fewer
    than one index in sqrt(size) has to walk on.
    """
    if size <= 1:
        return np.zeros_like(index)
    high_size = math.isqrt(size - 1) + 1
    low_size = (size + high_size - 1) // high_size
    high_mod, low_mod = np.uint64(high_size), np.uint64(low_size)
    keys = [np.uint64(mix64(key + r * _GOLDEN)) for r in range(_ROUNDS)]
    place = index.astype(np.uint64)
    walking = np.arange(len(place))
    while len(walking):
        high, low = np.divmod(place[walking], low_mod)
        for even, odd in zip(keys[::2], keys[1::2]):
            high = (high + _mix64s(low + even) % high_mod) % high_mod
            low = (low + _mix64s(high + odd) % low_mod) % low_mod
        place[walking] = high * low_mod + low
        walking = walking[place[walking] >= np.uint64(size)]
    return place.astype(np.int64)


def shuffled(ordinal: Int64s, size: int, seed: int, stream: int, shuffle: bool = True) -> Int64s:
    """Rows at these places of the infinite order of a source of `size` rows: every epoch holds each row once.

    `stream` tells sources of a blend apart. Without `shuffle` every epoch is 0..size-1.
    """
    epochs, within = np.divmod(ordinal, np.int64(size))
    if not shuffle:
        return within
    rows = np.empty_like(within)
    for epoch in sorted(set(epochs.tolist())):
        chosen = epochs == epoch
        rows[chosen] = permute(within[chosen], size, fold64(seed, stream, epoch))
    return rows


class BlendSchedule:
    """Which source gives the sample at each position: a block of slots, repeated, with each source's slots spread evenly.

    In every block source s has exactly round(weight · slots) of them, and in any stretch of positions its share differs from
    its weight by about one sample per source.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        share = np.asarray(weights, dtype=np.float64) / math.fsum(weights)
        counts = np.maximum(np.floor(share * _BLOCK_SLOTS + 1e-6), 1).astype(np.int64)
        remainder = share * _BLOCK_SLOTS - counts
        while (missing := _BLOCK_SLOTS - int(counts.sum())) != 0:
            source = int(np.argmax(remainder)) if missing > 0 else int(np.argmin(np.where(counts > 1, remainder, np.inf)))
            step = 1 if missing > 0 else -1
            counts[source] += step
            remainder[source] -= step
        counts //= math.gcd(*counts.tolist())
        sources = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        ordinals = np.concatenate([np.arange(n, dtype=np.int64) for n in counts])
        order = np.argsort(
            (ordinals + 0.5) / counts[sources], kind="stable"
        )  # sample i of n belongs at (i + 1/2) / n of the block
        self.counts: Int64s = counts
        self._source, self._ordinal = sources[order], ordinals[order]

    def locate(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """Of each position: its source, and how many samples of that source come before it."""
        blocks, slots = np.divmod(positions, np.int64(len(self._source)))
        source = self._source[slots]
        return source, blocks * self.counts[source] + self._ordinal[slots]
