"""The gated activation of the llama feed-forward block (Shazeer, arXiv:2002.05202).

`fused` picks the kernels of csrc/activation where `library.usable` allows, else the reference in plain torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_train.ops import library


def swiglu(gate_BTF: Tensor, up_BTF: Tensor, fused: bool = True) -> Tensor:
    """`silu(gate) · up`, same shape and dtype as the inputs. The kernels take halves of one projection without a copy."""
    if fused and gate_BTF.shape == up_BTF.shape and gate_BTF.dtype == up_BTF.dtype and library.usable(gate_BTF, up_BTF):
        return torch.ops.dist_train.swiglu(gate_BTF, up_BTF)
    return reference(gate_BTF, up_BTF)


def reference(gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
    return F.silu(gate_BTF) * up_BTF


if library.loaded:

    @torch.library.register_fake("dist_train::swiglu")
    def _(gate: Tensor, up: Tensor) -> Tensor:
        return gate.new_empty(gate.shape)

    @torch.library.register_fake("dist_train::swiglu_backward")
    def _(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        return gate.new_empty(gate.shape), gate.new_empty(gate.shape)

    def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.dist_train.swiglu_backward(dy, *ctx.saved_tensors)

    torch.library.register_autograd("dist_train::swiglu", _backward, setup_context=_save)
