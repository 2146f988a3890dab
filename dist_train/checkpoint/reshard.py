"""Saved boxes ∩ wanted boxes: how a tensor saved on one layout is read on another. Pure integers.

A layout is nothing but the boxes of the logical tensor that its ranks hold. A rank of a flat (ZeRO) layout holds a range
of the flattened tensor, which `params.geometry.flat_range_boxes` cuts into few boxes.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from dist_train.params.geometry import Box


def intersect(a: Box, b: Box) -> Box | None:
    """The common box of two boxes of one tensor; None when they share no element."""
    offset = tuple(max(x, y) for x, y in zip(a.offset, b.offset))
    shape = tuple(min(x + n, y + m) - o for x, n, y, m, o in zip(a.offset, a.shape, b.offset, b.shape, offset))
    return Box(offset, shape) if all(n > 0 for n in shape) else None


def slices(inner: Box, outer: Box) -> tuple[slice, ...]:
    """The index that selects `inner` from an array that holds exactly `outer`."""
    return tuple(slice(i - o, i - o + n) for i, o, n in zip(inner.offset, outer.offset, inner.shape))


def uncovered(wanted: Box, boxes: Iterable[Box]) -> Box | None:
    """Some part of `wanted` that no box covers; None when all of it is covered. Boxes may overlap.

    A sweep along the first dim over the cuts that the boxes make, then the same along the next within each slab: for N
    shards along one dim the work is N log N, not N².
    """
    if wanted.size == 0:
        return None
    clipped = [c for b in boxes if (c := intersect(wanted, b)) is not None]
    return _hole(wanted, clipped, 0)


def _hole(wanted: Box, boxes: list[Box], dim: int) -> Box | None:
    if not boxes:
        return wanted
    if any(b.offset[dim:] == wanted.offset[dim:] and b.shape[dim:] == wanted.shape[dim:] for b in boxes):
        return None
    start, stop = wanted.offset[dim], wanted.offset[dim] + wanted.shape[dim]
    cuts = sorted({start, stop, *(b.offset[dim] for b in boxes), *(b.offset[dim] + b.shape[dim] for b in boxes)})
    waiting = sorted(boxes, key=lambda b: b.offset[dim], reverse=True)
    active: list[Box] = []
    for low, high in pairwise(cuts):
        active = [b for b in active if b.offset[dim] + b.shape[dim] > low]
        while waiting and waiting[-1].offset[dim] <= low:
            active.append(waiting.pop())
        slab = Box(_with(wanted.offset, dim, low), _with(wanted.shape, dim, high - low))
        if (hole := _hole(slab, active, dim + 1)) is not None:
            return hole
    return None


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
