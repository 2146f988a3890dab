"""Tensors of awkward shapes and the layouts that the tests cut them into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dist_train.checkpoint import Piece, save
from dist_train.comm.collectives import Collectives
from dist_train.mesh.mesh import ParallelMesh
from dist_train.params.geometry import flat_range_boxes

ODD_SHAPES = {
    "model/embed.weight": (53, 6),  # sizes that no number of ranks divides
    "model/empty": (0,),
    "model/one": (1,),
    "model/three": (3,),
    "model/scalar": (),
    "model/no_rows": (0, 4),
    "model/cube": (3, 5, 7),
    "optim/embed.weight/exp_avg": (53, 6),
}


def odd_tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in ODD_SHAPES.items()}


def whole(tensors: dict[str, Tensor]) -> list[Piece]:
    return [Piece.whole(name, tensor) for name, tensor in tensors.items()]


def zeros_like(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


def flat_pieces(buffer: Tensor, shapes: dict[str, tuple[int, ...]], rank: int, ranks: int) -> list[Piece]:
    """Views of one rank's slice of the padded flat buffer that holds all tensors one behind the other."""
    size, pieces, begin = buffer.numel(), [], 0
    for name, shape in shapes.items():
        end = begin + torch.Size(shape).numel()
        low, high = max(begin, rank * size), min(end, (rank + 1) * size)
        if low < high:
            for box, at in flat_range_boxes(shape, low - begin, high - begin):
                start = low - rank * size + at
                pieces.append(Piece(name, buffer[start : start + box.size].view(box.shape), shape, box.offset))
        elif begin == end and rank == 0:
            pieces.append(Piece(name, torch.zeros(shape), shape, (0,) * len(shape)))
        begin = end
    return pieces


def flat_buffer(tensors: dict[str, Tensor], ranks: int) -> Tensor:
    """All tensors one behind the other, padded with NaN so that padding in a saved value is seen; one row a rank."""
    flat = torch.cat([t.reshape(-1) for t in tensors.values()])
    padding = -len(flat) % ranks
    return torch.cat([flat, torch.full((padding,), torch.nan)]).view(ranks, -1)


def save_alone(root: Path, step: int, tensors: dict[str, Tensor], state: dict[str, Any] | None = None, **options: Any) -> Path:
    return save(root, step, whole(tensors), state or {}, Collectives(), ParallelMesh.single().world, **options)
