"""The normalisation layer of each family. Shapes: see transformer.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dist_train.config.schema import ModelConfig
from dist_train.ops.layer_norm import layer_norm
from dist_train.ops.rms_norm import rms_norm


def make_norm(config: ModelConfig) -> nn.Module:
    return RMSNorm(config) if config.family == "llama" else LayerNorm(config)


class RMSNorm(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden))
        self.eps = config.norm_eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        return rms_norm(x_BTD, self.weight, self.eps)


class LayerNorm(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.hidden))
        self.bias = nn.Parameter(torch.zeros(config.hidden)) if config.bias else None
        self.eps = config.norm_eps

    def forward(self, x_BTD: Tensor) -> Tensor:
        return layer_norm(x_BTD, self.weight, self.bias, self.eps)
