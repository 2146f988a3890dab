"""Where a tensor held here lies in the logical tensor that everybody means by its name."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Box:
    """The elements offset[d] .. offset[d] + shape[d] - 1 along every dim d of a logical tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of elements; 1 for the box of a scalar."""
        return math.prod(self.shape)

    def __str__(self) -> str:
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(self.offset, self.shape, strict=False)) + "]"


@dataclass(frozen=True)
class Piece:
    """The box offset .. offset + tensor.shape of the logical tensor `name`, whose global shape is `shape`.

    Checkpoints are written from pieces and read into pieces.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]

    @property
    def box(self) -> Box:
        return Box(tuple(self.offset), tuple(self.tensor.shape))

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> Piece:
        """A tensor that this rank holds all of."""
        return cls(name, tensor, tuple(tensor.shape), (0,) * tensor.dim())
