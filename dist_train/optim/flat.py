"""Recipes for optimizers over flat segments: torch's fused kernels, one launch for all segments of a decay group.

The kernels take the unscale-and-clip factor and the found-inf flag as device scalars, so clipping and skipping cost neither a
pass over the gradients nor a host sync. They are called directly, as torch.optim calls them: a `torch.optim.Optimizer` would
loop over parameters in Python at each step, and loads torch's compiler when it is made.

A recipe is a value; `bind` makes the optimizer with its state in place, so a checkpoint can be read into it at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dist_train.zero.protocol import BoundOptimizer, FlatSegment

Tensors = list[Tensor]


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101); decay spares the segments of group `no_decay`."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def bind(self, segments: Sequence[FlatSegment]) -> BoundOptimizer:
        return _Adaptive(self, torch._fused_adamw_, segments)


@dataclass(frozen=True)
class Adam:
    """Adam (arXiv:1412.6980); weight decay, if any, is added to the gradient."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0

    def bind(self, segments: Sequence[FlatSegment]) -> BoundOptimizer:
        return _Adaptive(self, torch._fused_adam_, segments)


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, with heavy-ball momentum where `momentum` > 0."""

    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0

    def bind(self, segments: Sequence[FlatSegment]) -> BoundOptimizer:
        return _Sgd(self, segments)


class _Flat:
    """What all of them share: masters and gradients by decay group, moments, and one count of updates."""

    moment_names: tuple[str, ...] = ()

    def __init__(self, segments: Sequence[FlatSegment], weight_decay: float) -> None:
        self._segments = segments
        self._moments = [{name: torch.zeros_like(s.master) for name in self.moment_names} for s in segments]
        self._steps = torch.zeros((), dtype=torch.float32, device=segments[0].master.device)
        spared = [at for at, segment in enumerate(segments) if segment.group == "no_decay"]
        decayed = [at for at, segment in enumerate(segments) if segment.group != "no_decay"]
        self._groups = [(members, decay) for members, decay in ((decayed, weight_decay), (spared, 0.0)) if members]

    def step(self, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        self._steps += 1 - found_inf
        for members, decay in self._groups:
            masters = [self._segments[at].master for at in members]
            # A kernel reads gradients in the dtype of what it updates; this copies only where they differ.
            grads = [self._segments[at].grad.to(self._segments[at].master.dtype) for at in members]
            moments = [[self._moments[at][name] for at in members] for name in self.moment_names]
            common = {"lr": lr, "weight_decay": decay, "maximize": False, "grad_scale": grad_scale, "found_inf": found_inf}
            self._launch(masters, grads, moments, common)

    def _launch(self, masters: Tensors, grads: Tensors, moments: list[Tensors], common: dict[str, Any]) -> None:
        raise NotImplementedError

    def moments(self, segment: int) -> dict[str, Tensor]:
        return self._moments[segment]

    @property
    def step_count(self) -> Tensor:
        return self._steps


class _Adaptive(_Flat):
    moment_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, recipe: Adam | AdamW, kernel: Callable[..., None], segments: Sequence[FlatSegment]) -> None:
        super().__init__(segments, recipe.weight_decay)
        self._kernel = kernel
        self._options = {"beta1": recipe.beta1, "beta2": recipe.beta2, "eps": recipe.eps, "amsgrad": False}

    def _launch(self, masters: Tensors, grads: Tensors, moments: list[Tensors], common: dict[str, Any]) -> None:
        self._kernel(masters, grads, *moments, [], [self._steps] * len(masters), **self._options, **common)


class _Sgd(_Flat):
    def __init__(self, recipe: SGD, segments: Sequence[FlatSegment]) -> None:
        self.moment_names = ("momentum_buffer",) if recipe.momentum else ()
        super().__init__(segments, recipe.weight_decay)
        self._options: dict[str, Any] = {"momentum": recipe.momentum, "dampening": 0.0, "nesterov": False, "is_first_step": False}

    def _launch(self, masters: Tensors, grads: Tensors, moments: list[Tensors], common: dict[str, Any]) -> None:
        torch._fused_sgd_(masters, grads, moments[0] if moments else [], **self._options, **common)
