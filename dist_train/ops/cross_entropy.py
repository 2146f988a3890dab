"""Cross entropy summed over live tokens, with optional z-loss, without an fp32 copy of the logits.

Shapes: B rows, T tokens, V vocabulary (or the part of it that this rank holds), N = B·T tokens in a line.

Sums, not means: the step divides once by the live tokens of the whole global batch, so neither the split into
micro-batches nor that into ranks can change the objective, and a batch without live tokens adds exactly zero.

Only the logits (in their own dtype) and one fp32 number per token are kept for backward; softmax is redone there, in
fp32. The kernels of csrc/cross_entropy read the logits once in forward, and in backward read and write once. The
reference in plain torch goes a slice of tokens at a time, which bounds its temporary memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dist_train.ops import library

IGNORED = -100  # the label of a token that is not counted
_CPU_SLICE_ELEMENTS = 1 << 20
_DEVICE_SLICE_ELEMENTS = 1 << 26


def cross_entropy_sum(
    logits_BTV: Tensor, labels_BT: Tensor, z_loss: float = 0.0, fused: bool = True, reuse_logits: bool = False
) -> tuple[Tensor, Tensor]:
    """(objective, cross entropy): scalars in fp32 (fp64 for fp64 logits), both summed over the tokens whose label is not -100.

    The objective is the cross entropy plus `z_loss · logsumexp(logits)²` per live token (PaLM, arXiv:2204.02311, section 5)
    and carries the gradient; the second value is for reporting and carries none.

    `reuse_logits`: backward writes the gradient over the logits, which saves memory of their size. Nobody may read them
    after that; where autograd itself still needs them (a second backward, an activation on top of the head) it raises.
    Under torch.compile the compiler plans memory, and this does nothing.
    """
    logits_NV, labels_N = logits_BTV.flatten(0, -2), labels_BT.flatten()
    fused = fused and library.usable(logits_NV)
    reuse_logits = reuse_logits and logits_NV.is_contiguous() and not torch.compiler.is_compiling()
    if fused and not reuse_logits:
        objective, entropy, _ = torch.ops.dist_train.cross_entropy(logits_NV, labels_N, z_loss)
        return objective, entropy
    return _CrossEntropySum.apply(logits_NV, labels_N, z_loss, fused, reuse_logits)


def row_terms(logits_NV: Tensor, labels_N: Tensor, first: int = 0, fused: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """What a rank with the logits of tokens `first` to `first + V` of the vocabulary knows of its rows; no gradient.

    (maximum_N, sum_N, target_N) in fp32 (fp64 for fp64): the largest logit, clamped to finite values; the sum of
    `exp(logit - maximum)`; the label's logit, or 0 where another rank has it or the label is -100. Over the ranks, with
    `top = max(maximum)`, `lse = top + log(sum(sum_N · exp(maximum - top)))` and `target = sum(target_N)`, the loss of a
    live token is `lse - target`, and `row_gradient` takes that lse. With one rank nothing is left to combine.

    Labels are not checked against the vocabulary, of which this rank knows only a part.
    """
    if fused and library.usable(logits_NV):
        return torch.ops.dist_train.cross_entropy_terms(logits_NV, labels_N, first)
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    limit = torch.finfo(wide).max
    maxima, sums = [logits_NV.new_zeros(0, dtype=wide)], [logits_NV.new_zeros(0, dtype=wide)]
    for part in _slices(logits_NV, wide):
        top = part.nan_to_num(nan=-limit).amax(-1).clamp(-limit, limit)
        maxima.append(top)
        sums.append((part - top[:, None]).exp_().sum(-1))
    index_N, mine_N = _local(labels_N, first, logits_NV.size(-1))
    target_N = logits_NV.gather(-1, index_N[:, None]).squeeze(-1).to(wide).where(mine_N, 0.0)
    return torch.cat(maxima), torch.cat(sums), target_N


def row_gradient(
    upstream: Tensor,
    logits_NV: Tensor,
    labels_N: Tensor,
    lse_N: Tensor,
    z_loss: float = 0.0,
    first: int = 0,
    fused: bool = True,
    reuse_logits: bool = False,
) -> Tensor:
    """The gradient of `sum over live tokens of upstream · (lse - target + z_loss · lse²)` by these logits, in their dtype.

    `upstream` is one number or one per token, in the dtype of `lse_N`, the log-sum-exp over the whole vocabulary. With
    `reuse_logits` the result is the memory of the logits (contiguous).
    """
    if fused and library.usable(logits_NV):
        if not reuse_logits:
            return torch.ops.dist_train.cross_entropy_backward(upstream, logits_NV, labels_N, lse_N, z_loss, first)
        torch.ops.dist_train.cross_entropy_backward_(upstream, logits_NV, labels_N, lse_N, z_loss, first)
        return logits_NV
    wide = lse_N.dtype
    index_N, mine_N = _local(labels_N, first, logits_NV.size(-1))
    hit_N = upstream.to(wide).expand_as(lse_N).where(labels_N != IGNORED, 0.0)  # by minus the label's logit
    slope_N = hit_N * (1.0 + 2.0 * z_loss * lse_N) if z_loss else hit_N  # by lse
    hit_N = hit_N.where(mine_N, 0.0)
    grad_NV = logits_NV if reuse_logits else torch.empty_like(logits_NV)
    start = 0
    for part in _slices(logits_NV, wide):
        rows = slice(start, start + part.size(0))
        grad = torch.sub(part, lse_N[rows, None]).exp_().mul_(slope_N[rows, None])
        grad.scatter_add_(-1, index_N[rows, None], -hit_N[rows, None])
        grad_NV[rows] = grad
        start = rows.stop
    return grad_NV


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, labels_N: Tensor, z_loss: float, fused: bool, reuse_logits: bool
    ) -> tuple[Tensor, Tensor]:
        if fused:
            objective, entropy, lse_N = torch.ops.dist_train.cross_entropy(logits_NV, labels_N, z_loss)
        else:
            objective, entropy, lse_N = _reference_sum(logits_NV, labels_N, z_loss)
        ctx.save_for_backward(logits_NV, labels_N, lse_N)
        ctx.options = z_loss, 0, fused, reuse_logits
        ctx.mark_non_differentiable(entropy)
        return objective, entropy

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        logits_NV, labels_N, lse_N = ctx.saved_tensors
        if ctx.options[-1]:
            with torch.no_grad():
                grad_NV = row_gradient(upstream, logits_NV, labels_N, lse_N, *ctx.options)
            torch.autograd.graph.increment_version(logits_NV)  # whoever else saved the logits is told
            return grad_NV.detach(), None, None, None, None
        return row_gradient(upstream, logits_NV, labels_N, lse_N, *ctx.options), None, None, None, None


def _reference_sum(logits_NV: Tensor, labels_N: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    live_N = labels_N != IGNORED
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    parts = [part.logsumexp(-1) for part in _slices(logits_NV, wide)]
    lse_N = torch.cat(parts) if parts else logits_NV.new_zeros(0, dtype=wide)
    chosen_N = logits_NV.gather(-1, labels_N.where(live_N, 0)[:, None]).squeeze(-1).to(wide)
    entropy = (lse_N - chosen_N).where(live_N, 0.0).sum()
    objective = entropy + z_loss * lse_N.square().where(live_N, 0.0).sum() if z_loss else entropy.clone()
    return objective, entropy, lse_N


def _local(labels_N: Tensor, first: int, columns: int) -> tuple[Tensor, Tensor]:
    """(column of each label, is it here): the column is 0 where it is not."""
    column_N = labels_N - first
    mine_N = (labels_N != IGNORED) & (column_N >= 0) & (column_N < columns)
    return column_N.where(mine_N, 0), mine_N


def _slices(logits_NV: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    elements = _CPU_SLICE_ELEMENTS if logits_NV.device.type == "cpu" else _DEVICE_SLICE_ELEMENTS
    rows = max(1, elements // max(1, logits_NV.size(-1)))
    return (part.to(dtype) for part in logits_NV.split(rows)) if logits_NV.size(0) else iter(())


if library.loaded:

    @torch.library.register_fake("dist_train::cross_entropy")
    def _(logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
        objective, entropy = (logits.new_empty((), dtype=torch.float32) for _ in range(2))
        return objective, entropy, logits.new_empty(labels.numel(), dtype=torch.float32)

    @torch.library.register_fake("dist_train::cross_entropy_terms")
    def _(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
        maximum, total, target = (logits.new_empty(labels.numel(), dtype=torch.float32) for _ in range(3))
        return maximum, total, target

    @torch.library.register_fake("dist_train::cross_entropy_backward")
    def _(upstream: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, z_loss: float, first: int) -> Tensor:
        return logits.new_empty(logits.shape)

    @torch.library.register_fake("dist_train::cross_entropy_backward_")
    def _(upstream: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, z_loss: float, first: int) -> None:
        return None

    def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        logits, labels, ctx.z_loss = inputs
        _, entropy, lse = output
        ctx.save_for_backward(logits, labels, lse)
        ctx.mark_non_differentiable(entropy, lse)

    def _backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor, None, None]:
        return torch.ops.dist_train.cross_entropy_backward(upstream, *ctx.saved_tensors, ctx.z_loss, 0), None, None

    torch.library.register_autograd("dist_train::cross_entropy", _backward, setup_context=_save)
