"""residual + dropout(x), with a mask that is a function of a named stream: nothing is kept for backward or recompute.

Element i of x is dropped or not by element `offset + i` of the stream `seed`: words of the counter-based generator
Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11). Ranks that hold parts of a tensor give the
offsets of their parts and get the mask of the whole; ranks that need different masks give different seeds.
`fused` picks the kernels of csrc/dropout where `library.usable` allows; the reference makes the same mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dist_train.ops import library

_MULTIPLIERS, _WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_LOW = (1 << 32) - 1


def stream(seed: int, offset: int, device: torch.device | str = "cpu") -> Tensor:
    """The int64 pair that names a place in a stream; a tensor, so that a compiled or captured step may change it."""
    if offset < 0:
        raise ValueError(f"offset={offset} counts elements of the stream; set it to 0 or more.")
    signed = (seed & (1 << 64) - 1) - ((seed >> 63 & 1) << 64)
    return torch.tensor([signed, offset], dtype=torch.int64, device=device)


def dropout_add(x: Tensor, residual: Tensor | None, stream: Tensor, p: float, fused: bool = True) -> Tensor:
    """`residual + dropout(x)`, rounded once to x's dtype; `residual`: like x, or None. `stream`: int64 (2,) on x's device."""
    if fused and library.usable(x, residual):
        return torch.ops.dist_train.dropout_add(x, residual, stream, p)
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p={p} is a probability; set it from 0 to 1.")
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    # The product of the kernel is one with the fp32 number next to 1 / (1 - p).
    scale = torch.tensor(1 / (1 - p) if p < 1 else 0.0, dtype=wide, device=x.device)
    kept = torch.where(dropped(x.numel(), stream, p).view(x.shape), 0.0, x.to(wide) * scale)
    return (kept if residual is None else kept + residual).to(x.dtype)


def dropped(numel: int, stream: Tensor, p: float) -> Tensor:
    """bool (numel,): which elements of a tensor are dropped."""
    places = torch.arange(numel, device=stream.device) + stream[1]
    counters, words = torch.unique_consecutive(places // 4, return_inverse=True)
    return philox(counters, stream[0])[words, places % 4] < int(p * 2**32)


def philox(counters: Tensor, seed: Tensor) -> Tensor:
    """Philox4x32-10: int64 (n,) counters, int64 seed → (n, 4) words as int64 from 0 to 2^32 - 1."""
    zeros = torch.zeros_like(counters)
    word, key = [counters & _LOW, counters >> 32 & _LOW, zeros, zeros], [seed & _LOW, seed >> 32 & _LOW]
    for _ in range(10):
        # (A product of 64 bits wraps to a negative number; its bits are right.)
        a, b = (multiplier * each for multiplier, each in zip(_MULTIPLIERS, word[::2], strict=True))
        word = [b >> 32 & _LOW ^ word[1] ^ key[0], b & _LOW, a >> 32 & _LOW ^ word[3] ^ key[1], a & _LOW]
        key = [each + weyl & _LOW for each, weyl in zip(key, _WEYL, strict=True)]
    return torch.stack(word, 1)


if library.loaded:

    @torch.library.register_fake("dist_train::dropout_add")
    def _(x: Tensor, residual: Tensor | None, stream: Tensor, p: float) -> Tensor:
        return library.contiguous_like(x)

    def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[2])
        ctx.p, ctx.has_residual = inputs[3], inputs[1] is not None

    def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (stream,) = ctx.saved_tensors
        dx = torch.ops.dist_train.dropout_add(dy, None, stream, ctx.p) if ctx.needs_input_grad[0] else None
        return dx, dy if ctx.has_residual else None, None, None

    torch.library.register_autograd("dist_train::dropout_add", _backward, setup_context=_save)
