"""From a config to a model with its starting weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dist_train.config.compose import ConfigError
from dist_train.config.schema import Config, ModelConfig
from dist_train.model.init import RULES, init_weights
from dist_train.model.mlp import ACTIVATIONS
from dist_train.model.transformer import Cut, Transformer
from dist_train.ops.attention import WANTED


def build_model(config: Config, seed: int | None = None) -> Transformer:
    """The model of `config.model` in fp32 on the CPU, initialised from `seed` (default `config.train.seed`).

    The global random state is left as it was. Raises ConfigError for a shape that cannot be built.
    """
    model = empty_model(config, "meta").to_empty(device="cpu")
    model.tie()  # moving off the meta device gave the head a parameter of its own
    init_weights(model, config.model, config.train.seed if seed is None else seed)
    return model


def empty_model(config: Config, device: str = "meta", cuts: Sequence[Cut] | None = None) -> Transformer:
    """The model, or parts of it, with whatever its memory holds; on "meta" it takes none. Raises ConfigError."""
    _require_buildable(config.model, config.attention)
    with torch.device(device):
        return Transformer(config.model, config.attention, config.ops == "fused", cuts)


def _require_buildable(model: ModelConfig, attention: str) -> None:
    choices = {
        "model.family": (model.family, ("llama", "gpt")),
        "model.activation": (model.activation, ("silu",) if model.family == "llama" else tuple(ACTIVATIONS)),
        "model.init": (model.init, RULES),
        "attention": (attention, tuple(WANTED)),
    }
    for key, (value, known) in choices.items():
        if value not in known:
            raise ConfigError(f"{key}={value}: not known here. Choose one of: {', '.join(known)}.")
    for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "max_positions"):
        if getattr(model, key) < 1:
            raise ConfigError(f"model.{key}={getattr(model, key)}: must be at least 1.")
    if model.hidden % model.heads:
        raise ConfigError(f"model.hidden={model.hidden}: must be a multiple of model.heads={model.heads}, which share it.")
    if model.heads % model.kv_heads:
        raise ConfigError(f"model.heads={model.heads}: must be a multiple of model.kv_heads={model.kv_heads}.")
    if model.family == "llama" and model.hidden // model.heads % 2:
        width = model.hidden // model.heads
        raise ConfigError(f"model.hidden / model.heads = {width}: rotary positions turn pairs; choose an even quotient.")
    if not 0.0 <= model.dropout < 1.0:
        raise ConfigError(f"model.dropout={model.dropout}: must be at least 0 and below 1.")
