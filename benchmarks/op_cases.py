"""Fused ops as cases: their inputs, who computes them (ours, torch, others), and the bytes that nobody can do without.

A case is made for a size, a dtype and a device, so the same ones are timed (`ops.py`) and checked on a card (`device_ops.py`).
Here are those with a forward and a backward; `op_updates.py` has those that update in place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_train.ops.cross_entropy import cross_entropy_sum
from dist_train.ops.dropout import dropout_add, stream
from dist_train.ops.gelu import geglu, gelu
from dist_train.ops.layer_norm import add_layer_norm, layer_norm
from dist_train.ops.linear_cross_entropy import linear_cross_entropy_sum
from dist_train.ops.rms_norm import add_rms_norm, rms_norm
from dist_train.ops.rotary import rotary_pair, rotary_table
from dist_train.ops.swiglu import swiglu

Call = Callable[..., tuple[Tensor, ...]]
EPS, DROPPED = 1e-5, 0.1


@dataclass(frozen=True)
class Case:
    inputs: tuple[Tensor, ...]
    calls: dict[str, Call]  # of the inputs: "ours", "eager" (torch's own, as a user would write it) and whoever else is there
    traffic: int | None  # bytes read and written by one that keeps nothing in a cache between passes; None: bound by compute
    reference: Call  # what ours must compute: it takes fp64 too, unless `apart` says how far ours may be from it
    apart: tuple[float, ...] | None = None  # for each result: the largest relative difference from the reference's; 0: none
    values: Call = lambda *results: results  # what is compared of the results


@dataclass(frozen=True)
class Others:
    """Who takes part beside ours and torch: torch.compile, Liger's functions, and a maker of DeepSpeed's AdamW for CPUs."""

    compile: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    liger: Any = None
    deepspeed: Callable[..., Any] | None = None


@dataclass(frozen=True)
class Maker:
    """Draws what a case needs."""

    dtype: torch.dtype
    device: torch.device
    others: Others = field(default_factory=Others)
    offset: int = 0  # elements by which tensors are off their alignment

    def normal(self, *shape: int, dtype: torch.dtype | None = None, leaf: bool = False) -> Tensor:
        flat = torch.randn(torch.Size(shape).numel() + self.offset, device=self.device).to(dtype or self.dtype)
        return flat[self.offset :].view(shape).requires_grad_(leaf)

    def labels(self, count: int, classes: int) -> Tensor:
        labels = torch.randint(classes, (count,), device=self.device)
        labels[::7] = -100
        return labels

    def number(self, value: float) -> Tensor:
        return torch.tensor(value, device=self.device)

    def both_ways(
        self,
        ours: Callable[..., Any],
        eager: Callable[..., Any],
        inputs: tuple[Tensor, ...],
        leaves: int,
        passes: float | None,
        liger: Callable[..., Any] | None = None,
        reference: Callable[..., Any] | None = None,
    ) -> Case:
        """Forward and backward of a function of `inputs`, of which the first `leaves` want gradients and the last are those of
        its results. `passes`: times that a tensor of the first one's size is read or written."""
        calls = {"ours": ours, "eager": eager}
        calls |= {"compile": self.others.compile(eager)} if self.others.compile else {}
        calls |= {"liger": liger} if liger and self.others.liger else {}

        def differentiated(function: Callable[..., Any]) -> Call:
            def call(*tensors: Tensor) -> tuple[Tensor, ...]:
                results = function(*tensors)
                results = results if isinstance(results, tuple) else (results,)
                gradients = torch.autograd.grad(results, tensors[:leaves], tensors[-len(results) :])
                return *(result.detach() for result in results), *gradients

            return call

        traffic = None if passes is None else int(passes * inputs[0].numel() * inputs[0].element_size())
        made = {name: differentiated(call) for name, call in calls.items()}
        return Case(inputs, made, traffic, differentiated(reference) if reference else made["eager"])


