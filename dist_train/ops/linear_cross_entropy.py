"""The last linear layer and its cross entropy, a chunk of tokens at a time: the logits of all tokens never exist.

Shapes: B rows, T tokens, D width, V vocabulary, N = B·T tokens in a line, C tokens in a chunk.

For a sum or a mean all tokens have the same upstream gradient, so forward makes the gradients of hidden, weight and bias
beside the loss, from logits whose memory they take, and backward multiplies them by it. Losses per token may each have
their own, and the gradient of the weight mixes tokens: there forward keeps one fp32 number per token, and backward makes
the logits again and weighs each row of their gradient.

Gradients of weight and bias are summed over chunks in fp32 (fp64 for fp64), whatever the dtype of the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dist_train.ops.cross_entropy import IGNORED, row_gradient, row_terms
from dist_train.ops.native import product_dtype

# Before 2.13 (seen on 2.11) torch's compiler drops what an autograd function's forward makes for its backward, without a word.
_COMPILER_DROPS = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)
_CPU_CHUNK = 128  # tokens: enough for the matrix products to be fast
_DEVICE_CHUNK_ELEMENTS = 1 << 27


def linear_cross_entropy_sum(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    labels_BT: Tensor,
    z_loss: float = 0.0,
    bias_V: Tensor | None = None,
    fused: bool = True,
    chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """`cross_entropy_sum(hidden @ weight.T + bias, labels, z_loss)`: (objective, cross entropy), sums over live tokens in fp32.

    Products are of numbers in the dtype of hidden, or in autocast's where that is on; weight and bias are cast to it. A CPU
    that does not multiply that dtype itself gets the same numbers in fp32, so there the logits are not rounded to 16 bits.
    `chunk` is the number of tokens whose logits exist at a time (0: chosen from the shapes). The gradient cannot be
    differentiated again.
    """
    return linear_cross_entropy(hidden_BTD, weight_VD, labels_BT, z_loss, bias_V, "sum", fused, chunk)


def linear_cross_entropy(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    labels_BT: Tensor,
    z_loss: float = 0.0,
    bias_V: Tensor | None = None,
    reduction: str = "mean",
    fused: bool = True,
    chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """As `linear_cross_entropy_sum`. `reduction`: "sum", "mean" over the live tokens (nan where there are none), or "none".

    "none" gives both values per token, in the shape of the labels, 0 where the label is -100.
    """
    if reduction not in ("none", "sum", "mean"):
        raise ValueError(f"reduction={reduction!r}: choose none, sum or mean.")
    if weight_VD.dim() != 2 or hidden_BTD.size(-1) != weight_VD.size(1) or hidden_BTD.shape[:-1] != labels_BT.shape:
        raise ValueError(
            f"hidden {tuple(hidden_BTD.shape)}, weight {tuple(weight_VD.shape)} and labels {tuple(labels_BT.shape)} do not fit: "
            "they must be (…, width), (vocabulary, width) and (…)."
        )
    hidden_ND, labels_N = hidden_BTD.flatten(0, -2), labels_BT.flatten()
    options = (
        z_loss,
        fused,
        chunk or chunk_tokens(hidden_ND.size(0), weight_VD.size(0), hidden_ND.device),
        torch.is_grad_enabled(),
    )
    if reduction == "none":
        objective_N, entropy_N = _PerToken.apply(hidden_ND, weight_VD, bias_V, labels_N, *options)
        return objective_N.view_as(labels_BT), entropy_N.view_as(labels_BT)
    if _COMPILER_DROPS and torch.compiler.is_compiling():
        objective, entropy = (loss_N.sum() for loss_N in _PerToken.apply(hidden_ND, weight_VD, bias_V, labels_N, *options))
    else:
        objective, entropy = _Sum.apply(hidden_ND, weight_VD, bias_V, labels_N, *options)
    if reduction == "sum":
        return objective, entropy
    live = (labels_N != IGNORED).sum()
    return objective / live, entropy / live


def chunk_tokens(tokens: int, vocabulary: int, device: torch.device) -> int:
    """Of how many out of so many tokens the logits should exist at a time."""
    if device.type == "cpu":
        return _CPU_CHUNK
    return max(_CPU_CHUNK, min(_DEVICE_CHUNK_ELEMENTS // vocabulary, tokens // 8))


def add_weight_gradient_(sum_VD: Tensor, dlogits_CV: Tensor, hidden_CD: Tensor) -> None:
    """Add what a chunk gives to the gradient of the weight, in the dtype of the sum."""
    if dlogits_CV.dtype == sum_VD.dtype:
        sum_VD.addmm_(dlogits_CV.t(), hidden_CD)
    elif dlogits_CV.is_cuda:
        sum_VD.add_(torch.mm(dlogits_CV.t(), hidden_CD, out_dtype=sum_VD.dtype))
    else:
        sum_VD.add_(dlogits_CV.t() @ hidden_CD)


def check_labels(labels_N: Tensor, vocabulary: int) -> None:
    """A wrong label is an error on a CPU; on a device, where to ask would mean to wait, an assertion of the device."""
    fine = ((labels_N == IGNORED) | ((labels_N >= 0) & (labels_N < vocabulary))).all()
    torch._assert_async(fine, f"a label is out of bounds for a vocabulary of {vocabulary}; one that does not count is {IGNORED}")


class _Head:
    """The layer in the dtype of its products, and the sums of its gradients.

    `given`: the dtype to which hidden, weight and bias are rounded; `dtype`: in which they are multiplied; `wide`: of sums.
    """

    def __init__(self, hidden_ND: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> None:
        device = hidden_ND.device.type
        autocast = torch.is_autocast_enabled(device) and hidden_ND.dtype != torch.float64
        self.given = torch.get_autocast_dtype(device) if autocast else hidden_ND.dtype
        self.wide = torch.promote_types(self.given, torch.float32)
        self.dtype = product_dtype(self.given, hidden_ND.device)
        self.hidden_ND, self.weight_VD = self._cast(hidden_ND), self._cast(weight_VD)
        self.bias_V = None if bias_V is None else self._cast(bias_V)

    def _cast(self, x: Tensor) -> Tensor:
        return x.to(self.given).to(self.dtype)

    def chunks(self, tokens: int) -> Iterator[tuple[slice, Tensor]]:
        """(tokens, logits_CV): all chunks have the same memory, and whoever takes one may write over it."""
        count = self.hidden_ND.size(0)
        memory_CV = self.hidden_ND.new_empty(min(tokens, count), self.weight_VD.size(0))
        for start in range(0, count, tokens):
            hidden_CD = self.hidden_ND[start : start + tokens]
            logits_CV = memory_CV[: hidden_CD.size(0)]
            if self.bias_V is None:
                torch.mm(hidden_CD, self.weight_VD.t(), out=logits_CV)
            else:
                torch.addmm(self.bias_V, hidden_CD, self.weight_VD.t(), out=logits_CV)
            yield slice(start, start + hidden_CD.size(0)), logits_CV

    def prepare(self, wants: tuple[bool, ...]) -> None:
        wants_hidden, wants_weight, wants_bias = wants[:3]
        self.dhidden_ND = torch.empty_like(self.hidden_ND) if wants_hidden else None
        self.dweight_VD = torch.zeros_like(self.weight_VD, dtype=self.wide) if wants_weight else None
        self.dbias_V = self.weight_VD.new_zeros(self.weight_VD.size(0), dtype=self.wide) if wants_bias else None

    def add(self, rows: slice, dlogits_CV: Tensor) -> None:
        if self.dhidden_ND is not None:
            torch.mm(dlogits_CV, self.weight_VD, out=self.dhidden_ND[rows])
        if self.dweight_VD is not None:
            add_weight_gradient_(self.dweight_VD, dlogits_CV, self.hidden_ND[rows])
        if self.dbias_V is not None:
            self.dbias_V.add_(dlogits_CV.sum(0, dtype=self.wide))


def _losses(logits_CV: Tensor, labels_C: Tensor, z_loss: float, fused: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(objective_C, entropy_C, lse_C): the first two 0 where the label is -100."""
    check_labels(labels_C, logits_CV.size(1))
    maximum_C, sum_C, target_C = row_terms(logits_CV, labels_C, 0, fused)
    lse_C = maximum_C + sum_C.log()
    live_C = labels_C != IGNORED
    entropy_C = (lse_C - target_C).where(live_C, 0.0)
    return (entropy_C + z_loss * lse_C.square().where(live_C, 0.0) if z_loss else entropy_C.clone()), entropy_C, lse_C


