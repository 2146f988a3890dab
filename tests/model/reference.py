"""The two model families written a second time, from the papers, sharing no line: loops, one document at a time."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dist_train.config.schema import ModelConfig


def reference_logits(
    weights: dict[str, Tensor], config: ModelConfig, tokens: list[int], dtype: torch.dtype = torch.float64
) -> Tensor:
    """logits (T, V) of one document that starts at position 0, computed in `dtype`."""
    w = {name: value.to(dtype) for name, value in weights.items()}
    x = torch.stack([w["embed.weight"][token] for token in tokens])
    if config.family == "gpt":
        x = x + w["positions.weight"][: len(tokens)]
    for i in range(config.layers):
        x = x + _attention(w, f"blocks.{i}.attention", config, _norm(w, f"blocks.{i}.attention_norm", config, x))
        x = x + _mlp(w, f"blocks.{i}.mlp", config, _norm(w, f"blocks.{i}.mlp_norm", config, x))
    return _norm(w, "norm", config, x) @ w["head.weight"].T


def _linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _norm(w: dict[str, Tensor], name: str, config: ModelConfig, x: Tensor) -> Tensor:
    if config.family == "gpt":
        x = x - x.sum(-1, keepdim=True) / config.hidden
    y = x / torch.sqrt((x * x).sum(-1, keepdim=True) / config.hidden + config.norm_eps) * w[f"{name}.weight"]
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def _mlp(w: dict[str, Tensor], name: str, config: ModelConfig, x: Tensor) -> Tensor:
    up = _linear(w, f"{name}.up", x)
    if config.family == "llama":
        gate = _linear(w, f"{name}.gate", x)
        return _linear(w, f"{name}.down", gate / (1 + torch.exp(-gate)) * up)
    if config.activation == "relu":
        return _linear(w, f"{name}.down", up * (up > 0))
    inner = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
    return _linear(w, f"{name}.down", 0.5 * up * (1 + torch.tanh(inner)))


def _rotate(x: Tensor, position: int, theta: float) -> Tensor:
    half, out = x.numel() // 2, [None] * x.numel()
    for r in range(half):
        angle = position * theta ** (-2 * r / x.numel())
        out[r] = x[r] * math.cos(angle) - x[r + half] * math.sin(angle)
        out[r + half] = x[r] * math.sin(angle) + x[r + half] * math.cos(angle)
    return torch.stack(out)


def _attention(w: dict[str, Tensor], name: str, config: ModelConfig, x: Tensor) -> Tensor:
    width, group = config.hidden // config.heads, config.heads // config.kv_heads
    q, k, v = (_linear(w, f"{name}.{part}", x) for part in "qkv")
    rows = []
    for t in range(len(x)):
        heads = []
        for n in range(config.heads):
            query = q[t, n * width : (n + 1) * width]
            kv = slice(n // group * width, (n // group + 1) * width)
            keys = list(k[: t + 1, kv])
            if config.family == "llama":
                query = _rotate(query, t, config.rope_theta)
                keys = [_rotate(key, s, config.rope_theta) for s, key in enumerate(keys)]
            exponentials = torch.stack([torch.exp(query @ key / math.sqrt(width)) for key in keys])
            heads.append((exponentials / exponentials.sum()) @ v[: t + 1, kv])
        rows.append(torch.cat(heads))
    return _linear(w, f"{name}.out", torch.stack(rows))