def size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def clones(case: Case, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """The inputs again, for one who changes them; floats in another dtype where one is given."""
    made = []
    for tensor in case.inputs:
        fresh = tensor.detach().to(dtype) if dtype and tensor.is_floating_point() else tensor.detach()
        # A clone of what is off its alignment would be aligned.
        memory = torch.empty(fresh.numel() + 1, dtype=fresh.dtype, device=fresh.device)
        offset = tensor.storage_offset() % 2 if tensor.is_contiguous() else 0
        made.append(memory[offset : offset + fresh.numel()].view(fresh.shape).copy_(fresh).requires_grad_(tensor.requires_grad))
    return tuple(made)


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms(m: Maker, rows: int, columns: int) -> Case:
    inputs = m.normal(rows, columns, leaf=True), m.normal(columns, leaf=True), m.normal(rows, columns)
    eager = lambda x, w, _: F.rms_norm(x, w.shape, w, EPS)
    liger = lambda x, w, _: m.others.liger.liger_rms_norm(x, w, EPS, in_place=False)
    return m.both_ways(lambda x, w, _: rms_norm(x, w, EPS), eager, inputs, 2, 5, liger)


def add_rms(m: Maker, rows: int, columns: int) -> Case:
    x, residual = m.normal(rows, columns, leaf=True), m.normal(rows, columns, leaf=True)
    inputs = x, residual, m.normal(columns, leaf=True), m.normal(rows, columns), m.normal(rows, columns)
    ours = lambda x, r, w, *_: add_rms_norm(x, r, w, EPS)
    liger = lambda x, r, w, *_: m.others.liger.liger_fused_add_rms_norm(x, r, w, EPS, in_place=False)
    return m.both_ways(ours, lambda x, r, w, *_: (F.rms_norm(x + r, w.shape, w, EPS), x + r), inputs, 3, 8, liger)


def layer(m: Maker, rows: int, columns: int) -> Case:
    inputs = *(m.normal(*shape, leaf=True) for shape in ((rows, columns), (columns,), (columns,))), m.normal(rows, columns)
    eager = lambda x, w, b, _: F.layer_norm(x, w.shape, w, b, EPS)
    liger = lambda x, w, b, _: m.others.liger.liger_layer_norm(x, w, b, EPS)
    return m.both_ways(lambda x, w, b, _: layer_norm(x, w, b, EPS), eager, inputs, 3, 5, liger)


def add_layer(m: Maker, rows: int, columns: int) -> Case:
    leaves = (m.normal(*shape, leaf=True) for shape in ((rows, columns), (rows, columns), (columns,), (columns,)))
    inputs = *leaves, m.normal(rows, columns), m.normal(rows, columns)

    def eager(x: Tensor, r: Tensor, w: Tensor, b: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
        total = x + r
        return F.layer_norm(total, w.shape, w, b, EPS), total

    return m.both_ways(lambda x, r, w, b, *_: add_layer_norm(x, r, w, b, EPS), eager, inputs, 4, 8)


def gated(ours: Callable[..., Tensor], activation: Callable[[Tensor], Tensor], liger: str) -> Callable[..., Case]:
    def make(m: Maker, rows: int, columns: int) -> Case:
        gate, up = m.normal(rows, columns, leaf=True), m.normal(rows, columns, leaf=True)
        theirs = lambda gate, up, _: getattr(m.others.liger, liger)(gate, up)
        inputs = gate, up, m.normal(rows, columns)
        return m.both_ways(lambda g, u, _: ours(g, u), lambda g, u, _: activation(g) * u, inputs, 2, 8, theirs)

    return make


def tanh_gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def plain_gelu(m: Maker, rows: int, columns: int) -> Case:
    inputs = m.normal(rows, columns, leaf=True), m.normal(rows, columns)
    return m.both_ways(lambda x, _: gelu(x), lambda x, _: tanh_gelu(x), inputs, 1, 5)


def rotary(m: Maker, rows: int, tokens: int, heads: int, width: int) -> Case:
    """Queries, and a quarter as many heads of keys."""
    shapes = [(rows, tokens, count, width) for count in (heads, max(1, heads // 4))]
    tables = rotary_table(torch.arange(tokens, device=m.device)[None], width, 1e4)
    q, k = (m.normal(*shape, leaf=True) for shape in shapes)
    inputs = q, k, *tables, *(m.normal(*shape) for shape in shapes)

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return (x * cos + x.roll(width // 2, dims=-1) * sin).to(x.dtype)

    def liger(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *_: Tensor) -> tuple[Tensor, ...]:  # turns in place, over and over
        turned = m.others.liger.liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos[:, :, 0], sin[:, :, 0])
        return tuple(x.transpose(1, 2) for x in turned)

    ours = lambda q, k, cos, sin, *_: rotary_pair(q, k, cos, sin)
    eager = lambda q, k, cos, sin, *_: (turned(q, cos, sin), turned(k, cos, sin))
    return m.both_ways(ours, eager, inputs, 2, 4 * (1 + k.numel() / q.numel()), liger)


def cross_entropy(m: Maker, tokens: int, vocabulary: int) -> Case:
    logits = m.normal(tokens, vocabulary, leaf=True)
    labels, upstream = m.labels(tokens, vocabulary), m.number(1 / tokens)
    own = logits.detach().clone().requires_grad_() if m.others.liger else None

    def eager(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:
        return F.cross_entropy(wide(logits), labels, reduction="sum")

    def liger(logits: Tensor, labels: Tensor, _: Tensor) -> Tensor:  # writes its gradient over what it is given
        return m.others.liger.liger_cross_entropy(logits, labels, reduction="sum")

    case = m.both_ways(
        lambda x, y, _: cross_entropy_sum(x, y)[0], eager, (logits, labels, upstream), 1, 3, liger if own is not None else None
    )
    if own is not None:
        theirs = case.calls["liger"]
        case.calls["liger"] = lambda _, labels, upstream: theirs(own, labels, upstream)
    return case


def linear_cross_entropy(m: Maker, tokens: int, width: int, vocabulary: int) -> Case:
    hidden, weight = m.normal(tokens, width, leaf=True), (m.normal(vocabulary, width) / width**0.5).requires_grad_()
    inputs = hidden, weight, m.labels(tokens, vocabulary), m.number(1 / tokens)

    def eager(hidden: Tensor, weight: Tensor, labels: Tensor, _: Tensor) -> Tensor:
        return F.cross_entropy(wide(hidden @ weight.t()), labels, reduction="sum")

    liger = lambda h, w, y, _: m.others.liger.liger_fused_linear_cross_entropy(h, w, y, reduction="sum")
    return m.both_ways(lambda h, w, y, _: linear_cross_entropy_sum(h, w, y)[0], eager, inputs, 2, None, liger)


def dropout(m: Maker, rows: int, columns: int) -> Case:
    inputs = m.normal(rows, columns, leaf=True), m.normal(rows, columns, leaf=True), m.normal(rows, columns)
    place = stream(5, 0, m.device)
    ours = lambda x, r, _: dropout_add(x, r, place, DROPPED)
    masked = lambda x, r, _: dropout_add(x, r, place, DROPPED, fused=False)
    return m.both_ways(ours, lambda x, r, _: r + F.dropout(x, DROPPED), inputs, 2, 5, reference=masked)


LAYERS: dict[str, Callable[..., Case]] = {
    "rms_norm": rms,
    "add_rms_norm": add_rms,
    "layer_norm": layer,
    "add_layer_norm": add_layer,
    "swiglu": gated(swiglu, F.silu, "liger_swiglu"),
    "geglu": gated(geglu, tanh_gelu, "liger_geglu"),
    "gelu": plain_gelu,
    "rotary": rotary,
    "dropout_add": dropout,
    "cross_entropy": cross_entropy,
    "cross_entropy_50k": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
}