def _no_autocast(tensor: Tensor) -> Any:
    return torch.autocast(tensor.device.type, enabled=False)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        z_loss: float,
        fused: bool,
        chunk: int,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(hidden_ND, weight_VD, bias_V)
        wants = tuple(grad_enabled and wanted for wanted in ctx.needs_input_grad[:3])
        one = hidden_ND.new_ones((), dtype=head.wide)
        with _no_autocast(hidden_ND):
            head.prepare(wants)
            objective, entropy = torch.zeros_like(one), torch.zeros_like(one)
            for rows, logits_CV in head.chunks(chunk):
                objective_C, entropy_C, lse_C = _losses(logits_CV, labels_N[rows], z_loss, fused)
                objective += objective_C.sum()
                entropy += entropy_C.sum()
                if any(wants):
                    head.add(rows, row_gradient(one, logits_CV, labels_N[rows], lse_C, z_loss, 0, fused, True))
        ctx.dtypes = hidden_ND.dtype, weight_VD.dtype, None if bias_V is None else bias_V.dtype
        ctx.save_for_backward(head.dhidden_ND, head.dweight_VD, head.dbias_V)
        ctx.mark_non_differentiable(entropy)
        return objective, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Any, ...]:
        gradients = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        scaled = (None if gradient is None else (gradient * upstream).to(dtype) for gradient, dtype in gradients)
        return *scaled, None, None, None, None, None


