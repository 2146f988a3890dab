"""Where a tensor held here lies in the logical tensor that everybody means by its name."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

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


@dataclass(frozen=True)
class ParamGeometry:
    """Which part of which logical parameter a rank holds, and what its gradient lacks before data ranks are added up.

    The box `offset .. offset + parameter.shape` of the parameter `name`, whose global shape is `shape`. `copies`: the axes along
    which other ranks hold the same box ("tp"; "ends": the first and the last stage of a pipeline, where they tie a weight).
    `partial`: those of them along which each copy sees only a part of what the parameter was used for, so that its gradient is
    the sum over the copies. A copy along any other axis computes the whole gradient by itself.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    copies: tuple[str, ...] = ("tp",)
    partial: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not set(self.partial) <= set(self.copies):
            raise ValueError(f"{self.name}: its gradient is partial over {self.partial}, but copies are over {self.copies} only.")

    def box(self, held: Tensor) -> tuple[slice, ...]:
        """Where `held`, a tensor of the shape that is held here, lies in the whole one."""
        return tuple(slice(start, start + extent) for start, extent in zip(self.offset, held.shape, strict=True))

    def shift(self, piece: Piece, name: str) -> Piece:
        """A piece of the parameter held here, in its own coordinates, as the piece `name` of the logical tensor."""
        offset = tuple(mine + there for mine, there in zip(self.offset, piece.offset, strict=True))
        return Piece(name, piece.tensor, self.shape, offset)


def geometry_of(name: str, param: Tensor) -> ParamGeometry:
    """The geometry of a parameter that its module calls `name`; without one it is whole, and the same on all "tp" ranks."""
    found: ParamGeometry | None = getattr(param, "geometry", None)
    return found or ParamGeometry(name, tuple(param.shape), (0,) * param.dim())


def set_geometry(param: Tensor, geometry: ParamGeometry) -> None:
    """Put the one attribute on a parameter that this package puts there."""
    param.geometry = geometry  # type: ignore[attr-defined]


class FlatBox(NamedTuple):
    """A box of a flat range; its elements are `flat[at : at + box.size]` of the range, in row-major order."""

    box: Box
    at: int  # elements from the start of the range


def flat_range_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[FlatBox]:
    """Elements start .. stop-1 of the flattened (row-major) tensor as the fewest boxes that are contiguous in it, in order.

    At most 2·dims - 1 boxes. An empty range gives none. Raises ValueError when the range does not lie in the tensor.
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(f"range {start}..{stop} of a tensor of shape {shape}")
    return _range(shape, start, stop, (), 0)


def _range(shape: tuple[int, ...], start: int, stop: int, prefix: tuple[int, ...], at: int) -> list[FlatBox]:
    # `prefix`: the indices chosen in earlier dims; `shape`: the dims that are left.
    if start == stop:
        return []
    if not shape:
        return [FlatBox(Box(prefix, (1,) * len(prefix)), at)]
    inner = math.prod(shape[1:])
    first, last = -(-start // inner), stop // inner  # whole rows: first .. last - 1
    if first > last:  # both ends within one row
        row = last
        return _range(shape[1:], start - row * inner, stop - row * inner, (*prefix, row), at)
    found = []
    if start < first * inner:
        found += _range(shape[1:], start - (first - 1) * inner, inner, (*prefix, first - 1), at)
    if first < last:
        box = Box((*prefix, first, *(0 for _ in shape[1:])), (*(1 for _ in prefix), last - first, *shape[1:]))
        found.append(FlatBox(box, at + first * inner - start))
    if last * inner < stop:
        found += _range(shape[1:], 0, stop - last * inner, (*prefix, last), at + last * inner - start)
    return found
