"""GELU by its approximation with tanh (Hendrycks and Gimpel, arXiv:1606.08415), and GEGLU (Shazeer, arXiv:2002.05202).

`fused` picks the kernels of csrc/activation where `library.usable` allows, else the reference in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_train.ops import library


def gelu(x_BTF: Tensor, fused: bool = True) -> Tensor:
    """`x · (1 + tanh(sqrt(2/π) · (x + 0.044715 · x³))) / 2`, same shape and dtype as x."""
    return torch.ops.dist_train.gelu(x_BTF) if fused and library.usable(x_BTF) else reference(x_BTF)


def geglu(gate_BTF: Tensor, up_BTF: Tensor, fused: bool = True) -> Tensor:
    """`gelu(gate) · up`, same shape and dtype as the inputs. The kernels take halves of one projection without a copy."""
    if fused and gate_BTF.shape == up_BTF.shape and gate_BTF.dtype == up_BTF.dtype and library.usable(gate_BTF, up_BTF):
        return torch.ops.dist_train.geglu(gate_BTF, up_BTF)
    return gated_reference(gate_BTF, up_BTF)


def reference(x_BTF: Tensor) -> Tensor:
    return F.gelu(x_BTF, approximate="tanh")


def gated_reference(gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
    return F.gelu(gate_BTF, approximate="tanh") * up_BTF


if library.loaded:

    @torch.library.register_fake("dist_train::gelu")
    def _(x: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    @torch.library.register_fake("dist_train::gelu_backward")
    def _(dy: Tensor, x: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    @torch.library.register_fake("dist_train::geglu")
    def _(gate: Tensor, up: Tensor) -> Tensor:
        return gate.new_empty(gate.shape)

    @torch.library.register_fake("dist_train::geglu_backward")
    def _(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return gate.new_empty(gate.shape), gate.new_empty(gate.shape)

    def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def _backward(ctx: Any, dy: Tensor) -> Tensor:
        return torch.ops.dist_train.gelu_backward(dy, *ctx.saved_tensors)

    def _gated_backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.dist_train.geglu_backward(dy, *ctx.saved_tensors)

    torch.library.register_autograd("dist_train::gelu", _backward, setup_context=_save)
    torch.library.register_autograd("dist_train::geglu", _gated_backward, setup_context=_save)
