"""Which queries of one rank see which keys of another, as rectangles without a mask. Pure.

Chunks of a row stand in order, so all keys of an earlier chunk come before all queries of a later one; what hides some is the
border of a document. A document is contiguous: keys of an earlier chunk are seen by the document that the later chunk begins
in, and by no other. So two different chunks meet in one rectangle, or not at all, and no mask is ever needed.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from dist_train.context.split import Split


class Rectangle(NamedTuple):
    """Every one of these queries sees every one of these keys. Places count in the 2·C tokens that a rank holds."""

    rows: slice
    queries: slice
    keys: slice


Span = tuple[int, int]  # first, and one past the last


def rectangles(runs_BT: Tensor, split: Split, rank: int, source: int) -> tuple[Rectangle, ...]:
    """Where queries of `rank` see keys of another rank `source`.

    `runs_BT` (int, on the host): the document of each token of whole rows with their padding, rising along a row.
    """
    wanted = [_of_row(begins_T, split, rank, source) for begins_T in _document_spans(runs_BT, split)]
    found: list[Rectangle] = []
    row = 0
    for spans, alike in groupby(wanted):  # neighbouring rows that see the same are computed together
        stop = row + len(list(alike))
        found += [Rectangle(slice(row, stop), slice(*queries), slice(*keys)) for queries, keys in spans]
        row = stop
    return tuple(found)


def _document_spans(runs_BT: Tensor, split: Split) -> list[list[Span]]:
    """For each row and chunk: the span of the document that the chunk begins in."""
    first = torch.arange(0, split.padded, split.chunk)
    numbers = runs_BT[:, first].contiguous()
    begins, ends = (torch.searchsorted(runs_BT.contiguous(), numbers, right=right).tolist() for right in (False, True))
    return [list(zip(*row)) for row in zip(begins, ends)]


def _of_row(documents: list[Span], split: Split, rank: int, source: int) -> list[tuple[Span, Span]]:
    chunk, found = split.chunk, []
    for place, i in enumerate(split.chunks(rank)):
        begin, end = documents[i]
        queries = place * chunk, place * chunk + min(end - i * chunk, chunk)
        for there, j in enumerate(split.chunks(source)):
            if j < i and begin < (j + 1) * chunk:
                keys = there * chunk + max(begin - j * chunk, 0), (there + 1) * chunk
                found.append((queries, keys))
    return _joined(found)


def _joined(found: list[tuple[Span, Span]]) -> list[tuple[Span, Span]]:
    """Two rectangles that make up one, as that one."""
    if len(found) == 2:
        (queries, keys), (more_queries, more_keys) = found
        if queries == more_queries and keys[1] == more_keys[0]:
            return [(queries, (keys[0], more_keys[1]))]
        if keys == more_keys and queries[1] == more_queries[0]:
            return [((queries[0], more_queries[1]), keys)]
    return found
