"""Cross entropy summed over live tokens, with optional z-loss, without an fp32 copy of the logits.

Shapes: B rows, T tokens, V vocabulary, N = B·T tokens in a line.

Sums, not means: the step divides once by the live tokens of the whole global batch, so neither the split into
micro-batches nor that into ranks can change the objective, and a batch without live tokens adds exactly zero.

Only the logits (in their own dtype) and one fp32 number per token are kept for backward; softmax is redone there, in
fp32, a slice of tokens at a time. The slices bound the temporary memory, and on a CPU keep it in the cache.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IGNORED = -100  # the label of a token that is not counted
_CPU_SLICE_ELEMENTS = 1 << 20
_DEVICE_SLICE_ELEMENTS = 1 << 26


def cross_entropy_sum(logits_BTV: Tensor, labels_BT: Tensor, z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """(objective, cross entropy): scalars in fp32 (fp64 for fp64 logits), both summed over the tokens whose label is not -100.

    The objective is the cross entropy plus `z_loss · logsumexp(logits)²` per live token (PaLM, arXiv:2204.02311, section 5)
    and carries the gradient; the second value is for reporting and carries none.
    """
    return _CrossEntropySum.apply(logits_BTV.flatten(0, -2), labels_BT.flatten(), z_loss)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, labels_N: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
        live_N = labels_N != IGNORED
        index_N = labels_N.where(live_N, 0)
        wide = torch.promote_types(logits_NV.dtype, torch.float32)
        parts = [part.logsumexp(-1) for part in _slices(logits_NV, wide)]
        lse_N = torch.cat(parts) if parts else logits_NV.new_zeros(0, dtype=wide)
        chosen_N = logits_NV.gather(-1, index_N[:, None]).squeeze(-1).to(wide)
        entropy = (lse_N - chosen_N).where(live_N, 0.0).sum()
        objective = entropy + z_loss * lse_N.square().where(live_N, 0.0).sum() if z_loss else entropy.clone()
        ctx.save_for_backward(logits_NV, index_N, live_N, lse_N)
        ctx.z_loss = z_loss
        ctx.mark_non_differentiable(entropy)
        return objective, entropy

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits_NV, index_N, live_N, lse_N = ctx.saved_tensors
        wide = lse_N.dtype
        hit_N = upstream.to(wide).expand_as(lse_N).where(live_N, 0.0)  # d objective / d (-logit of the label)
        slope_N = hit_N * (1.0 + 2.0 * ctx.z_loss * lse_N) if ctx.z_loss else hit_N  # d objective / d lse
        grad_NV = torch.empty_like(logits_NV)
        start = 0
        for part in _slices(logits_NV, wide):
            rows = slice(start, start + part.size(0))
            grad = torch.sub(part, lse_N[rows, None]).exp_().mul_(slope_N[rows, None])
            grad.scatter_add_(-1, index_N[rows, None], -hit_N[rows, None])
            grad_NV[rows] = grad
            start = rows.stop
        return grad_NV, None, None


def _slices(logits_NV: Tensor, dtype: torch.dtype) -> Any:
    elements = _CPU_SLICE_ELEMENTS if logits_NV.device.type == "cpu" else _DEVICE_SLICE_ELEMENTS
    rows = max(1, elements // max(1, logits_NV.size(-1)))
    return (part.to(dtype) for part in logits_NV.split(rows)) if logits_NV.size(0) else iter(())
