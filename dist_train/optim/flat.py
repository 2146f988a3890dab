"""Recipes for optimizers over flat segments: torch's fused kernels, one launch for all segments of a decay group.

The kernels take the unscale-and-clip factor and the found-inf flag as device scalars, so clipping and skipping cost neither a
pass over the gradients nor a host sync. They are called directly, as torch.optim calls them: a `torch.optim.Optimizer` would
loop over parameters in Python at each step, and loads torch's compiler when it is made.

A recipe is a value; `bind` makes the optimizer with its state in place, so a checkpoint can be read into it at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dist_train.zero.layout import ALIGNMENT, FLAT, Cut
from dist_train.zero.protocol import BoundOptimizer, FlatSegment

Tensors = list[Tensor]
_Run = tuple[Tensor, Tensor, Tensors, Tensor]  # master, gradient, moments, count of updates


class Recipe:
    """The groups of most optimizers: weight decay spares tensors of fewer than two dimensions."""

    def group(self, name: str, param: Tensor) -> str:
        return "decay" if param.ndim >= 2 else "no_decay"

    def cut(self, group: str) -> Cut:
        return FLAT

    def state_bytes(self, group: str, master_bytes: int) -> float:
        return 2 * master_bytes


@dataclass(frozen=True)
class AdamW(Recipe):
    """Adam with decoupled weight decay (arXiv:1711.05101); decay spares the segments of group `no_decay`."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def bind(self, segments: Sequence[FlatSegment]) -> BoundOptimizer:
        return FusedAdam(self, torch._fused_adamw_, segments)


