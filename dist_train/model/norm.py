"""The normalisation layer of each family, alone or behind the addition of a residual. Shapes: see transformer.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dist_train.config.schema import ModelConfig
from dist_train.ops.layer_norm import add_layer_norm, layer_norm
from dist_train.ops.rms_norm import add_rms_norm, rms_norm


def make_norm(config: ModelConfig, fused: bool) -> Norm:
    return RMSNorm(config, fused) if config.family == "llama" else LayerNorm(config, fused)


class Norm(nn.Module):
    """`norm(x)`; with a residual `(norm(x + residual), x + residual)`, for the sum is what the next residual adds to."""

    def __init__(self, config: ModelConfig, fused: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden))
        self.eps, self.fused = config.norm_eps, fused

    def forward(self, x_BTD: Tensor, residual_BTD: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        raise NotImplementedError


class RMSNorm(Norm):
    def forward(self, x_BTD: Tensor, residual_BTD: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual_BTD is None:
            return rms_norm(x_BTD, self.weight, self.eps, self.fused)
        return add_rms_norm(x_BTD, residual_BTD, self.weight, self.eps, self.fused)


class LayerNorm(Norm):
    def __init__(self, config: ModelConfig, fused: bool) -> None:
        super().__init__(config, fused)
        self.bias = nn.Parameter(torch.zeros(config.hidden)) if config.bias else None

    def forward(self, x_BTD: Tensor, residual_BTD: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual_BTD is None:
            return layer_norm(x_BTD, self.weight, self.bias, self.eps, self.fused)
        return add_layer_norm(x_BTD, residual_BTD, self.weight, self.bias, self.eps, self.fused)
