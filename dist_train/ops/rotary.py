"""Rotary position embedding (Su et al., arXiv:2104.09864), halves rotated as in GPT-NeoX and Hugging Face's Llama.

Shapes: B rows (1 broadcasts), T tokens, N heads, H head width, R = H/2 rotated pairs.

`fused` picks the kernels of csrc/rotary where `library.usable` allows, else the reference in plain torch.

The angles are made from the integer positions in every forward pass, in fp32, and kept in no buffer: casting a model to
bf16 can therefore never merge positions 256 and 257. One table serves all layers, so it costs next to nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dist_train.ops import library


def rotary_table(positions_BT: Tensor, head_width: int, theta: float) -> tuple[Tensor, Tensor]:
    """(cos_BT1H, sin_BT1H) in fp32 of the angles `position · theta^(-2r/H)`, the sine negative in the first half."""
    exponents_R = torch.arange(0, head_width, 2, dtype=torch.float64, device=positions_BT.device) / head_width
    frequencies_R = (theta**-exponents_R).float()  # rounded once: fp32 powers would lose digits at long positions
    angles_BT1R = positions_BT.float()[..., None, None] * frequencies_R
    cos_BT1R, sin_BT1R = angles_BT1R.cos(), angles_BT1R.sin()
    return torch.cat((cos_BT1R, cos_BT1R), dim=-1), torch.cat((-sin_BT1R, sin_BT1R), dim=-1)


def rotary(x_BTNH: Tensor, cos_BT1H: Tensor, sin_BT1H: Tensor, fused: bool = True) -> Tensor:
    """x with each pair (r, r + H/2) turned by its angle; computed in fp32, returned in x's dtype.

    (a, b) becomes (a·cos - b·sin, b·cos + a·sin). x may be strided, as a slice of a projection is.
    """
    if fused and _usable(x_BTNH, cos_BT1H, sin_BT1H):
        return torch.ops.dist_train.rotary(x_BTNH, cos_BT1H, sin_BT1H, False)
    return reference(x_BTNH, cos_BT1H, sin_BT1H)


def rotary_pair(q_BTNH: Tensor, k_BTKH: Tensor, cos_BT1H: Tensor, sin_BT1H: Tensor, fused: bool = True) -> tuple[Tensor, Tensor]:
    """`rotary` of queries and keys (K heads) in one launch, forward and backward."""
    if fused and q_BTNH.dtype == k_BTKH.dtype and all(_usable(x, cos_BT1H, sin_BT1H) for x in (q_BTNH, k_BTKH)):
        return torch.ops.dist_train.rotary_pair(q_BTNH, k_BTKH, cos_BT1H, sin_BT1H, False)
    return reference(q_BTNH, cos_BT1H, sin_BT1H), reference(k_BTKH, cos_BT1H, sin_BT1H)


def rotary_(x_BTNH: Tensor, cos_BT1H: Tensor, sin_BT1H: Tensor, fused: bool = True) -> Tensor:
    """`rotary` in x's own memory; use the result, and x no more.

    Where that cannot be, the result has memory of its own: without the kernels, under torch.compile (whose compiler plans
    memory), and for a leaf that wants a gradient. If autograd still needs x itself, backward raises.
    """
    leaf = x_BTNH.is_leaf and x_BTNH.requires_grad and torch.is_grad_enabled()
    in_place = not leaf and not torch.compiler.is_compiling() and x_BTNH.stride(-1) == 1
    if fused and in_place and _usable(x_BTNH, cos_BT1H, sin_BT1H):
        return _InPlace.apply(x_BTNH, cos_BT1H, sin_BT1H)
    return rotary(x_BTNH, cos_BT1H, sin_BT1H, fused)


def reference(x_BTNH: Tensor, cos_BT1H: Tensor, sin_BT1H: Tensor) -> Tensor:
    """Rolling by half the width brings each partner into place, and the table holds the signs."""
    swapped_BTNH = x_BTNH.roll(x_BTNH.size(-1) // 2, dims=-1)
    return (x_BTNH * cos_BT1H + swapped_BTNH * sin_BT1H).to(x_BTNH.dtype)


def _usable(x_BTNH: Tensor, cos_BT1H: Tensor, sin_BT1H: Tensor) -> bool:
    if not library.usable(x_BTNH, cos_BT1H, sin_BT1H) or x_BTNH.dim() != 4 or cos_BT1H.shape != sin_BT1H.shape:
        return False
    batches, tokens, _, width = x_BTNH.shape
    fits = cos_BT1H.shape in ((1, tokens, 1, width), (batches, tokens, 1, width)) and width % 2 == 0
    floats = cos_BT1H.dtype == sin_BT1H.dtype == torch.float32
    return fits and floats and not cos_BT1H.requires_grad and not sin_BT1H.requires_grad


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTNH: Tensor, cos_BT1H: Tensor, sin_BT1H: Tensor) -> Tensor:
        torch.ops.dist_train.rotary_(x_BTNH, cos_BT1H, sin_BT1H, False)
        ctx.mark_dirty(x_BTNH)
        ctx.save_for_backward(cos_BT1H, sin_BT1H)
        return x_BTNH

    @staticmethod
    def backward(ctx: Any, dy_BTNH: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return torch.ops.dist_train.rotary(dy_BTNH, *ctx.saved_tensors, True), None, None


if library.loaded:

    @torch.library.register_fake("dist_train::rotary")
    def _(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
        return x.new_empty(x.shape)

    @torch.library.register_fake("dist_train::rotary_pair")
    def _(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> tuple[Tensor, Tensor]:
        return q.new_empty(q.shape), k.new_empty(k.shape)

    @torch.library.register_fake("dist_train::rotary_")
    def _(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> None:
        return None

    def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        *_, cos, sin, ctx.inverse = inputs
        ctx.save_for_backward(cos, sin)

    def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return torch.ops.dist_train.rotary(dy, *ctx.saved_tensors, not ctx.inverse), None, None, None

    def _pair_backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        return *torch.ops.dist_train.rotary_pair(dq, dk, *ctx.saved_tensors, not ctx.inverse), None, None, None

    torch.library.register_autograd("dist_train::rotary", _backward, setup_context=_save)
    torch.library.register_autograd("dist_train::rotary_pair", _pair_backward, setup_context=_save)
