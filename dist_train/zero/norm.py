"""The global gradient norm, the clip factor and the vote on non-finite gradients, from one all-reduce.

Every element is counted once: each data rank adds the squares of its own slice of every bucket, whether it holds the rest
or not. Squares add up in fp64, so that neither bucket sizes nor the number of ranks move the result. A square that is not
finite makes the sum so, on every rank alike, which is the vote.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dist_train.comm.collectives import Collectives
from dist_train.mesh.mesh import Group
from dist_train.ops import reduce
from dist_train.zero.protocol import StepReport


def sum_of_squares(parts: Iterable[Tensor], device: torch.device, fused: bool = True) -> Tensor:
    """Σx² over flat tensors of any float dtype, each on `device` or the host, as an fp64 scalar on `device`."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for part in parts:
        by_device.setdefault(part.device, []).append(part)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for held in by_device.values():
        total += reduce.sum_of_squares(held, fused).to(device)
    return total


def clip_factor(norm: Tensor, max_norm: float) -> Tensor:
    """min(1, max_norm ÷ norm); `max_norm=0` turns clipping off."""
    if max_norm <= 0:
        return torch.ones_like(norm)
    return (max_norm / norm).clamp(max=1.0)


def agree(
    comm: Collectives,
    group: Group,
    squares: Tensor,
    weight: Tensor | float,
    sums: Sequence[Tensor | float],
    *,
    carried: float,
    clip_norm: float,
    update: bool,
    exposed_seconds: float | None,
) -> tuple[StepReport, Tensor]:
    """One all-reduce of what every rank counted; then the report, and by what the optimizer must divide the gradients.

    `squares`: Σ over the elements that this rank counts. `carried`: the factor by which gradients differ from the sum over
    micro-batches and ranks, such as the loss scale. `update=False`: the step counts as skipped.
    """
    totals = torch.stack([squares, *(_on(squares.device, x) for x in (weight, *sums))])
    comm.all_reduce(totals, group).wait()
    scale = totals[1] * carried
    # In fp32 the norm is the same bits for every bucket size and number of ranks: their fp64 sums differ in the last place.
    norm = (totals[0].sqrt() / scale.clamp(min=torch.finfo(torch.float64).tiny)).to(torch.float32)
    finite = totals[0].isfinite()
    skipped = 1.0 - (finite & (totals[1] > 0)).to(torch.float32) if update else torch.ones_like(norm)
    divisor = torch.where(skipped > 0, 1.0, scale / clip_factor(norm, clip_norm)).to(torch.float32)
    return StepReport(norm, finite, skipped, totals[1], totals[2:], exposed_seconds), divisor


def _on(device: torch.device, value: Tensor | float) -> Tensor:
    if isinstance(value, Tensor):
        return value.to(device, torch.float64)
    return torch.full((), value, dtype=torch.float64, device=device)  # a fill: copying it there would make the host wait
