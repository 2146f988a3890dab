"""Root-mean-square normalisation (Zhang and Sennrich, arXiv:1910.07467), alone or behind the addition of a residual.

`fused` picks the kernels of csrc/norm where `library.usable` allows, else the reference in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_train.ops import library


def rms_norm(x_BTD: Tensor, weight_D: Tensor, eps: float, fused: bool = True) -> Tensor:
    """`x · weight / sqrt(mean(x²) + eps)` over the last dim; statistics in fp32 (fp64 for fp64 input), result in x's dtype.

    The weight has x's dtype or is fp32.
    """
    if fused and library.usable(x_BTD, weight_D):
        return torch.ops.dist_train.rms_norm(x_BTD, weight_D, eps)[0]
    return reference(x_BTD, weight_D, eps)


def add_rms_norm(x_BTD: Tensor, residual_BTD: Tensor, weight_D: Tensor, eps: float, fused: bool = True) -> tuple[Tensor, Tensor]:
    """`(rms_norm(x + residual), x + residual)`: the sum is rounded to its dtype before it is normalised."""
    if fused and x_BTD.dtype == residual_BTD.dtype and library.usable(x_BTD, residual_BTD, weight_D):
        normed_BTD, sum_BTD, _ = torch.ops.dist_train.add_rms_norm(x_BTD, residual_BTD, weight_D, eps)
        return normed_BTD, sum_BTD
    sum_BTD = x_BTD + residual_BTD
    return rms_norm(sum_BTD, weight_D, eps, fused), sum_BTD


def reference(x_BTD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    if weight_D.dtype == x_BTD.dtype:
        return F.rms_norm(x_BTD, weight_D.shape, weight_D, eps)
    return F.rms_norm(x_BTD.to(weight_D.dtype), weight_D.shape, weight_D, eps).to(x_BTD.dtype)


if library.loaded:

    @torch.library.register_fake("dist_train::rms_norm")
    def _(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return library.contiguous_like(x), row_statistic(x)

    @torch.library.register_fake("dist_train::add_rms_norm")
    def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        return library.contiguous_like(x), library.contiguous_like(x), row_statistic(x)

    @torch.library.register_fake("dist_train::rms_norm_backward")
    def _(dy: Tensor, dsum: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, wants_dweight: bool) -> tuple[Tensor, Tensor]:
        return library.contiguous_like(x), weight.new_empty(weight.numel() if wants_dweight else 0)

    def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight, output[1])
        ctx.mark_non_differentiable(output[1])

    def _backward(ctx: Any, dy: Tensor, _: Any) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        dx, dweight = torch.ops.dist_train.rms_norm_backward(dy, None, x, weight, rstd, ctx.needs_input_grad[1])
        return dx, dweight if ctx.needs_input_grad[1] else None, None

    def _save_added(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, sum_, rstd = output
        ctx.save_for_backward(sum_, inputs[2], rstd)
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)

    def _backward_added(
        ctx: Any, dy: Tensor | None, dsum: Tensor | None, _: Any
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        sum_, weight, rstd = ctx.saved_tensors
        if dy is None:
            return dsum, dsum, None, None
        dx, dweight = torch.ops.dist_train.rms_norm_backward(dy, dsum, sum_, weight, rstd, ctx.needs_input_grad[2])
        return dx, dx, dweight if ctx.needs_input_grad[2] else None, None

    torch.library.register_autograd("dist_train::rms_norm", _backward, setup_context=_save)
    torch.library.register_autograd("dist_train::add_rms_norm", _backward_added, setup_context=_save_added)


def row_statistic(x: Tensor) -> Tensor:
    """The fake of one fp32 number per row."""
    return x.new_empty(x.numel() // x.size(-1) if x.size(-1) else 0, dtype=torch.float32)
