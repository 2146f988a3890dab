"""Proof that all ranks gather the same parameters in the same order (stage 3).

A gather is a collective. Where one rank leaves a unit out or takes two in another order, gathers of different units meet:
with equal sizes they would fill each other's parameters, with unequal ones they would hang. So nothing is gathered unproven:

    a pass that does as the one before did     is the order that was agreed then; nothing is sent
    the first pass, and after a new turn       ranks compare what they are about to gather, by a small all-gather each time
    a turn from the known order                must be taken by all. They meet in the store, not in a collective, since who
                                               does not turn is in another one; who comes alone raises instead of waiting
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import timedelta

import torch

from dist_train.comm.collectives import Collectives
from dist_train.mesh.mesh import Group, ParallelMesh

_PATIENCE = timedelta(seconds=60)  # at most, for ranks that compute longer


class OrderError(RuntimeError):
    """Ranks are about to gather different parameters."""


class GatherOrder:
    """Watches the gathers of one engine over `group`. `names`: what to call each bucket in errors."""

    def __init__(self, names: Sequence[str], group: Group, comm: Collectives, mesh: ParallelMesh) -> None:
        self._names, self._group, self._comm, self._device = names, group, comm, mesh.device
        timeout = mesh.timeout
        self._patience = _PATIENCE if timeout is None else min(_PATIENCE, timeout / 2)
        self._known: dict[bool, list[int]] = {}  # the last pass with, and the last one without gradients
        self._now: list[int] = []
        self._training, self._follows = True, False
        self._place, self._turns = comm.broadcast_object(uuid.uuid4().hex, group), 0

    def begin(self, training: bool) -> None:
        """A forward begins; with `training` a backward follows."""
        if self._now:
            self._known[self._training] = self._now
        self._now, self._training, self._follows = [], training, training in self._known

    def next(self, index: int) -> None:
        """Before bucket `index` is gathered. Raises OrderError."""
        place, known = len(self._now), self._known.get(self._training, [])
        self._now.append(index)
        if self._group.size == 1 or (self._follows and known[place : place + 1] == [index]):
            return
        if self._follows:
            self._turn(index, self._names[known[place]] if place < len(known) else "nothing more")
        else:
            self._compare(index)

    def _compare(self, index: int) -> None:
        found = torch.empty(self._group.size, dtype=torch.int64, device=self._device)
        self._comm.all_gather(found, torch.tensor([index], device=self._device), self._group).wait()
        self._require_equal([self._names[other] for other in found.tolist()], index)

    def _turn(self, index: int, expected: str) -> None:
        self._follows, self._turns = False, self._turns + 1
        found = self._comm.meet(f"{self._place}/{self._turns}", self._names[index], self._group, self._patience)
        if found is None:
            raise OrderError(
                f"data rank {self._group.index} gathers {self._names[index]} where it gathered {expected} the time before, and "
                f"within {self._patience.total_seconds():g} s not every rank did the like. {_REMEDY}"
            )
        self._require_equal(found, index)

    def _require_equal(self, found: list[str], index: int) -> None:
        for rank, name in enumerate(found):
            if name != self._names[index]:
                mine = f"data rank {self._group.index} gathers {self._names[index]}"
                raise OrderError(f"{mine} where data rank {rank} gathers {name}. {_REMEDY}")


_REMEDY = (
    "At stage 3 all data ranks must use the same units in the same order, and none may leave one out: make the module take "
    "the same branches on all ranks, or set stage 2, which does not ask for it."
)
