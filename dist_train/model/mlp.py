"""The feed-forward layer of each family. Shapes: see transformer.py."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from dist_train.config.schema import ModelConfig
from dist_train.model.fan_out import FanOut
from dist_train.ops.gelu import gelu
from dist_train.ops.swiglu import swiglu

ACTIVATIONS: dict[str, Callable[[Tensor, bool], Tensor]] = {  # the second argument: fused or reference
    "gelu": gelu,
    "relu": lambda x, fused: F.relu(x),
}


def make_mlp(config: ModelConfig, fused: bool) -> nn.Module:
    return GatedMLP(config, fused) if config.family == "llama" else MLP(config, fused)


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) · up(x))` (SwiGLU, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.gate = nn.Linear(config.hidden, config.ffn, config.bias)
        self.up = nn.Linear(config.hidden, config.ffn, config.bias)
        self.down = nn.Linear(config.ffn, config.hidden, config.bias)
        self.project = FanOut()

    def forward(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = self.project(x_BTD, self.gate, self.up)
        return self.down(swiglu(gate_BTF, up_BTF, self.fused))


class MLP(nn.Module):
    """`down(activation(up(x)))`."""

    def __init__(self, config: ModelConfig, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.up = nn.Linear(config.hidden, config.ffn, config.bias)
        self.down = nn.Linear(config.ffn, config.hidden, config.bias)
        self.project = FanOut()
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_BTD: Tensor) -> Tensor:
        (up_BTF,) = self.project(x_BTD, self.up)
        return self.down(self.activation(up_BTF, self.fused))
