"""Collectives with gradients, each beside its adjoint.

The ranks of the group back-propagate one and the same loss, once each: a tensor that all of them hold has, on all of them,
the gradient of that one loss. The adjoint of a sum into copies is therefore the identity, and not another sum.

Shapes: n tokens of a rank, r ranks, so that r·n is the whole line; D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dist_train.comm.collectives import Collectives
from dist_train.mesh.mesh import Group


def sum_to_copies(x: Tensor, group: Group, comm: Collectives) -> Tensor:
    """Σ over ranks of partial sums, on every rank. Backward: the identity."""
    return _SumToCopies.apply(x, group, comm)


def sum_to_tokens(x_RD: Tensor, group: Group, comm: Collectives) -> Tensor:
    """Σ over ranks of partial sums of all r·n tokens; each rank has its own n. Backward: gradients of all tokens are gathered."""
    return _SumToTokens.apply(x_RD, group, comm)


def gather_features(x_NV: Tensor, sizes: list[int], group: Group, comm: Collectives) -> Tensor:
    """The features of all ranks side by side, on every rank; `sizes[i]`: those of rank i. Backward: this rank's are cut out."""
    return _GatherFeatures.apply(x_NV, sizes, group, comm)


class _SumToCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, comm: Collectives) -> Tensor:
        total = x.clone()
        comm.all_reduce(total, group).wait()
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return gradient, None, None


class _SumToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, group: Group, comm: Collectives) -> Tensor:
        ctx.where = group, comm
        own_ND = x_RD.new_empty(x_RD.size(0) // group.size, *x_RD.shape[1:])
        comm.reduce_scatter(own_ND, x_RD, group).wait()
        return own_ND

    @staticmethod
    def backward(ctx: Any, gradient_ND: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        group, comm = ctx.where
        all_RD = gradient_ND.new_empty(gradient_ND.size(0) * group.size, *gradient_ND.shape[1:])
        comm.all_gather(all_RD, gradient_ND, group).wait()
        return all_RD, None, None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NV: Tensor, sizes: list[int], group: Group, comm: Collectives) -> Tensor:
        ctx.sizes, ctx.index = sizes, group.index
        widest = max(sizes)
        sent_NV = torch.nn.functional.pad(x_NV, (0, widest - x_NV.size(-1)))
        found = x_NV.new_empty(group.size, *x_NV.shape[:-1], widest)
        comm.all_gather(found, sent_NV, group).wait()
        return torch.cat([part[..., :size] for part, size in zip(found.unbind(), sizes, strict=True)], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return gradient.split(ctx.sizes, -1)[ctx.index], None, None, None