@dataclass(frozen=True)
class Adam(Recipe):
    """Adam (arXiv:1412.6980); weight decay, if any, is added to the gradient."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0

    def bind(self, segments: Sequence[FlatSegment]) -> BoundOptimizer:
        return FusedAdam(self, torch._fused_adam_, segments)


@dataclass(frozen=True)
class SGD(Recipe):
    """Stochastic gradient descent, with heavy-ball momentum where `momentum` > 0."""

    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0

    def state_bytes(self, group: str, master_bytes: int) -> float:
        return master_bytes if self.momentum else 0

    def bind(self, segments: Sequence[FlatSegment]) -> BoundOptimizer:
        return _Sgd(self, segments)


class _Flat:
    """What all of them share: masters and gradients by decay group, moments, and a count of updates for each parameter.

    All counts of a segment are equal until a parameter is left out of an update; from then on that segment's parameters are
    launched one by one, each with its own count.
    """

    moment_names: tuple[str, ...] = ()
    alignment = ALIGNMENT  # elements at multiples of which parameters begin

    def __init__(self, segments: Sequence[FlatSegment], weight_decay: float) -> None:
        self._segments, self._weight_decay = segments, weight_decay
        self._moments = [self._new_state(segment) for segment in segments]
        ends = list(itertools.accumulate((len(s.parts) for s in segments), initial=0))
        self._places = [slice(start, stop) for start, stop in itertools.pairwise(ends)]  # of a segment's counts in `_steps`
        device = segments[0].master.device if segments else None
        self._steps = torch.zeros(ends[-1], dtype=torch.float32, device=device)
        self._step = self._steps.unbind()
        self._apart: set[int] = set()  # segments whose parameters have different counts

    def _new_state(self, segment: FlatSegment) -> dict[str, Tensor]:
        return {name: segment.zeros(name) for name in self.moment_names}

    def step(
        self, lr: float, grad_scale: Tensor, found_inf: Tensor, segments: range | None = None, idle: Collection[str] = ()
    ) -> None:
        chosen = range(len(self._segments)) if segments is None else segments
        if not chosen:
            return
        left_out = {at: [part.slot.name in idle for part in self._segments[at].parts] for at in chosen} if idle else {}
        self._apart.update(at for at, names in left_out.items() if any(names) and not all(names))
        counted = self._steps[self._places[chosen[0]].start : self._places[chosen[-1]].stop]
        counted += 1 - found_inf
        for at, names in left_out.items():
            for place, out in enumerate(names, self._places[at].start):
                if out:
                    self._step[place].sub_(1 - found_inf)
        self._update(chosen, left_out, lr, grad_scale, found_inf)

    def _update(
        self, chosen: Iterable[int], left_out: Mapping[int, Sequence[bool]], lr: float, grad_scale: Tensor, found_inf: Tensor
    ) -> None:
        """Update these segments, whose counts are those after it. `left_out`: for some, which of their parts stay as they are."""
        runs: dict[float, list[_Run]] = {}
        for at in chosen:
            decay = 0.0 if self._segments[at].group == "no_decay" else self._weight_decay
            runs.setdefault(decay, []).extend(self._runs(at, left_out.get(at, ())))
        for decay, found in runs.items():
            if found:
                common = {"lr": lr, "weight_decay": decay, "maximize": False, "grad_scale": grad_scale, "found_inf": found_inf}
                masters, grads, moments, steps = map(list, zip(*found, strict=True))
                self._launch(masters, grads, moments, steps, common)

    def _runs(self, at: int, left_out: Sequence[bool]) -> Iterator[_Run]:
        """What of a segment is updated: all of it in one run, or each parameter that got a gradient."""
        segment, start = self._segments[at], self._places[at].start
        # A kernel reads gradients in the dtype of what it updates; this copies only where they differ.
        grad, moments = segment.grad.to(segment.master.dtype), list(self._moments[at].values())
        if at not in self._apart:
            if segment.parts and not (left_out and all(left_out)):
                yield segment.master, grad, moments, self._step[start]
            return
        for index, part in enumerate(segment.parts):
            if not (left_out and left_out[index]):
                # With the padding behind it, so that vector loops have no tail: the same bits however shards are cut.
                run = slice(part.at.start, min(segment.master.numel(), -(-part.at.stop // self.alignment) * self.alignment))
                state = [moment[_of(moment, run, segment.master.numel())] for moment in moments]
                yield segment.master[run], grad[run], state, self._step[start + index]

    def _launch(self, masters: Tensors, grads: Tensors, moments: list[Tensors], steps: Tensors, common: dict[str, Any]) -> None:
        """Update all runs in one launch. `moments`: for each run, its state in the order of `moment_names`."""
        raise NotImplementedError

    def moments(self, segment: int) -> dict[str, Tensor]:
        return self._moments[segment]

    def steps(self, segment: int) -> Tensor:
        return self._steps[self._places[segment]]

    def restored(self) -> None:
        counts = self._steps.tolist()
        self._apart = {at for at, place in enumerate(self._places) if len(set(counts[place])) > 1}


def _of(moment: Tensor, run: slice, numel: int) -> slice:
    """Where the state of the elements `run`, out of `numel`, lies in a moment: it has one element for each, or for each block."""
    block = max(1, numel // max(1, moment.numel()))
    return slice(run.start // block, run.stop // block)


class FusedAdam(_Flat):
    """Adam or AdamW, whichever `kernel` is."""

    moment_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, recipe: Adam | AdamW, kernel: Callable[..., None], segments: Sequence[FlatSegment]) -> None:
        super().__init__(segments, recipe.weight_decay)
        self._kernel = kernel
        self._options = {"beta1": recipe.beta1, "beta2": recipe.beta2, "eps": recipe.eps, "amsgrad": False}

    def _launch(self, masters: Tensors, grads: Tensors, moments: list[Tensors], steps: Tensors, common: dict[str, Any]) -> None:
        first, second = map(list, zip(*moments, strict=True))
        self._kernel(masters, grads, first, second, [], steps, **self._options, **common)


class _Sgd(_Flat):
    def __init__(self, recipe: SGD, segments: Sequence[FlatSegment]) -> None:
        self.moment_names = ("momentum_buffer",) if recipe.momentum else ()
        super().__init__(segments, recipe.weight_decay)
        self._options: dict[str, Any] = {"momentum": recipe.momentum, "dampening": 0.0, "nesterov": False, "is_first_step": False}

    def _launch(self, masters: Tensors, grads: Tensors, moments: list[Tensors], steps: Tensors, common: dict[str, Any]) -> None:
        buffers = [buffer for found in moments for buffer in found]
        torch._fused_sgd_(masters, grads, buffers, **self._options, **common)
