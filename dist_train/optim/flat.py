"""Recipes for optimizers over flat segments: fused kernels (`dist_train.ops.optim`), one launch for all segments.

The kernels take the unscale-and-clip factor and the found-inf flag as device scalars, so clipping and skipping cost neither a
pass over the gradients nor a host sync; they read 16-bit gradients as they are, and write the 16-bit copy of a master in the
same pass. `fused=False` takes torch's kernels. Those are called directly, as torch.optim calls them: a `torch.optim.Optimizer`
would loop over parameters in Python at each step, and loads torch's compiler when it is made.

A recipe is a value; `bind` makes the optimizer with its state in place, so a checkpoint can be read into it at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dist_train.ops.optim import Run, adam_, sgd_
from dist_train.zero.layout import ALIGNMENT, FLAT, Cut
from dist_train.zero.protocol import BoundOptimizer, FlatSegment


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
    fused: bool = True

    def bind(self, segments: Sequence[FlatSegment]) -> BoundOptimizer:
        return FlatAdam(self, segments, decoupled=True)


@dataclass(frozen=True)
class Adam(Recipe):
    """Adam (arXiv:1412.6980); weight decay, if any, is added to the gradient."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    fused: bool = True

    def bind(self, segments: Sequence[FlatSegment]) -> BoundOptimizer:
        return FlatAdam(self, segments, decoupled=False)


@dataclass(frozen=True)
class SGD(Recipe):
    """Stochastic gradient descent, with heavy-ball momentum where `momentum` > 0."""

    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0
    fused: bool = True

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
        runs = [run for at in chosen for run in self._runs(at, left_out.get(at, ()))]
        if runs:
            self._launch(runs, lr, grad_scale, found_inf)

    def _runs(self, at: int, left_out: Sequence[bool]) -> Iterator[Run]:
        """What of a segment is updated: all of it in one run, or each parameter that got a gradient."""
        segment, start = self._segments[at], self._places[at].start
        decay, moments = 0.0 if segment.group == "no_decay" else self._weight_decay, list(self._moments[at].values())
        if at not in self._apart:
            if segment.parts and not (left_out and all(left_out)):
                yield Run(segment.master, segment.grad, moments, self._step[start], decay, segment.copy)
            return
        for index in range(len(segment.parts)):
            if not (left_out and left_out[index]):
                yield self._run_of_part(at, index, decay)

    def _run_of_part(self, at: int, index: int, decay: float) -> Run:
        # With the padding behind it, so that vector loops of torch's kernels have no tail: the same bits however shards are cut.
        segment, numel = self._segments[at], self._segments[at].master.numel()
        part = segment.parts[index].at
        run = slice(part.start, min(numel, -(-part.stop // self.alignment) * self.alignment))
        moments = [moment[_of(moment, run, numel)] for moment in self._moments[at].values()]
        copy = None if segment.copy is None else segment.copy[run]
        return Run(segment.master[run], segment.grad[run], moments, self._step[self._places[at].start + index], decay, copy)

    def _launch(self, runs: Sequence[Run], lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Update all runs, whose moments are in the order of `moment_names`, in one launch; write their copies."""
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


class FlatAdam(_Flat):
    """AdamW, or Adam where decay is not decoupled."""

    moment_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, recipe: Adam | AdamW, segments: Sequence[FlatSegment], decoupled: bool = True) -> None:
        super().__init__(segments, recipe.weight_decay)
        self._adam, self._decoupled = recipe, decoupled

    def _launch(self, runs: Sequence[Run], lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        o = self._adam
        options = {"lr": lr, "beta1": o.beta1, "beta2": o.beta2, "eps": o.eps}
        adam_(runs, **options, decoupled=self._decoupled, grad_scale=grad_scale, found_inf=found_inf, fused=o.fused)


class _Sgd(_Flat):
    def __init__(self, recipe: SGD, segments: Sequence[FlatSegment]) -> None:
        self.moment_names = ("momentum_buffer",) if recipe.momentum else ()
        super().__init__(segments, recipe.weight_decay)
        self._recipe = recipe

    def _launch(self, runs: Sequence[Run], lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        momentum, fused = self._recipe.momentum, self._recipe.fused
        sgd_(runs, lr=lr, momentum=momentum, grad_scale=grad_scale, found_inf=found_inf, fused=fused)
