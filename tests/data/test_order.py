"""The order of rows is a function of (seed, epoch, position), and blends follow their weights."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_train.data.order import BlendSchedule, fold64, permute, shuffled


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 5000), key=st.integers(0, 2**64 - 1))
def test_a_permutation_holds_every_row_once(size: int, key: int) -> None:
    places = permute(np.arange(size), size, key)
    assert places.dtype == np.int64
    assert np.array_equal(np.sort(places), np.arange(size))


@settings(max_examples=100, deadline=None)
@given(size=st.integers(2**31, 2**62), key=st.integers(0, 2**64 - 1), data=st.data())
def test_F23_orders_of_huge_corpora_stay_in_range_without_a_table(size: int, key: int, data: st.DataObject) -> None:
    asked = np.asarray([0, 1, size // 2, size - 1, data.draw(st.integers(0, size - 1))], dtype=np.int64)
    places = permute(asked, size, key)
    assert places.min() >= 0 and places.max() < size
    assert len(set(places.tolist())) == len(set(asked.tolist()))


@pytest.mark.parametrize("size", [2, 3, 5, 7, 12])
def test_every_row_comes_first_about_as_often(size: int) -> None:
    draws = 2000
    for place in (0, size - 1):
        hits = np.bincount([int(permute(np.asarray([place]), size, fold64(1, k))[0]) for k in range(draws)], minlength=size)
        expected = draws / size
        chi_square = float(((hits - expected) ** 2 / expected).sum())
        assert chi_square < 4 * size + 20  # far beyond any luck: p < 1e-4 for every size here


def test_neighbours_are_scattered() -> None:
    size = 10_000
    places = permute(np.arange(size), size, 7)
    assert abs(float(np.corrcoef(np.arange(size), places)[0, 1])) < 0.05
    assert np.mean(np.abs(np.diff(places)) == 1) < 0.01
    assert np.mean(np.diff(places) == np.diff(places)[0]) < 0.01


def test_F26_order_is_a_function_of_seed_epoch_position() -> None:
    size = 10
    whole = shuffled(np.arange(50), size, seed=3, stream=0)
    for epoch in range(5):
        assert sorted(whole[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))
    assert len({tuple(whole[e * size : (e + 1) * size].tolist()) for e in range(5)}) == 5  # another order in each epoch
    for start in (0, 7, 14, 29):  # asked anywhere, across epochs: the same
        assert np.array_equal(shuffled(np.arange(start, start + 15), size, 3, 0), whole[start : start + 15])
    backwards = shuffled(np.arange(49, -1, -1), size, 3, 0)
    assert np.array_equal(backwards[::-1], whole)
    assert not np.array_equal(shuffled(np.arange(50), size, 4, 0), whole)
    assert not np.array_equal(shuffled(np.arange(50), size, 3, 1), whole)


def test_the_order_is_pinned() -> None:
    """A run resumed with a later version reads on where it stopped: these numbers must never change."""
    assert shuffled(np.arange(12), 10, seed=0, stream=0).tolist() == PINNED_SMALL
    assert shuffled(np.asarray([0, 1, 10**9]), 3_000_000_019, seed=42, stream=1).tolist() == PINNED_LARGE


PINNED_SMALL = [4, 2, 3, 1, 0, 9, 6, 5, 8, 7, 0, 8]
PINNED_LARGE = [1028443954, 801962548, 2561057234]


def test_unshuffled_order_counts_up_in_every_epoch() -> None:
    assert shuffled(np.arange(7), 3, seed=0, stream=0, shuffle=False).tolist() == [0, 1, 2, 0, 1, 2, 0]


@settings(max_examples=60, deadline=None)
@given(weights=st.lists(st.floats(0.001, 10.0), min_size=1, max_size=6), start=st.integers(0, 10**12))
def test_blends_hit_their_weights_anywhere_and_miss_no_sample(weights: list[float], start: int) -> None:
    schedule = BlendSchedule(weights)
    share = np.asarray(weights) / sum(weights)
    positions = np.arange(start, start + 20_000)
    sources, ordinals = schedule.locate(positions)
    for source, expected in enumerate(share):
        mine = ordinals[sources == source]
        assert abs(len(mine) - expected * len(positions)) <= 2 + 2e-4 * len(positions)
        assert np.array_equal(np.sort(mine), np.arange(mine.min(), mine.min() + len(mine)))  # each sample once, no gap
    some = np.asarray([start + 19_999, start + 5, start + 12_345])  # random access, any order
    found = schedule.locate(some)
    assert np.array_equal(found[0], sources[some - start]) and np.array_equal(found[1], ordinals[some - start])


def test_blends_are_even_in_short_stretches() -> None:
    schedule = BlendSchedule([0.7, 0.2, 0.1])
    sources, _ = schedule.locate(np.arange(3000))
    for start in range(0, 3000 - 50, 7):
        counts = np.bincount(sources[start : start + 50], minlength=3)
        assert np.abs(counts - [35, 10, 5]).max() <= 2


def test_decimal_weights_are_met_exactly() -> None:
    sources, ordinals = BlendSchedule([0.25, 0.749, 0.001]).locate(np.arange(10_000))
    assert np.bincount(sources).tolist() == [2500, 7490, 10]
    assert ordinals[sources == 2].tolist() == list(range(10))


def test_a_tiny_weight_still_gets_samples() -> None:
    sources, _ = BlendSchedule([1.0, 1e-9]).locate(np.arange(10_000))
    assert np.count_nonzero(sources == 1) == 1
