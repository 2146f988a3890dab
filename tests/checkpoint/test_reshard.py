from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_train.checkpoint.reshard import intersect, slices, uncovered
from dist_train.params.geometry import Box, flat_range_boxes

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def ranges(draw):
    shape = draw(SHAPES)
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@st.composite
def boxes_of_one_tensor(draw, count=5):
    shape = draw(st.lists(st.integers(1, 4), max_size=3).map(tuple))
    found = []
    for _ in range(draw(st.integers(1, count))):
        offset = tuple(draw(st.integers(0, n)) for n in shape)
        found.append(Box(offset, tuple(draw(st.integers(0, n - o)) for n, o in zip(shape, offset))))
    return shape, found


def mask(shape, boxes):
    covered = np.zeros(shape, dtype=bool)
    for box in boxes:
        covered[slices(box, Box((0,) * len(shape), shape))] = True
    return covered


@given(ranges())
@settings(max_examples=300, deadline=None)
def test_F21_a_flat_range_is_cut_into_boxes_that_hold_its_elements_in_order(case):
    shape, start, stop = case
    values = np.arange(math.prod(shape)).reshape(shape)
    found = flat_range_boxes(shape, start, stop)
    taken = [values[slices(f.box, Box((0,) * len(shape), shape))].reshape(-1) for f in found]
    assert np.concatenate([np.zeros(0, int), *taken]).tolist() == list(range(start, stop))
    assert [f.at for f in found] == list(np.cumsum([0, *(len(t) for t in taken)])[: len(found)])
    assert all(len(f.box.shape) == len(shape) and f.box.size for f in found)


@given(ranges())
@settings(max_examples=150, deadline=None)
def test_a_flat_range_takes_as_few_boxes_as_possible(case):
    shape, start, stop = case

    @lru_cache(None)
    def is_box(a, b):  # the smallest box around elements a .. b-1 has no other element
        index = np.stack(np.unravel_index(np.arange(a, b), shape)) if shape else np.zeros((0, b - a), int)
        return math.prod(index.max(1) - index.min(1) + 1) == b - a

    fewest = {start: 0}
    for b in range(start + 1, stop + 1):
        fewest[b] = min(fewest[a] + 1 for a in range(start, b) if is_box(a, b))
    assert len(flat_range_boxes(shape, start, stop)) == fewest[stop]


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2), (0, 7)])
def test_a_range_outside_the_tensor_is_refused(start, stop):
    with pytest.raises(ValueError, match="range"):
        flat_range_boxes((2, 3), start, stop)


@given(boxes_of_one_tensor(count=2))
@settings(max_examples=300, deadline=None)
def test_the_intersection_holds_exactly_the_common_elements(case):
    shape, boxes = case
    a, b = boxes[0], boxes[-1]
    common = intersect(a, b)
    expected = mask(shape, [a]) & mask(shape, [b])
    assert (common is None) == (not expected.any())
    if common is not None:
        assert (mask(shape, [common]) == expected).all()
        values = np.arange(math.prod(shape)).reshape(shape)
        whole = Box((0,) * len(shape), shape)
        assert (values[slices(a, whole)][slices(common, a)] == values[slices(common, whole)]).all()


@given(boxes_of_one_tensor())
@settings(max_examples=500, deadline=None)
def test_a_hole_is_found_exactly_when_there_is_one(case):
    shape, (wanted, *boxes) = case
    missing = mask(shape, [wanted]) & ~mask(shape, boxes)
    hole = uncovered(wanted, boxes)
    assert (hole is None) == (not missing.any())
    if hole is not None:
        assert hole.size and missing[slices(hole, Box((0,) * len(shape), shape))].all()


def test_many_shards_are_checked_in_little_time():
    import time

    shards = [Box((4 * i, 0), (4, 8)) for i in range(20000)]
    start = time.monotonic()
    assert uncovered(Box((0, 0), (80000, 8)), shards) is None
    assert uncovered(Box((0, 0), (80000, 8)), shards[:700] + shards[701:]) == Box((2800, 0), (4, 8))
    assert time.monotonic() - start < 10  # quadratic work takes minutes
