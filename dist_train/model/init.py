"""Starting weights, each a function of (seed, the parameter's name) alone.

Every parameter has its own stream, so a weight is the same whichever rank makes it, in whichever order, and whatever
else the model holds. The streams are torch.Generators on the CPU: the global generator is neither read nor moved, and a
GPU run starts from the same bits as a CPU run.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from dist_train.config.schema import ModelConfig

RULES = ("scaled_normal", "xavier", "he")
_RESIDUAL_OUTPUTS = (".attention.out.weight", ".mlp.down.weight")


def init_weights(model: nn.Module, config: ModelConfig, seed: int) -> None:
    """Fill every parameter in place, as `init_weight` does."""
    for name, parameter in model.named_parameters():  # a tied weight comes once, as the embedding
        init_weight(name, parameter.data, config, seed)


def init_weight(name: str, values: Tensor, config: ModelConfig, seed: int) -> None:
    """Fill one parameter, on any device: norms 1, biases 0, matrices and embeddings normal with `weight_std`."""
    if name.endswith(".bias"):
        values.zero_()
    elif values.ndim == 1:
        values.fill_(1.0)
    else:
        host = values if values.device.type == "cpu" else torch.empty(values.shape, dtype=values.dtype)
        generator = torch.Generator().manual_seed(_stream(seed, name))
        host.normal_(0.0, weight_std(name, values, config), generator=generator)
        if host is not values:
            values.copy_(host)


def weight_std(name: str, weight: Tensor, config: ModelConfig) -> float:
    """Standard deviation of a weight (out, in) under `config.init`.

    scaled_normal: init_std, with the two outputs into the residual stream divided by sqrt(2·layers), so that its variance
    does not grow with depth (GPT-2). xavier: sqrt(2/(in + out)) (Glorot and Bengio 2010). he: sqrt(2/in)
    (arXiv:1502.01852). Embedding tables are looked up, not multiplied: they take init_std under every rule.
    """
    fan_out, fan_in = weight.shape
    if name in ("embed.weight", "positions.weight"):
        return config.init_std
    if config.init == "xavier":
        return math.sqrt(2.0 / (fan_in + fan_out))
    if config.init == "he":
        return math.sqrt(2.0 / fan_in)
    return config.init_std / math.sqrt(2.0 * config.layers) if name.endswith(_RESIDUAL_OUTPUTS) else config.init_std


def _stream(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big", signed=True)
