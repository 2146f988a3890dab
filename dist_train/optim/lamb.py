"""LAMB (arXiv:1904.00962): the direction of Adam, and a step as long as the parameter, times the learning rate.

A parameter's norm needs all of it, so no shard may end inside one (`WHOLE`), as for Muon: each rank takes the norms of the
parameters that it owns, and no rank waits for another's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from dist_train.ops.optim import Run, lamb_
from dist_train.optim.flat import AdamW, FlatAdam
from dist_train.zero.layout import WHOLE, Cut
from dist_train.zero.protocol import BoundOptimizer, FlatSegment


@dataclass(frozen=True)
class Lamb(AdamW):
    """LAMB. Vectors (biases, norms) are spared weight decay, and their steps are Adam's: small as their norms are, they would
    hardly move."""

    lr: float = 1e-3
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.01

    def cut(self, group: str) -> Cut:
        return WHOLE

    def bind(self, segments: Sequence[FlatSegment]) -> BoundOptimizer:
        return _Lamb(self, segments)


class _Lamb(FlatAdam):
    alignment = 1  # padding is no part of a parameter

    def _runs(self, at: int, left_out: Sequence[bool]) -> Iterator[Run]:
        spared = self._segments[at].group == "no_decay"
        for index in range(len(self._segments[at].parts)):
            if not (left_out and left_out[index]):
                run = self._run_of_part(at, index, 0.0 if spared else self._weight_decay)
                yield run._replace(adapted=not spared)

    def _launch(self, runs: Sequence[Run], lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        o = self._adam
        options = {"lr": lr, "beta1": o.beta1, "beta2": o.beta2, "eps": o.eps}
        lamb_(runs, **options, grad_scale=grad_scale, found_inf=found_inf, fused=o.fused)
