"""The feed-forward layer of each family. Shapes: see transformer.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from dist_train.config.schema import ModelConfig
from dist_train.ops.swiglu import swiglu

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": partial(F.gelu, approximate="tanh"),  # as in GPT-2
    "relu": F.relu,
}


def make_mlp(config: ModelConfig) -> nn.Module:
    return GatedMLP(config) if config.family == "llama" else MLP(config)


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) · up(x))` (SwiGLU, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn, config.bias)
        self.up = nn.Linear(config.hidden, config.ffn, config.bias)
        self.down = nn.Linear(config.ffn, config.hidden, config.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(swiglu(self.gate(x_BTD), self.up(x_BTD)))


class MLP(nn.Module):
    """`down(activation(up(x)))`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.ffn, config.bias)
        self.down = nn.Linear(config.ffn, config.hidden, config.bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x_BTD)))
