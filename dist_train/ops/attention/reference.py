"""Attention spelled out in a (B, N, T, S) matrix, for any mask, with its log-sum-exp and its backward by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def math_attention(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask_B1TS: Tensor | None, dropout: float, scale: float
) -> Tensor:
    """out_BNTH in q's dtype, computed in fp32 (fp64 for fp64). `mask_B1TS` bool, None: every key is seen."""
    wide = torch.promote_types(q_BNTH.dtype, torch.float32)
    k_BNSH, v_BNSH = (x.to(wide) for x in repeat_heads(q_BNTH, k_BKSH, v_BKSH))
    scores_BNTS = (q_BNTH.to(wide) * scale) @ k_BNSH.transpose(-1, -2)
    if mask_B1TS is None:
        weights_BNTS = scores_BNTS.softmax(-1)
    else:
        # The lowest finite value instead of -inf keeps a row without keys free of nan; the second fill makes it zero.
        hidden_B1TS = ~mask_B1TS
        scores_BNTS = scores_BNTS.masked_fill(hidden_B1TS, torch.finfo(wide).min)
        weights_BNTS = scores_BNTS.softmax(-1).masked_fill(hidden_B1TS, 0.0)
    return (F.dropout(weights_BNTS, dropout) @ v_BNSH).to(q_BNTH.dtype)


def math_forward(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask_B1TS: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """(out_BNTH, lse_BNT): the log-sum-exp of each query's scores, fp32 or wider, -inf where it sees no key."""
    scores_BNTS, _ = _scores(q_BNTH, k_BKSH, mask_B1TS, scale)
    lse_BNT = scores_BNTS.logsumexp(-1)
    weights_BNTS = (scores_BNTS - _finite(lse_BNT)[..., None]).exp()
    _, v_BNSH = repeat_heads(q_BNTH, v_BKSH, v_BKSH)
    return (weights_BNTS @ v_BNSH.to(weights_BNTS.dtype)).to(q_BNTH.dtype), lse_BNT


def math_backward(
    grad_BNTH: Tensor,
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    out_BNTH: Tensor,
    lse_BNT: Tensor,
    mask_B1TS: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v from `out` and `lse`, which may be those over more keys than these (arXiv:2205.14135, section B.2)."""
    scores_BNTS, k_BNSH = _scores(q_BNTH, k_BKSH, mask_B1TS, scale)
    _, v_BNSH = repeat_heads(q_BNTH, v_BKSH, v_BKSH)
    wide = scores_BNTS.dtype
    grad, q, k, v = (x.to(wide) for x in (grad_BNTH, q_BNTH, k_BNSH, v_BNSH))
    weights_BNTS = (scores_BNTS - _finite(lse_BNT)[..., None]).exp()
    mean_BNT1 = (grad * out_BNTH).sum(-1, keepdim=True)
    slope_BNTS = weights_BNTS * (grad @ v.transpose(-1, -2) - mean_BNT1) * scale
    found = (slope_BNTS.transpose(-1, -2) @ q, weights_BNTS.transpose(-1, -2) @ grad)
    grad_k, grad_v = (x.unflatten(1, (k_BKSH.size(1), -1)).sum(2).to(k_BKSH.dtype) for x in found)
    return (slope_BNTS @ k).to(q_BNTH.dtype), grad_k, grad_v


def _scores(q_BNTH: Tensor, k_BKSH: Tensor, mask_B1TS: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q_BNTH.dtype, torch.float32)
    k_BNSH = repeat_heads(q_BNTH, k_BKSH, k_BKSH)[0].to(wide)
    scores_BNTS = (q_BNTH.to(wide) * scale) @ k_BNSH.transpose(-1, -2)
    return (scores_BNTS if mask_B1TS is None else scores_BNTS.masked_fill(~mask_B1TS, -torch.inf)), k_BNSH


def _finite(lse_BNT: Tensor) -> Tensor:
    return lse_BNT.masked_fill(lse_BNT == -torch.inf, 0.0)  # such a row weighs exp(-inf - 0) = 0 everywhere


def repeat_heads(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with a head for each query head."""
    group = q_BNTH.size(1) // k_BKSH.size(1)
    if group == 1:
        return k_BKSH, v_BKSH
    return k_BKSH.repeat_interleave(group, dim=1), v_BKSH.repeat_interleave(group, dim=1)
