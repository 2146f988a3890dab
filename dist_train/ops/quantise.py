"""What compressed reductions do to their bytes: int8 in blocks with scales (arXiv:2306.10209), and the largest of each row.

`fused` picks the kernels of csrc/quantise where `library.usable` allows, else the reference in plain torch. Codes, scales and
choices are the same bits with either, on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dist_train.ops import library

_TINY = torch.finfo(torch.float32).tiny  # below it a quotient by 127 loses its digits


def int8_encode(rows_RN: Tensor, block: int, fused: bool = True) -> Tensor:
    """(R, N) floats → (R, 4 · ⌈N ÷ block⌉ + N) int8: the bytes of a row's fp32 scales, then its codes.

    scale = largest magnitude of the block ÷ 127; code = x ÷ scale to the nearest, ties to even. A block of zeros has scale 0.
    A block with a value that is not finite decodes to nothing finite.
    """
    if fused and library.usable(rows_RN):
        return torch.ops.dist_train.int8_encode(rows_RN, block)
    blocks = _blocks(rows_RN, block)
    lengths = [x.shape[1] for x in blocks]
    scales = rows_RN.new_empty(len(rows_RN), sum(lengths), dtype=torch.float32)
    codes = rows_RN.new_empty(rows_RN.shape, dtype=torch.int8)
    for x, code, scale in zip(blocks, _blocks(codes, block), scales.split(lengths, 1)):
        largest = torch.maximum(x.amax(2), -x.amin(2)).float()  # NaN passes through all three
        step = (largest / 127).clamp(min=_TINY)
        code.copy_((x / step[..., None]).round_().nan_to_num_(0.0))
        scale.copy_(step * (largest != 0))
    return torch.cat((scales.view(torch.int8), codes), 1)


def int8_decode_(coded_RM: Tensor, out_RN: Tensor, block: int, add: bool = False, fused: bool = True) -> None:
    """What `int8_encode` made of rows like `out`, contiguous floats, is written into it, or with `add` added to it."""
    if fused and library.usable(out_RN):
        torch.ops.dist_train.int8_decode_(coded_RM, out_RN, block, add)
        return
    out = torch.empty_like(out_RN, dtype=torch.float32) if add else out_RN
    blocks = _blocks(out, block)
    lengths = [x.shape[1] for x in blocks]
    head = 4 * sum(lengths)
    scales = coded_RM.new_empty(len(coded_RM), sum(lengths), dtype=torch.float32)
    scales.view(torch.int8).copy_(coded_RM[:, :head])  # a view the other way would need these bytes to be aligned
    for x, code, scale in zip(blocks, _blocks(coded_RM[:, head:], block), scales.split(lengths, 1)):
        torch.mul(code, scale[..., None], out=x)
    if add:
        out_RN += out


def take_largest_(rows_RN: Tensor, count: int, fused: bool = True) -> Tensor:
    """Take the `count` elements of largest magnitude out of each row of contiguous fp32, leaving zeros.

    Returns (R, 2, count) int32: the bits of their values, and their places in order. NaN is the largest of all; of equals
    those that come first are taken.
    """
    if fused and library.usable(rows_RN):
        return torch.ops.dist_train.take_largest_(rows_RN, count)
    ranked = rows_RN.view(torch.int32) & 0x7FFFFFFF  # as integers, magnitudes are in the same order
    places = ranked.sort(dim=1, descending=True, stable=True).indices[:, :count].sort(dim=1).values
    values = rows_RN.gather(1, places)
    rows_RN.scatter_(1, places, 0.0)
    return torch.stack((values.view(torch.int32), places.to(torch.int32)), 1)


def _blocks(rows: Tensor, block: int) -> list[Tensor]:
    """Views of (R, N): whole blocks (R, blocks, block), and (R, 1, N % block); only those that hold elements."""
    whole = rows.shape[1] // block
    at = whole * block
    return [view for view in (rows[:, :at].unflatten(1, (whole, block)), rows[:, None, at:]) if view.numel()]


if library.loaded:

    @torch.library.register_fake("dist_train::int8_encode")
    def _(x: Tensor, block: int) -> Tensor:
        return x.new_empty(x.shape[0], 4 * -(-x.shape[1] // block) + x.shape[1], dtype=torch.int8)

    @torch.library.register_fake("dist_train::int8_decode_")
    def _(coded: Tensor, out: Tensor, block: int, add: bool) -> None:
        return None

    @torch.library.register_fake("dist_train::take_largest_")
    def _(x: Tensor, count: int) -> Tensor:
        return x.new_empty(x.shape[0], 2, count, dtype=torch.int32)
