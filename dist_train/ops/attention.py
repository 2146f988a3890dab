"""Causal scaled-dot-product attention with isolated documents and grouped key/value heads.

Shapes: B rows, T queries, S keys, N query heads, K key/value heads (N a multiple of K, GQA arXiv:2305.13245), H head width.

Three rules hold on every backend. The last query sees the last key, so T < S (decoding with a cache) needs no mask. A key
outside a query's document weighs exactly zero. A query that sees no key gives zero, and zero gradient, never nan.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BACKENDS = ("auto", "sdpa", "math")


def document_mask(documents_BT: Tensor) -> Tensor:
    """mask_B1TT (bool, true = may look): keys at or before the query and in its document. Build it once for all layers."""
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same_BTT.tril_()[:, None]


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """mask_TS (bool): the last query sees all keys, each one before it a key less."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)


def attention(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask_B1TS: Tensor | None = None, dropout: float = 0.0, backend: str = "auto"
) -> Tensor:
    """out_BNTH in q's dtype; softmax in fp32.

    `mask_B1TS` is bool and replaces the causal rule (`document_mask` holds both); None is plain causal, the fast path.
    `dropout` drops attention probabilities and draws from torch's global generator. `backend`: "sdpa" (what "auto" takes)
    is torch's fused kernel, "math" spells the formula out in a (B, N, T, S) matrix and is the reference.
    """
    queries, keys = q_BNTH.size(2), k_BKSH.size(2)
    square = mask_B1TS is None and queries == keys
    if mask_B1TS is None and not square and not (queries == 1 and keys > 0):
        mask_B1TS = causal_mask(queries, keys, q_BNTH.device)
    if backend == "math":
        if square:
            mask_B1TS = causal_mask(queries, keys, q_BNTH.device)
        return _math(q_BNTH, k_BKSH, v_BKSH, mask_B1TS, dropout)
    grouped = q_BNTH.size(1) != k_BKSH.size(1)
    if grouped and q_BNTH.is_cuda and not square:
        # torch's masked CUDA kernels know no groups; with enable_gqa they would fall back to the formula spelled out.
        k_BKSH, v_BKSH, grouped = *_repeat_heads(q_BNTH, k_BKSH, v_BKSH), False
    return F.scaled_dot_product_attention(
        q_BNTH, k_BKSH, v_BKSH, attn_mask=mask_B1TS, dropout_p=dropout, is_causal=square, enable_gqa=grouped
    )


def _math(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask_B1TS: Tensor | None, dropout: float) -> Tensor:
    k_BNSH, v_BNSH = _repeat_heads(q_BNTH, k_BKSH, v_BKSH)
    scores_BNTS = (q_BNTH * q_BNTH.size(-1) ** -0.5) @ k_BNSH.transpose(-1, -2)
    wide = torch.promote_types(scores_BNTS.dtype, torch.float32)
    if mask_B1TS is None:
        weights_BNTS = scores_BNTS.softmax(-1, dtype=wide)
    else:
        # The lowest finite value instead of -inf keeps a row without keys free of nan; the second fill makes it zero.
        hidden_B1TS = ~mask_B1TS
        scores_BNTS = scores_BNTS.to(wide).masked_fill(hidden_B1TS, torch.finfo(wide).min)
        weights_BNTS = scores_BNTS.softmax(-1).masked_fill(hidden_B1TS, 0.0)
    return F.dropout(weights_BNTS, dropout).to(v_BNSH.dtype) @ v_BNSH


def _repeat_heads(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> tuple[Tensor, Tensor]:
    group = q_BNTH.size(1) // k_BKSH.size(1)
    if group == 1:
        return k_BKSH, v_BKSH
    return k_BKSH.repeat_interleave(group, dim=1), v_BKSH.repeat_interleave(group, dim=1)
