"""What the engine and an optimizer know of each other, and what a step reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class FlatSegment:
    """One optimizer group's run of a bucket, as far as this rank owns it: what is updated, and the gradient to read."""

    group: str
    master: Tensor
    grad: Tensor


class BoundOptimizer(Protocol):
    """An optimizer over flat segments, its state in place."""

    def step(self, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Divide gradients by `grad_scale` and update in place; leave everything untouched where `found_inf` is 1."""

    def moments(self, segment: int) -> dict[str, Tensor]:
        """State tensors of a segment, each as long as its master."""

    @property
    def step_count(self) -> Tensor:
        """Number of updates made, an fp32 scalar that may be written."""


class Optimizer(Protocol):
    """What `dt.AdamW(lr=…)` is: a recipe that becomes an optimizer once the engine knows its segments."""

    @property
    def lr(self) -> float: ...

    def bind(self, segments: Sequence[FlatSegment]) -> BoundOptimizer: ...


@dataclass(frozen=True)
class StepReport:
    """What a step did; equal on every rank. Tensors are scalars on the engine's device: reading one waits for the step."""

    grad_norm: Tensor  # global norm before clipping
    finite: Tensor  # bool: every gradient element on every rank is finite
    skipped: Tensor  # 1.0 when gradients were not finite, or the step had no weight: nothing was updated
    weight: Tensor  # Σ over data ranks of the weights given to `step`
    sums: Tensor  # Σ over data ranks of the sums given to `step`
    exposed_seconds: float  # how long the host waited for collectives that backward did not hide
