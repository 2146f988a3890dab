"""The toy of the fault list: 2 layers, width 16, 4 heads, feed-forward 32, vocabulary 53, in both families."""

from __future__ import annotations

from typing import Any

import torch

from dist_train.config.schema import Config, ModelConfig, TrainConfig

FAMILIES = {
    "llama": {"kv_heads": 2, "activation": "silu"},
    "gpt": {"kv_heads": 4, "activation": "gelu", "bias": True, "tie_embeddings": True},
}


def toy(family: str = "llama", attention: str = "auto", seed: int = 0, **model: Any) -> Config:
    shape = {"layers": 2, "hidden": 16, "heads": 4, "ffn": 32, "vocab": 53, "max_positions": 32, "init_std": 0.3}
    shape |= FAMILIES.get(family, {}) | {"family": family} | model
    return Config(model=ModelConfig(**shape), train=TrainConfig(seed=seed, seq_len=12), attention=attention)


def token_rows(rows: int = 3, tokens: int = 12, vocab: int = 53) -> torch.Tensor:
    return torch.randint(0, vocab, (rows, tokens), generator=torch.Generator().manual_seed(1))


def shake(model: torch.nn.Module) -> None:
    """Move norms and biases off their starting values, so that leaving one out shows."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
