"""The arithmetic of a mesh of ranks: rank <-> coordinates, and who shares an axis. Pure integers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

AXES = ("pp", "dp", "cp", "tp")  # slowest to fastest: tensor-parallel ranks, which talk most, are neighbours


@dataclass(frozen=True)
class MeshShape:
    """Degrees of pipeline, data, context and tensor parallelism; `tp` varies fastest (Megatron-LM's order)."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis, degree in zip(AXES, self.degrees, strict=True):
            if degree < 1:
                raise ValueError(f"mesh.{axis}={degree}: a degree is at least 1; set mesh.{axis}=1 for no parallelism on it.")

    @property
    def degrees(self) -> tuple[int, int, int, int]:
        return self.pp, self.dp, self.cp, self.tp

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.degrees)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` on each axis. Raises ValueError outside 0..size-1."""
        if not 0 <= rank < self.size:
            raise ValueError(f"rank {rank}: this mesh has ranks 0..{self.size - 1}.")
        found = {}
        for axis, degree in zip(reversed(AXES), reversed(self.degrees), strict=True):
            rank, found[axis] = divmod(rank, degree)
        return {axis: found[axis] for axis in AXES}

    def rank(self, pp: int = 0, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The rank at these coordinates: the inverse of `coordinates`."""
        rank = 0
        for index, degree in zip((pp, dp, cp, tp), self.degrees, strict=True):
            rank = rank * degree + index
        return rank

    def groups(self, axes: str | Sequence[str]) -> list[tuple[int, ...]]:
        """The ranks that differ only on `axes` (one axis or several), group by group; every rank is in exactly one."""
        along = {axes} if isinstance(axes, str) else set(axes)
        fixed = [range(1) if axis in along else range(degree) for axis, degree in zip(AXES, self.degrees, strict=True)]
        moving = [range(degree) if axis in along else range(1) for axis, degree in zip(AXES, self.degrees, strict=True)]
        return [
            tuple(self.rank(*(a + b for a, b in zip(origin, step, strict=True))) for step in itertools.product(*moving))
            for origin in itertools.product(*fixed)
        ]

    def __str__(self) -> str:
        return " × ".join(f"{axis}{degree}" for axis, degree in zip(AXES, self.degrees, strict=True) if degree > 1) or "one rank"
