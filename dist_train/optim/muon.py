"""Muon: hidden matrices move along their orthogonalised momentum, everything else moves as under AdamW.

Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024), with the scale and the weight decay of
Moonlight (arXiv:2502.16982).

The step of a matrix needs all of it, so no shard may end inside one (`WHOLE`): each rank orthogonalises the matrices that it
owns, and what stage 0 does on every rank is shared out at stages 1 to 3. Matrices are taken one by one. A batched product of
those of equal shape would choose its kernel by how many there are, which differs between stages, and so would the bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import Tensor

from dist_train.optim.flat import AdamW, FlatAdam
from dist_train.zero.layout import FLAT, WHOLE, Cut
from dist_train.zero.protocol import BoundOptimizer, FlatSegment

# The quintic of Keller Jordan: its slope at zero is as steep as can be, so that five rounds lift small singular values; in
# return it does not settle at one but within about 0.7 to 1.2.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_TINY = 1e-7


@dataclass(frozen=True)
class Muon:
    """Muon for hidden matrices; AdamW for vectors, and for matrices whose name matches one of `adamw`.

    A matrix has two dimensions, or more (a convolution's kernel) that are flattened to (first, rest). Embeddings, position
    tables and the output head are not hidden: their rows are looked up, or are one class each. `weight_decay` spares vectors.
    """

    lr: float = 1e-3
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5  # rounds of Newton-Schulz
    weight_decay: float = 0.1
    beta1: float = 0.9  # this and the next two: AdamW's
    beta2: float = 0.95
    eps: float = 1e-8
    fused: bool = True  # AdamW's kernel
    adamw: tuple[str, ...] = ("*embed*", "*wte.*", "*wpe.*", "*positions.*", "*head.weight")

    def group(self, name: str, param: Tensor) -> str:
        if param.ndim < 2:
            return "no_decay"
        hidden = not any(fnmatchcase(name, pattern) for pattern in self.adamw)
        return "matrix" if hidden and min(_matrix(param).shape) > 1 else "decay"

    def cut(self, group: str) -> Cut:
        """The vectors of a block stay whole too, or it would have two buckets: one of whole and one of cut parameters."""
        return FLAT if group == "decay" else WHOLE

    def state_bytes(self, group: str, master_bytes: int) -> float:
        return master_bytes if group == "matrix" else 2 * master_bytes

    def bind(self, segments: Sequence[FlatSegment]) -> BoundOptimizer:
        return _Muon(self, segments)


def orthogonalize(matrix_RC: Tensor, steps: int = 5) -> Tensor:
    """Nearly U·Vᵀ of the matrix U·S·Vᵀ, by Newton-Schulz; zeros give zeros. In bf16 on CUDA, where it is fast, else in fp32."""
    unit_RC = matrix_RC.float()
    unit_RC = unit_RC / unit_RC.norm().clamp(min=_TINY)  # singular values of at most 1
    tall = unit_RC.size(0) > unit_RC.size(1)
    x = unit_RC.to(torch.bfloat16 if matrix_RC.is_cuda else torch.float32)
    x = x.T if tall else x  # the Gram matrix is the smaller one
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if tall else x


def _matrix(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 2 else tensor.flatten(1)


class _Muon(FlatAdam):
    def __init__(self, recipe: Muon, segments: Sequence[FlatSegment]) -> None:
        self._recipe = recipe
        super().__init__(AdamW(recipe.lr, recipe.beta1, recipe.beta2, recipe.eps, recipe.weight_decay, recipe.fused), segments)

    def _new_state(self, segment: FlatSegment) -> dict[str, Tensor]:
        if segment.group == "matrix":
            return {"momentum_buffer": segment.zeros("momentum_buffer")}
        return super()._new_state(segment)

    def _update(
        self, chosen: Iterable[int], left_out: Mapping[int, Sequence[bool]], lr: float, grad_scale: Tensor, found_inf: Tensor
    ) -> None:
        rest = []
        for at in chosen:
            segment = self._segments[at]
            if segment.group != "matrix":
                rest.append(at)
                continue
            flats, idle = (segment.master, segment.grad, self._moments[at]["momentum_buffer"]), left_out.get(at, ())
            for index, part in enumerate(segment.parts):
                if not (idle and idle[index]):
                    master, grad, momentum = (_matrix(flat[part.at].view(part.slot.shape)) for flat in flats)
                    self._step_matrix(master, grad, momentum, lr, grad_scale, found_inf)
            if segment.copy is not None:
                segment.copy.copy_(segment.master)
        super()._update(rest, left_out, lr, grad_scale, found_inf)

    def _step_matrix(
        self, master: Tensor, grad: Tensor, momentum: Tensor, lr: float, grad_scale: Tensor, found_inf: Tensor
    ) -> None:
        """All of one shape. Only the device knows what is skipped, and nobody waits for it: factors become zero."""
        recipe, taken = self._recipe, 1 - found_inf
        # (Zero times a gradient that is not finite would not be zero.)
        grad = torch.where(found_inf > 0, 0.0, grad.to(momentum.dtype) / grad_scale)
        momentum.lerp_(grad, ((1 - recipe.momentum) * taken).to(momentum.dtype))
        direction = grad.lerp(momentum, recipe.momentum) if recipe.nesterov else momentum
        # Moonlight's scale gives every matrix the root mean square that AdamW's updates have, about 0.2, so that one learning
        # rate, one schedule and one weight decay serve both; sqrt(max(1, rows ÷ columns)) would ask for a second rate.
        scale = 0.2 * max(master.shape) ** 0.5
        master.mul_(1 - lr * recipe.weight_decay * taken)
        master.sub_(orthogonalize(direction, recipe.ns_steps).to(master.dtype).mul_(lr * scale * taken))
