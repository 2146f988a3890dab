"""Linear layers whose weights are split over ranks: a fan-out by columns, and a sum by rows (Megatron-LM, arXiv:1909.08053).

Shapes: D width of the stream, F width that this rank computes, n tokens of a rank, M tokens that are multiplied: B·T, or r·n for
r ranks whose stream is split along tokens. With a group of size 1 both are the plain layers, to the bit.

Collectives travel while products that do not need them are computed:

    fan-out forward    own tokens are multiplied while those of the others are gathered
    fan-out backward   the input is gathered during the product for its gradient, and that gradient is summed over ranks
                       during the products for the weights
    row backward       own tokens are multiplied while gradients of the others are gathered
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dist_train.comm.collectives import Collectives, Handle
from dist_train.mesh.mesh import Group
from dist_train.model.fan_out import FanOut
from dist_train.ops.kept import kept
from dist_train.tensor.deferred import WeightGradients, deliver
from dist_train.tensor.stream import own_tokens


class SharedLayer(nn.Module):
    """What both kinds have: the group, whether the stream is split along tokens, and who computes gradients of weights.

    With a `queue`, backward gives autograd no gradient for weights and biases: whoever owns the queue computes them later.
    """

    def __init__(self, group: Group, comm: Collectives, sequence: bool) -> None:
        super().__init__()
        self.group, self.comm, self.sequence = group, comm, sequence and group.size > 1
        self.queue: WeightGradients | None = None

    def gather(self, x_ND: Tensor) -> tuple[Tensor, Handle]:
        """All tokens, once the handle was waited for."""
        if not self.sequence:
            return x_ND, Handle()
        all_MD = x_ND.new_empty(x_ND.size(0) * self.group.size, x_ND.size(1))
        return all_MD, self.comm.all_gather(all_MD, x_ND, self.group)

    def sum(self, x_MD: Tensor) -> tuple[Tensor, Handle]:
        """The sum over ranks of partial sums for all tokens, once the handle was waited for; in the place of `x` if not split."""
        if not self.sequence:
            return x_MD, self.comm.all_reduce(x_MD, self.group)
        own_ND = x_MD.new_empty(x_MD.size(0) // self.group.size, x_MD.size(1))
        return own_ND, self.comm.reduce_scatter(own_ND, x_MD, self.group)

    def runs(self, tokens: int, count: int) -> tuple[slice, list[slice]]:
        """(this rank's run, those of the others) among the first `tokens` places, for `count` places a rank."""
        if not self.sequence:
            return slice(0, tokens), []
        start = min(self.group.index * count, tokens)
        stop = min(start + count, tokens)
        return slice(start, stop), [run for run in (slice(0, start), slice(stop, tokens)) if run.start < run.stop]


class ColumnFanOut(SharedLayer, FanOut):
    """Linear layers that read one input, each with some of its outputs on each rank; of the input it keeps this rank's tokens."""

    def forward(self, x_BTD: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        """Outputs in the shape of the input, or (r·n, F) for an input (n, D) that is split along tokens."""
        return fan_out(self, x_BTD, [linear.weight for linear in linears], [linear.bias for linear in linears])


class RowLinear(SharedLayer):
    """A linear layer with some of its inputs on each rank. It has the parameters of the layer that it replaces."""

    def __init__(self, linear: nn.Linear, group: Group, comm: Collectives, sequence: bool) -> None:
        super().__init__(group, comm, sequence)
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x_BTF: Tensor) -> Tensor:
        """The output in the shape of the input, or (n, D), split along tokens."""
        return _Row.apply(self, x_BTF, self.weight, self.bias)

    def addend(self, x_BTF: Tensor) -> Tensor:
        """What this rank adds to the sum: (M, D), with zeros for the padding. No gradient."""
        x_MF = _line(x_BTF)
        tokens = x_MF.size(0)
        padded = own_tokens(tokens, self.group) * self.group.size if self.sequence else tokens
        addend_MD = x_MF.new_empty(padded, self.weight.size(0))
        # Of the bias there is one in the sum: that of the first rank.
        _multiply(x_MF, self.weight, self.bias if self.group.index == 0 else None, addend_MD[:tokens])
        addend_MD[tokens:].zero_()
        return addend_MD


def fan_out(layer: SharedLayer, x_BTD: Tensor, weights: list[Tensor], biases: list[Tensor | None]) -> tuple[Tensor, ...]:
    return _FanOut.apply(layer, x_BTD, *weights, *biases)


class _FanOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: SharedLayer, x_BTD: Tensor, *parameters: Any) -> tuple[Tensor, ...]:
        weights, biases = parameters[: len(parameters) // 2], parameters[len(parameters) // 2 :]
        ctx.layer, ctx.parameters = layer, parameters
        ctx.save_for_backward(x_BTD, *weights)
        outputs = kept(lambda: _FanOut.outputs(layer, _line(x_BTD), weights, biases))
        return tuple(outputs if layer.sequence else (y.view(*x_BTD.shape[:-1], -1) for y in outputs))

    @staticmethod
    def outputs(layer: SharedLayer, x_ND: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
        all_MD, arriving = layer.gather(x_ND)
        own, others = layer.runs(all_MD.size(0), x_ND.size(0))
        found = [x_ND.new_empty(all_MD.size(0), weight.size(0)) for weight in weights]
        for output, weight, bias in zip(found, weights, biases, strict=True):
            _multiply(x_ND, weight, bias, output[own])
        arriving.wait()
        for run in others:
            for output, weight, bias in zip(found, weights, biases, strict=True):
                _multiply(all_MD[run], weight, bias, output[run])
        return found

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        layer, (x_BTD, *weights) = ctx.layer, ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad[1:]
        grads = [_line(gradient) for gradient in gradients]
        all_MD, arriving = layer.gather(_line(x_BTD)) if any(wants) else (x_BTD, Handle())
        dx_BTD, travelling = None, Handle()
        if wants_x:
            # Products and sums in the order in which autograd makes them of plain layers: the same bits.
            total_MD = grads[-1] @ weights[-1]
            for gradient, weight in zip(grads[-2::-1], weights[-2::-1], strict=True):
                total_MD += gradient @ weight
            dx_BTD, travelling = layer.sum(total_MD)
        arriving.wait()
        found = [_weight_gradient(layer, p, g, all_MD) for p, g in zip(ctx.parameters, grads, strict=False)]
        found += [_bias_gradient(layer, p, g) for p, g in zip(ctx.parameters[len(grads) :], grads, strict=True)]
        travelling.wait()
        return None, None if dx_BTD is None else dx_BTD.view(x_BTD.shape), *found


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: RowLinear, x_BTF: Tensor, weight_DF: Tensor, bias_D: Tensor | None) -> Tensor:
        ctx.layer, ctx.parameters = layer, (weight_DF, bias_D)
        ctx.save_for_backward(x_BTF, weight_DF)
        (y_ND,) = kept(lambda: _Row.output(layer, x_BTF))
        return y_ND if layer.sequence else y_ND.view(*x_BTF.shape[:-1], -1)

    @staticmethod
    def output(layer: RowLinear, x_BTF: Tensor) -> list[Tensor]:
        y_ND, travelling = layer.sum(layer.addend(x_BTF))
        travelling.wait()
        return [y_ND]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        layer, (x_BTF, weight_DF) = ctx.layer, ctx.saved_tensors
        x_MF, own_ND = _line(x_BTF), _line(gradient)
        all_MD, arriving = layer.gather(own_ND)
        dx_MF = None
        own, others = layer.runs(x_MF.size(0), own_ND.size(0))
        if ctx.needs_input_grad[1]:
            dx_MF = torch.empty_like(x_MF)
            torch.mm(own_ND[: own.stop - own.start], weight_DF, out=dx_MF[own])
        arriving.wait()
        if dx_MF is not None:
            for run in others:
                torch.mm(all_MD[run], weight_DF, out=dx_MF[run])
        weight, bias = ctx.parameters
        dweight = _weight_gradient(layer, weight, all_MD[: x_MF.size(0)], x_MF)
        return None, None if dx_MF is None else dx_MF.view(x_BTF.shape), dweight, _bias_gradient(layer, bias, own_ND)


def _line(x: Tensor) -> Tensor:
    return x.reshape(-1, x.size(-1))


def _multiply(x_MD: Tensor, weight_FD: Tensor, bias_F: Tensor | None, out_MF: Tensor) -> None:
    if bias_F is None:
        torch.mm(x_MD, weight_FD.t(), out=out_MF)
    else:
        torch.addmm(bias_F, x_MD, weight_FD.t(), out=out_MF)


def _weight_gradient(layer: SharedLayer, weight: nn.Parameter, gradient_MF: Tensor, x_MD: Tensor) -> Tensor | None:
    if not weight.requires_grad:
        return None
    return deliver(layer.queue, weight, lambda: gradient_MF.t() @ x_MD)


def _bias_gradient(layer: SharedLayer, bias: nn.Parameter | None, gradient_MF: Tensor) -> Tensor | None:
    if bias is None or not bias.requires_grad:
        return None
    return deliver(layer.queue, bias, lambda: gradient_MF.sum(0))
