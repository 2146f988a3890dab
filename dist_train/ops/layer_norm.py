"""Layer normalisation (Ba, Kiros and Hinton, arXiv:1607.06450), alone or behind the addition of a residual.

`fused` picks the kernels of csrc/norm where `library.usable` allows, else the reference in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_train.ops import library
from dist_train.ops.rms_norm import row_statistic


def layer_norm(x_BTD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float, fused: bool = True) -> Tensor:
    """`(x - mean) · weight / sqrt(variance + eps) + bias` over the last dim; statistics in fp32, result in x's dtype.

    Weight and bias have x's dtype or are fp32.
    """
    if fused and library.usable(x_BTD, weight_D, bias_D):
        return torch.ops.dist_train.layer_norm(x_BTD, weight_D, bias_D, eps)[0]
    return reference(x_BTD, weight_D, bias_D, eps)


def add_layer_norm(
    x_BTD: Tensor, residual_BTD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float, fused: bool = True
) -> tuple[Tensor, Tensor]:
    """`(layer_norm(x + residual), x + residual)`: the sum is rounded to its dtype before it is normalised."""
    if fused and x_BTD.dtype == residual_BTD.dtype and library.usable(x_BTD, residual_BTD, weight_D, bias_D):
        normed_BTD, sum_BTD, _, _ = torch.ops.dist_train.add_layer_norm(x_BTD, residual_BTD, weight_D, bias_D, eps)
        return normed_BTD, sum_BTD
    sum_BTD = x_BTD + residual_BTD
    return layer_norm(sum_BTD, weight_D, bias_D, eps, fused), sum_BTD


def reference(x_BTD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    if weight_D.dtype == x_BTD.dtype:
        return F.layer_norm(x_BTD, weight_D.shape, weight_D, bias_D, eps)
    return F.layer_norm(x_BTD.to(weight_D.dtype), weight_D.shape, weight_D, bias_D, eps).to(x_BTD.dtype)


if library.loaded:

    @torch.library.register_fake("dist_train::layer_norm")
    def _(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        return library.contiguous_like(x), row_statistic(x), row_statistic(x)

    @torch.library.register_fake("dist_train::add_layer_norm")
    def _(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return library.contiguous_like(x), library.contiguous_like(x), row_statistic(x), row_statistic(x)

    @torch.library.register_fake("dist_train::layer_norm_backward")
    def _(
        dy: Tensor,
        dsum: Tensor | None,
        x: Tensor,
        weight: Tensor,
        mean: Tensor,
        rstd: Tensor,
        wants_dweight: bool,
        wants_dbias: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dweight, dbias = (weight.new_empty(weight.numel() if wanted else 0) for wanted in (wants_dweight, wants_dbias))
        return library.contiguous_like(x), dweight, dbias

    def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, _, _ = inputs
        _, mean, rstd = output
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)

    def _backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        _, wants_dweight, wants_dbias, _ = ctx.needs_input_grad
        dx, dweight, dbias = torch.ops.dist_train.layer_norm_backward(dy, None, x, weight, mean, rstd, wants_dweight, wants_dbias)
        return dx, dweight if wants_dweight else None, dbias if wants_dbias else None, None

    def _save_added(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, sum_, mean, rstd = output
        ctx.save_for_backward(sum_, inputs[2], mean, rstd)
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)

    def _backward_added(ctx: Any, dy: Tensor | None, dsum: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        sum_, weight, mean, rstd = ctx.saved_tensors
        if dy is None:
            return dsum, dsum, None, None, None
        _, _, wants_dweight, wants_dbias, _ = ctx.needs_input_grad
        dx, dweight, dbias = torch.ops.dist_train.layer_norm_backward(
            dy, dsum, sum_, weight, mean, rstd, wants_dweight, wants_dbias
        )
        return dx, dx, dweight if wants_dweight else None, dbias if wants_dbias else None, None

    torch.library.register_autograd("dist_train::layer_norm", _backward, setup_context=_save)
    torch.library.register_autograd("dist_train::add_layer_norm", _backward_added, setup_context=_save_added)
