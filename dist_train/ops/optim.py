"""Optimizer steps over flat runs of elements: Adam (arXiv:1412.6980), AdamW (arXiv:1711.05101), SGD, LAMB (arXiv:1904.00962).

All runs that look alike share one launch. `grad_scale` and `found_inf` are fp32 scalars on the device: gradients are divided by
the first, and nothing is written where the second is above 0; the host waits for neither. `fused` picks the kernels of
csrc/optim for masters and moments in fp32 (or split masters) and gradients in fp32, bf16 or fp16; else torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dist_train.ops import library

Tensors = list[Tensor]


class Run(NamedTuple):
    """What is updated with one count of updates and one weight decay; all tensors flat, contiguous and of the same length."""

    master: Tensor  # fp32; beside a remainder bf16, the upper half of fp32; the reference takes any float dtype
    grad: Tensor  # any float dtype
    moments: Sequence[Tensor]  # of the master's dtype, fp32 beside a remainder: exp_avg and exp_avg_sq, or momentum, or none
    step: Tensor  # the count of updates, this one included: an fp32 scalar
    weight_decay: float
    copy: Tensor | None = None  # bf16 or fp16: takes the values of the new master
    remainder: Tensor | None = None  # int16, the lower half of the master
    adapted: bool = True  # LAMB: the step is as long as the parameter


def adam_(
    runs: Sequence[Run],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decoupled: bool,
    grad_scale: Tensor,
    found_inf: Tensor,
    fused: bool = True,
) -> None:
    """One step of AdamW, or with `decoupled=False` of Adam, in place."""

    def launch(g: _Group) -> None:
        torch.ops.dist_train.adam_(
            *(g.masters, g.remainders, g.grads, g.moments(0), g.moments(1), g.copies, g.steps),
            *(grad_scale, found_inf, lr, beta1, beta2, eps, g.decays, decoupled),
        )

    def plain(masters: Tensors, grads: Tensors, moments: list[Tensors], steps: Tensors, decay: float) -> None:
        kernel = torch._fused_adamw_ if decoupled else torch._fused_adam_
        options: dict[str, Any] = {"amsgrad": False, "maximize": False, "grad_scale": grad_scale, "found_inf": found_inf}
        kernel(
            masters,
            grads,
            moments[0],
            moments[1],
            [],
            steps,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay,
            eps=eps,
            **options,
        )

    _step(runs, launch, plain, fused)


def sgd_(runs: Sequence[Run], *, lr: float, momentum: float, grad_scale: Tensor, found_inf: Tensor, fused: bool = True) -> None:
    """One step of gradient descent in place, with heavy-ball momentum where runs have a moment."""

    def launch(g: _Group) -> None:
        momenta = g.moments(0) if g.runs[0].moments else []
        torch.ops.dist_train.sgd_(
            g.masters, g.remainders, g.grads, momenta, g.copies, grad_scale, found_inf, lr, momentum, g.decays
        )

    def plain(masters: Tensors, grads: Tensors, moments: list[Tensors], steps: Tensors, decay: float) -> None:
        options: dict[str, Any] = {"nesterov": False, "maximize": False, "is_first_step": False, "dampening": 0.0}
        options |= {"grad_scale": grad_scale, "found_inf": found_inf}
        torch._fused_sgd_(masters, grads, moments[0] if moments else [], weight_decay=decay, momentum=momentum, lr=lr, **options)

    _step(runs, launch, plain, fused)


def lamb_(
    runs: Sequence[Run],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    grad_scale: Tensor,
    found_inf: Tensor,
    fused: bool = True,
) -> None:
    """One step of LAMB in place. A run is one whole parameter: its norms decide how far it moves."""

    def launch(g: _Group) -> None:
        torch.ops.dist_train.lamb_(
            *(g.masters, g.remainders, g.grads, g.moments(0), g.moments(1), g.copies, g.steps),
            *(grad_scale, found_inf, lr, beta1, beta2, eps, g.decays, [int(run.adapted) for run in g.runs]),
        )

    def plain_with(adapted: bool) -> Callable[..., None]:
        def plain(masters: Tensors, grads: Tensors, moments: list[Tensors], steps: Tensors, decay: float) -> None:
            for master, grad, m, v, count in zip(masters, grads, moments[0], moments[1], steps, strict=True):
                _lamb_reference(master, grad, m, v, count, lr, beta1, beta2, eps, decay, adapted, grad_scale, found_inf)

        return plain

    for adapted in (True, False):
        _step([run for run in runs if run.adapted == adapted], launch, plain_with(adapted), fused)


def _lamb_reference(
    master: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    adapted: bool,
    grad_scale: Tensor,
    found_inf: Tensor,
) -> None:
    taken = found_inf <= 0
    grad = grad / grad_scale
    m, v = first.lerp(grad, 1 - beta1), second.lerp(grad.square(), 1 - beta2)
    count = step.double()
    root = (1 - beta2**count).sqrt()
    update = (root / (1 - beta1**count)).to(m.dtype) * m / (v.sqrt() + (eps * root).to(v.dtype)) + decay * master
    sizes = [torch.linalg.vector_norm(x, dtype=torch.float64) for x in (master, update)]
    ratio = torch.where((sizes[0] > 0) & (sizes[1] > 0), sizes[0] / sizes[1], 1.0) if adapted else torch.ones_like(sizes[0])
    moved = master - (lr * ratio).to(master.dtype) * update
    for old, new in ((master, moved), (first, m), (second, v)):
        old.copy_(torch.where(taken, new, old))


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """(bf16, int16) of fp32: its upper 16 bits to the nearest, and what they lack. A tie goes away from zero, not to even, or
    the remainder of one that went down would not fit."""
    bits = master.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join_master(upper: Tensor, remainder: Tensor, out: Tensor | None = None) -> Tensor:
    """The fp32 values that `split_master` split, written into `out` where it is given."""
    bits = None if out is None else out.view(torch.int32)
    return torch.add(remainder, upper.view(torch.int16).to(torch.int32) << 16, out=bits).view(torch.float32)


class _Group(NamedTuple):
    """Runs whose tensors have the same dtypes, as the lists that an operator takes."""

    runs: list[Run]

    @property
    def masters(self) -> Tensors:
        return [run.master for run in self.runs]

    @property
    def grads(self) -> Tensors:
        return [run.grad for run in self.runs]

    @property
    def steps(self) -> Tensors:
        return [run.step for run in self.runs]

    @property
    def copies(self) -> Tensors:
        return [run.copy for run in self.runs if run.copy is not None]

    @property
    def remainders(self) -> Tensors:
        return [run.remainder for run in self.runs if run.remainder is not None]

    @property
    def decays(self) -> list[float]:
        return [run.weight_decay for run in self.runs]

    def moments(self, at: int) -> Tensors:
        return [run.moments[at] for run in self.runs]


def _step(runs: Sequence[Run], launch: Callable[[_Group], None], plain: Callable[..., None], fused: bool) -> None:
    rest = []
    for is_fused, group in _alike(runs, lambda run: fused and _fusible(run)):
        if is_fused:
            for _, alike in _alike(group, lambda run: (str(run.grad.dtype), str(run.copy is not None and run.copy.dtype))):
                launch(_Group(alike))
        else:
            rest += group
    for decay, group in _alike(rest, lambda run: run.weight_decay):
        masters = [run.master if run.remainder is None else join_master(run.master, run.remainder) for run in group]
        # torch's kernels read gradients in the dtype of what they update; this copies only where they differ.
        grads = [run.grad.to(master.dtype) for run, master in zip(group, masters, strict=True)]
        moments = [list(each) for each in zip(*(run.moments for run in group), strict=True)]
        plain(masters, grads, moments, [run.step for run in group], decay)
        for run, master in zip(group, masters, strict=True):
            if run.remainder is not None:
                for target, value in zip((run.master, run.remainder), split_master(master), strict=True):
                    target.copy_(value)
            elif run.copy is not None:
                run.copy.copy_(master)


def _alike(runs: Iterable[Run], key: Callable[[Run], Any]) -> Iterable[tuple[Any, list[Run]]]:
    found: dict[Any, list[Run]] = {}
    for run in runs:
        found.setdefault(key(run), []).append(run)
    return found.items()


def _fusible(run: Run) -> bool:
    dtype = torch.float32 if run.remainder is None else torch.bfloat16
    floats = all(moment.dtype == torch.float32 for moment in run.moments)
    return run.master.dtype == dtype and floats and library.usable(run.master, run.grad, run.copy)


if library.loaded:
    for _name in ("adam_", "lamb_", "sgd_"):
        torch.library.register_fake(f"dist_train::{_name}", lambda *_args: None)
