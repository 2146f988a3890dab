"""Recipes for optimizers over flat segments: torch's fused kernels, one launch for all segments of a rank.

The fused kernels take the unscale-and-clip factor and the found-inf flag as device scalars, so clipping and skipping cost
neither a pass over the gradients nor a host sync. A recipe is a value; `bind` makes the optimizer, with its state in place,
so a checkpoint can be read into it before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dist_train.zero.engine import BoundOptimizer, FlatSegment


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (arXiv:1711.05101); decay spares the segments of group `no_decay`."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def bind(self, segments: Sequence[FlatSegment]) -> BoundOptimizer:
        return _Adaptive(torch.optim.AdamW, self, segments)


@dataclass(frozen=True)
class Adam:
    """Adam (arXiv:1412.6980); weight decay, if any, is added to the gradient."""

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0

    def bind(self, segments: Sequence[FlatSegment]) -> BoundOptimizer:
        return _Adaptive(torch.optim.Adam, self, segments)


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent, with heavy-ball momentum where `momentum` > 0."""

    lr: float = 0.1
    momentum: float = 0.0
    weight_decay: float = 0.0

    def bind(self, segments: Sequence[FlatSegment]) -> BoundOptimizer:
        return _Sgd(self, segments)


class _Flat:
    """Hands torch's optimizer the masters as parameters and, step by step, their gradients."""

    def __init__(self, kind: Any, recipe: Any, segments: Sequence[FlatSegment], **options: Any) -> None:
        self._segments = segments
        self._params = [torch.nn.Parameter(s.master) for s in segments]  # shares memory with the master
        spared = [p for p, s in zip(self._params, segments, strict=True) if s.group == "no_decay"]
        decayed = [p for p, s in zip(self._params, segments, strict=True) if s.group != "no_decay"]
        groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": spared, "weight_decay": 0.0}]
        self._torch = kind([group for group in groups if group["params"]], lr=recipe.lr, fused=True, **options)

    def step(self, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        for group in self._torch.param_groups:
            group["lr"] = lr
        for param, segment in zip(self._params, self._segments, strict=True):
            param.grad = segment.grad if segment.grad.dtype == param.dtype else segment.grad.to(param.dtype)
        self._torch.grad_scale, self._torch.found_inf = grad_scale, found_inf
        self._torch.step()
        for param in self._params:
            param.grad = None


class _Adaptive(_Flat):
    def __init__(self, kind: Any, recipe: Any, segments: Sequence[FlatSegment]) -> None:
        super().__init__(kind, recipe, segments, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps)
        for param in self._params:
            self._torch.state[param] = {
                "step": torch.zeros((), dtype=torch.float32, device=param.device),
                "exp_avg": torch.zeros_like(param, requires_grad=False),
                "exp_avg_sq": torch.zeros_like(param, requires_grad=False),
            }

    def moments(self, segment: int) -> dict[str, Tensor]:
        state = self._torch.state[self._params[segment]]
        return {name: state[name] for name in ("exp_avg", "exp_avg_sq")}

    @property
    def step_count(self) -> Tensor:
        return self._torch.state[self._params[0]]["step"]

    def set_step_count(self, count: float) -> None:
        for param in self._params:
            self._torch.state[param]["step"].fill_(count)


class _Sgd(_Flat):
    def __init__(self, recipe: SGD, segments: Sequence[FlatSegment]) -> None:
        super().__init__(torch.optim.SGD, recipe, segments, momentum=recipe.momentum)
        self._steps = torch.zeros((), dtype=torch.float32, device=self._params[0].device)
        if recipe.momentum:
            for param in self._params:
                self._torch.state[param] = {"momentum_buffer": torch.zeros_like(param, requires_grad=False)}

    def step(self, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        super().step(lr, grad_scale, found_inf)
        self._steps += 1 - found_inf

    def moments(self, segment: int) -> dict[str, Tensor]:
        return dict(self._torch.state[self._params[segment]])

    @property
    def step_count(self) -> Tensor:
        return self._steps

    def set_step_count(self, count: float) -> None:
        self._steps.fill_(count)
