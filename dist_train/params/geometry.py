"""Where a tensor held here lies in the logical tensor that everybody means by its name."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """The box `offset .. offset + tensor.shape` of the logical tensor `name`, whose global shape is `shape`.

    A tensor held whole has offset zero and its own shape. Checkpoints are written from pieces and read into pieces.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