class _PerToken(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_N: Tensor,
        z_loss: float,
        fused: bool,
        chunk: int,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor]:
        head = _Head(hidden_ND, weight_VD, bias_V)
        objective_N, entropy_N, lse_N = (hidden_ND.new_empty(labels_N.numel(), dtype=head.wide) for _ in range(3))
        with _no_autocast(hidden_ND):
            for rows, logits_CV in head.chunks(chunk):
                objective_N[rows], entropy_N[rows], lse_N[rows] = _losses(logits_CV, labels_N[rows], z_loss, fused)
        ctx.save_for_backward(hidden_ND, weight_VD, bias_V, labels_N, lse_N)
        ctx.options, ctx.dtype = (z_loss, fused, chunk), head.given
        ctx.mark_non_differentiable(entropy_N)
        return objective_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream_N: Tensor, _: Tensor) -> tuple[Any, ...]:
        hidden_ND, weight_VD, bias_V, labels_N, lse_N = ctx.saved_tensors
        z_loss, fused, chunk = ctx.options
        with _no_autocast(hidden_ND):
            head = _Head(hidden_ND.to(ctx.dtype), weight_VD, bias_V)  # in the dtype of forward, whatever holds now
            head.prepare(ctx.needs_input_grad[:3])
            for rows, logits_CV in head.chunks(chunk):
                head.add(rows, row_gradient(upstream_N[rows], logits_CV, labels_N[rows], lse_N[rows], z_loss, 0, fused, True))
        gradients = (head.dhidden_ND, head.dweight_VD, head.dbias_V)
        inputs = (hidden_ND, weight_VD, bias_V)
        cast = (g if g is None or x is None else g.to(x.dtype) for g, x in zip(gradients, inputs, strict=True))
        return *cast, None, None, None, None, None
