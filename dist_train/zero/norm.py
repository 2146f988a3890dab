"""The global gradient norm, the clip factor and the vote on non-finite gradients, from one all-reduce.

Every element is counted once: each data rank adds the squares of its own slice of every bucket, whether it holds the rest
or not. Squares add up in fp64, so that neither bucket sizes nor the number of ranks move the result. A square that is not
finite makes the sum so, on every rank alike, which is the vote.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_CHUNK = 1 << 15  # elements; the fp64 copy of one chunk stays in cache


def sum_of_squares(parts: Iterable[Tensor], device: torch.device) -> Tensor:
    """Σx² over flat tensors of any float dtype, as an fp64 scalar on `device`."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cuda":
        for part in parts:
            total += torch.linalg.vector_norm(part, dtype=torch.float64).square()
        return total
    scratch = torch.empty(_CHUNK, dtype=torch.float64)
    for part in parts:
        for chunk in part.split(_CHUNK):
            wide = scratch[: chunk.numel()].copy_(chunk)
            total += torch.dot(wide, wide)
    return total


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm ÷ norm); `max_norm=0` turns clipping off."""
    if max_norm <= 0:
        return torch.ones_like(norm)
    return (max_norm / norm).clamp(max=1.0)
