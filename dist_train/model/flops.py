"""Parameters and floating-point operations of a model, by arithmetic."""

from __future__ import annotations

from dist_train.config.schema import ModelConfig


def parameter_count(model: ModelConfig) -> int:
    """Number of parameters, embeddings included; a tied head counts once."""
    matrices, layer_biases = _layer_matrices(model)
    norm = model.hidden * (2 if model.family == "gpt" and model.bias else 1)
    embeddings = model.vocab * model.hidden * (1 if model.tie_embeddings else 2)
    if model.family == "gpt":
        embeddings += model.max_positions * model.hidden
    return embeddings + model.layers * (matrices + layer_biases * model.bias + 2 * norm) + norm


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Model FLOPs of forward and backward for one token of a sequence of `seq_len` tokens.

    `6·P + 12·layers·hidden·seq_len` (PaLM, arXiv:2204.02311, appendix B). P counts the weights of matrix products: the
    head does one, tied or not; embedding look-ups, norms and biases do none. A weight costs a multiplication and an
    addition in forward and twice that in backward. The second term is scores and weighted sums of attention over
    all `seq_len` keys: by this convention causality is not taken off, and recompute is never added.
    """
    matrices, _ = _layer_matrices(model)
    products = model.layers * matrices + model.hidden * model.vocab
    return float(6 * products + 12 * model.layers * model.hidden * seq_len)


def head_in_blocks(model: ModelConfig) -> float:
    """What the head computes, in blocks, by the weights of their matrix products."""
    return model.hidden * model.vocab / _layer_matrices(model)[0]


def _layer_matrices(model: ModelConfig) -> tuple[int, int]:
    """(weights, biases) of the linear layers of one block."""
    hidden, ffn = model.hidden, model.ffn
    kv = hidden // model.heads * model.kv_heads
    inner = 2 if model.family == "llama" else 1  # gate and up, or up alone
    weights = 2 * hidden * hidden + 2 * hidden * kv + (inner + 1) * hidden * ffn
    return weights, 2 * hidden + 2 * kv + inner * ffn + hidden
