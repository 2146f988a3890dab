"""Passes over flat tensors: the sum of squares, which is norm and flag at once, and sums of tensors of different dtypes.

`fused` picks the kernels of csrc/reduce where `library.usable` allows, else plain torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dist_train.ops import library

_CHUNK = 1 << 15  # elements; the fp64 copy of one chunk stays in cache


def sum_of_squares(tensors: Sequence[Tensor], fused: bool = True) -> Tensor:
    """Σx² over tensors on one device, at least one, as an fp64 scalar there.

    Squares of fp32, bf16 and fp16 cannot overflow in fp64, so the sum is finite exactly when every element is. The same bits
    for any number of threads.
    """
    if fused and library.usable(*tensors):
        return torch.ops.dist_train.sum_of_squares(list(tensors))
    if tensors[0].device.type != "cpu":
        return torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64).square() for x in tensors]).sum()
    total, scratch = torch.zeros((), dtype=torch.float64), torch.empty(_CHUNK, dtype=torch.float64)
    for tensor in tensors:
        for chunk in tensor.reshape(-1).split(_CHUNK):
            wide = scratch[: chunk.numel()].copy_(chunk)
            total += torch.dot(wide, wide)
    return total


def accumulate_(sums: Sequence[Tensor], addends: Sequence[Tensor], fused: bool = True) -> None:
    """`sums[i] += addends[i]` in place, of any float dtypes: added in fp32 and rounded once, without a copy of the addend."""
    if fused and library.usable(*sums, *addends) and all(total.is_contiguous() for total in sums):
        torch.ops.dist_train.accumulate_(list(sums), list(addends))
    else:
        torch._foreach_add_(list(sums), list(addends))


if library.loaded:

    @torch.library.register_fake("dist_train::sum_of_squares")
    def _(tensors: list[Tensor]) -> Tensor:
        return tensors[0].new_empty((), dtype=torch.float64)

    @torch.library.register_fake("dist_train::accumulate_")
    def _(sums: list[Tensor], addends: list[Tensor]) -> None:
        return None
