"""What a training loop knows of an engine, what an engine and an optimizer know of each other, and what a step reports."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from dist_train.params.geometry import Piece
from dist_train.zero.layout import Cut, SlotPart
from dist_train.zero.residency import DeviceMemory, Memory


@dataclass
class FlatSegment:
    """One optimizer group's run of a bucket, as far as this rank owns it: what is updated, and the gradient to read.

    An engine whose gradients move puts the new one in place before a step. `zeros` makes the state that goes with it.
    """

    group: str
    master: Tensor
    grad: Tensor
    parts: Sequence[SlotPart]  # the parameters, or parts of them, in `master`; between them is padding
    memory: Memory | None = None  # of the optimizer's state; None: beside `master`
    copy: Tensor | None = None  # what an update writes beside `master`: its values in 16 bits

    def zeros(self, name: str, numel: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A zeroed tensor for the optimizer's state `name`: like `master`, or flat with `numel` elements."""
        shape = self.master.shape if numel is None else (numel,)
        memory = self.memory or DeviceMemory(self.master.device)
        told = f"{name} of {self.parts[0].slot.name}" if self.parts else name
        return memory.zeros(math.prod(shape), dtype or self.master.dtype, told).view(shape)


class BoundOptimizer(Protocol):
    """An optimizer over flat segments, its state in place."""

    def step(
        self, lr: float, grad_scale: Tensor, found_inf: Tensor, segments: range | None = None, idle: Collection[str] = ()
    ) -> None:
        """Divide gradients by `grad_scale` and update in place; leave everything untouched where `found_inf` is 1.

        `segments`: only these; by default all. Parameters named in `idle` got no gradient: they and their state stay as
        they are, as torch's optimizers leave a parameter whose `grad` is None.
        """

    def moments(self, segment: int) -> dict[str, Tensor]:
        """State tensors of a segment: as long as its master, or with one element for each block of it."""

    def steps(self, segment: int) -> Tensor:
        """Number of updates of each of the segment's parts, fp32 (parts,); may be written before `restored`."""

    def restored(self) -> None:
        """Take up what was written into `steps` and `moments`."""


class Optimizer(Protocol):
    """What `dt.AdamW(lr=…)` is: a recipe that becomes an optimizer once the engine knows its segments."""

    @property
    def lr(self) -> float: ...

    def group(self, name: str, param: Tensor) -> str:
        """The optimizer group of a parameter; neighbours of one group are updated by one launch."""

    def cut(self, group: str) -> Cut:
        """Where a shard may end inside a parameter of this group."""

    def state_bytes(self, group: str, master_bytes: int) -> float:
        """Bytes of state for each element of a parameter of this group; `master_bytes`: of an element of a master."""

    def bind(self, segments: Sequence[FlatSegment]) -> BoundOptimizer: ...


@dataclass(frozen=True)
class StepReport:
    """What a step did; equal on every rank. Tensors are scalars on the engine's device: reading one waits for the step."""

    grad_norm: Tensor  # global norm before clipping
    finite: Tensor  # bool: every gradient element on every rank is finite
    skipped: Tensor  # 1.0 when gradients were not finite, or the step had no weight: nothing was updated
    weight: Tensor  # Σ over data ranks of the weights given to `step`
    sums: Tensor  # Σ over data ranks of the sums given to `step`
    exposed_seconds: float | None  # how long the host waited for collectives that backward did not hide; None: not known


class Engine(Protocol):
    """What trains a module over data ranks. All engines share one law: gradients of a step are the sum over micro-batches and
    ranks, divided once by the sum of weights, clipped by the global norm, and dropped by every rank when any is not finite."""

    loss_scale: float  # multiplies every loss before backward, and is divided out again before the norm

    @property
    def module(self) -> nn.Module:
        """What computes the loss; its parameters are the engine's."""

    def begin_pass(self, training: bool) -> None:
        """What follows, until the next call, is one pass over the micro-batches of a step, or of an evaluation."""

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Backward of one micro-batch; `last=False`: more follow before `step`."""

    def step(
        self, lr: float | None = None, weight: Tensor | float = 1.0, sums: Sequence[Tensor | float] = (), update: bool = True
    ) -> StepReport:
        """Update along the gradients since the last step; `weight` and `sums` are added up over ranks.

        Nothing changes on any rank with `update=False`, without weight, or with a gradient that is not finite."""

    def pieces(self) -> Iterator[Piece]:
        """What this rank holds for a checkpoint: `model/<name>`, `optim/<name>/<moment>`, `optim/<name>/step`."""

    def restored(self) -> None:
        """Take up what was written into the tensors of `pieces`."""

    def put_away(self) -> None:
        """Give back memory that `pieces` took, when nothing was written into them."""

    def held_bytes(self) -> dict[str, int]:
        """Bytes of tensors held by kind: parameters, masters, gradients, moments."""

    def predicted_bytes(self) -> dict[str, int] | None:
        """What `held_bytes` says between steps, from arithmetic; None where an engine cannot tell."""
