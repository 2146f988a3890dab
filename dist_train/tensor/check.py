"""The declared states of a tensor-parallel model, checked on real values while it runs; debugging, for it costs collectives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dist_train.comm.collectives import Collectives
from dist_train.mesh.mesh import Group
from dist_train.model.plan import Layer, State
from dist_train.tensor.linear import RowLinear
from dist_train.tensor.stream import own_run
from dist_train.tensor.vocabulary import VocabularyEmbedding

_ROUNDING = 1e-2  # relative to the largest value: a sum added in another order; a rank's part that is missing is far above


@contextmanager
def check_states(model: nn.Module, group: Group, comm: Collectives) -> Iterator[None]:
    """Inside, each layer of the plan is looked at when it has run, and its gradient when that has come.

    What is declared replicated must be the same bits on all ranks; a sum over ranks whose result is split along tokens must
    be what another collective makes of its addends. Every rank raises RuntimeError with the name of the first layer for which
    that does not hold.
    """
    look = _Look(group, comm)
    layers: dict[str, Layer] = getattr(model, "tensor_layers", {})
    hooks = [model.get_submodule(name).register_forward_hook(partial(look, name, layer)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Look:
    def __init__(self, group: Group, comm: Collectives) -> None:
        self.group, self.comm = group, comm

    def __call__(self, name: str, layer: Layer, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if layer.gives is State.COPY:
            for tensor in output if isinstance(output, tuple) else (output,):
                self._same(f"the output of {name}", tensor)
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._same, f"the gradient of the output of {name}"))
        elif layer.gives is State.TOKENS and isinstance(module, (RowLinear, VocabularyEmbedding)):
            self._summed(name, module, inputs[0], output)

    @torch.no_grad()
    def _same(self, what: str, tensor: Tensor) -> None:
        first = tensor.detach().clone()
        self.comm.broadcast(first, self.group).wait()
        off = self._worst((tensor - first).where(~(tensor.isnan() & first.isnan()), 0.0))
        if off > 0:
            raise RuntimeError(
                f"{what} is declared replicated over {self.group.axis}, but its ranks differ by up to {off:.3g}: "
                "a reduction before it is missing, or its layer has other weights or other random draws on some rank."
            )

    @torch.no_grad()
    def _summed(self, name: str, module: RowLinear | VocabularyEmbedding, inputs: Tensor, output: Tensor) -> None:
        total = module.addend(inputs).clone()
        self.comm.all_reduce(total, self.group).wait()
        size = self._worst(total)
        off = self._worst(output - own_run(total, self.group))
        if off > _ROUNDING * size:
            raise RuntimeError(
                f"the output of {name} is declared {State.TOKENS.value}, but is not the sum of what the ranks of "
                f"{self.group.axis} add: off by up to {off:.3g} of {size:.3g}; its reduction is missing or wrong."
            )

    def _worst(self, tensor: Tensor) -> float:
        """The largest absolute value on any rank, inf for nan; the same on all of them, so that they raise together."""
        worst = tensor.abs().amax().double().nan_to_num(nan=torch.inf, posinf=torch.inf).reshape(1)
        self.comm.all_reduce(worst, self.group, "max").wait()
        return worst.item()
