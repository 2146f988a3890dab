"""Cases (`op_cases.py`) of ops that update tensors in place or pass over flat ones. The results are what was updated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from op_cases import Call, Case, Maker, size
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from dist_train.ops import optim, quantise
from dist_train.ops.reduce import accumulate_, sum_of_squares
from dist_train.optim.blocks import AdamW8bit, dequantize, quantize
from dist_train.zero.protocol import FlatSegment

BLOCK, KEPT = 256, 100  # elements that share a scale; top-k takes one element of so many
ADAM: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
DECAY, MOMENTUM, STEP = 0.1, 0.9, 3.0


def moments(m: Maker, numel: int) -> tuple[Tensor, ...]:
    """Master, gradient, and two moments; the gradient in the case's dtype, all else in fp32."""
    fp32 = torch.float32
    second = m.normal(numel, dtype=fp32).square_().mul_(0.01)
    return m.normal(numel, dtype=fp32), m.normal(numel), m.normal(numel, dtype=fp32) * 0.1, second


def weight_copy(m: Maker, master: Tensor) -> tuple[Tensor, ...]:
    """The 16-bit weights beside an fp32 master, where the case's dtype has 16 bits."""
    return () if m.dtype == torch.float32 else (torch.zeros_like(master, dtype=m.dtype),)


def stepping(m: Maker, function: Callable[..., None], count: int, fused: bool, **options: Any) -> Call:
    """One of dist_train's optimizers over a run of (master, gradient, `count` moments, copy?)."""
    scale, found = m.number(1.0), m.number(0.0)
    step = m.number(STEP)

    def call(master: Tensor, grad: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        run = optim.Run(master, grad, rest[:count], step, DECAY, *rest[count:])
        function([run], grad_scale=scale, found_inf=found, fused=fused, **options)
        return master, *rest

    return call


def copying(function: Callable[..., None], count: int) -> Call:
    """An update of fp32 tensors in torch, which casts the gradient before and the weights after."""

    def call(master: Tensor, grad: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        function(master, grad.to(master.dtype), *rest[:count])
        for copy in rest[count:]:
            copy.copy_(master)
        return master, *rest

    return call


def adamw(m: Maker, numel: int) -> Case:
    master, grad, first, second = moments(m, numel)
    inputs = master, grad, first, second, *weight_copy(m, master)
    before = m.number(STEP - 1)

    def foreach(master: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> None:
        torch_adamw(
            *([each] for each in (master, grad, first, second)),
            [],
            [before.clone()],
            foreach=True,
            amsgrad=False,
            maximize=False,
            weight_decay=DECAY,
            **ADAM,
        )

    def formula(master: Tensor, grad: Tensor, first: Tensor, second: Tensor) -> None:
        first.lerp_(grad, 1 - ADAM["beta1"])
        second.lerp_(grad * grad, 1 - ADAM["beta2"])
        lr, corrections = ADAM["lr"], [1 - ADAM[beta] ** STEP for beta in ("beta1", "beta2")]
        master.mul_(1 - lr * DECAY).sub_(lr / corrections[0] * first / ((second / corrections[1]).sqrt() + ADAM["eps"]))

    calls = {
        "ours": stepping(m, optim.adam_, 2, True, decoupled=True, **ADAM),
        "eager": copying(foreach, 2),
        "fused": stepping(m, optim.adam_, 2, False, decoupled=True, **ADAM),
    }
    calls |= {"compile": m.others.compile(copying(formula, 2))} if m.others.compile else {}
    if m.others.deepspeed and m.dtype == torch.float32:
        theirs = torch.nn.Parameter(master)
        kernel = m.others.deepspeed(
            [theirs], lr=ADAM["lr"], betas=(ADAM["beta1"], ADAM["beta2"]), eps=ADAM["eps"], weight_decay=DECAY
        )

        def deepspeed(master: Tensor, grad: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
            theirs.grad = grad
            kernel.step()
            return master, *rest

        calls["deepspeed"] = deepspeed
    return Case(inputs, calls, update_traffic(inputs, 2), calls["fused"])


def lamb(m: Maker, numel: int) -> Case:
    master, grad, first, second = moments(m, numel)
    inputs = master, grad, first, second, *weight_copy(m, master)
    made = {name: stepping(m, optim.lamb_, 2, name == "ours", **ADAM) for name in ("ours", "eager")}
    again = size((master, first, second))  # read once more when the norms are known
    return Case(inputs, made, update_traffic(inputs, 2) + again, made["eager"])


def sgd(m: Maker, numel: int) -> Case:
    master, grad, momentum, _ = moments(m, numel)
    inputs = master, grad, momentum, *weight_copy(m, master)

    def foreach(master: Tensor, grad: Tensor, momentum: Tensor) -> None:
        lists = ([each] for each in (master, grad, momentum))
        options: dict[str, Any] = {"dampening": 0.0, "nesterov": False, "maximize": False, "foreach": True}
        torch_sgd(*lists, weight_decay=DECAY, momentum=MOMENTUM, lr=ADAM["lr"], **options)

    def formula(master: Tensor, grad: Tensor, momentum: Tensor) -> None:
        momentum.mul_(MOMENTUM).add_(grad + DECAY * master)
        master.sub_(ADAM["lr"] * momentum)

    options = {"lr": ADAM["lr"], "momentum": MOMENTUM}
    calls = {"ours": stepping(m, optim.sgd_, 1, True, **options), "eager": copying(foreach, 1)}
    calls["fused"] = stepping(m, optim.sgd_, 1, False, **options)
    calls |= {"compile": m.others.compile(copying(formula, 1))} if m.others.compile else {}
    return Case(inputs, calls, update_traffic(inputs, 1), calls["fused"])


def adamw8bit(m: Maker, numel: int) -> Case:
    numel = numel // BLOCK * BLOCK
    master, grad, first, second = moments(m, numel)
    step = m.number(STEP)
    codes = [quantize(first, torch.int8, step), quantize(second, torch.uint8, step)]
    inputs = master, grad, codes[0][0], codes[1][0], codes[0][1], codes[1][1]
    scale, found = m.number(1.0), m.number(0.0)

    def stepped(fused: bool) -> Call:
        recipe = AdamW8bit(ADAM["lr"], ADAM["beta1"], ADAM["beta2"], ADAM["eps"], DECAY, fused=fused)
        bound = recipe.bind([FlatSegment("decay", master[:BLOCK], grad[:BLOCK], [])])

        def call(master: Tensor, grad: Tensor, *coded: Tensor) -> tuple[Tensor, ...]:
            bound._launch([optim.Run(master, grad, coded, step, DECAY)], ADAM["lr"], scale, found)
            return master, *coded

        return call

    def values(master: Tensor, first: Tensor, second: Tensor, *scales: Tensor) -> tuple[Tensor, ...]:
        return master, dequantize(first, scales[0]), dequantize(second, scales[1])

    calls = {"ours": stepped(True), "eager": stepped(False)}
    traffic = 2 * size(inputs) - size((grad,))
    # An fp32 rounding moves the dice of a code, and so may choose the next one.
    return Case(inputs, calls, traffic, calls["eager"], (2e-6, 1 / 8, 1 / 16), values)


def norm(m: Maker, numel: int) -> Case:
    """The norm in fp32 as torch takes it; ours is summed in fp64."""
    inputs = (m.normal(numel),)
    eager = lambda x: (torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)),)
    calls: dict[str, Call] = {"ours": lambda x: (sum_of_squares([x]).sqrt().float(),), "eager": eager}
    calls |= {"compile": m.others.compile(eager)} if m.others.compile else {}
    return Case(inputs, calls, size(inputs), eager)


def accumulate(m: Maker, numel: int) -> Case:
    """Gradients of the case's dtype into sums in fp32."""
    inputs = m.normal(numel, dtype=torch.float32), m.normal(numel)

    def ours(total: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        accumulate_([total], [x])
        return (total,)

    eager = lambda total, x: (total.add_(x),)
    calls: dict[str, Call] = {"ours": ours, "eager": eager}
    calls |= {"compile": m.others.compile(eager)} if m.others.compile else {}
    return Case(inputs, calls, 2 * size(inputs[:1]) + size(inputs[1:]), eager)


def int8(m: Maker, rows: int, columns: int) -> Case:
    """Encode, and decode what that made."""
    inputs = m.normal(rows, columns), m.normal(rows, columns)

    def coded(fused: bool) -> Call:
        def call(x: Tensor, out: Tensor) -> tuple[Tensor, ...]:
            bytes_ = quantise.int8_encode(x, BLOCK, fused)
            quantise.int8_decode_(bytes_, out, BLOCK, fused=fused)
            return bytes_, out

        return call

    calls = {"ours": coded(True), "eager": coded(False)}
    code = rows * (columns + 4 * -(-columns // BLOCK))
    return Case(inputs, calls, size(inputs) + 2 * code, calls["eager"], (0.0, 0.0))


def top_k(m: Maker, rows: int, columns: int) -> Case:
    """One in a hundred is taken out of a fresh copy, always of fp32 rows."""
    source = m.normal(rows, columns, dtype=torch.float32)
    count = -(-columns // KEPT)

    def taken(fused: bool) -> Call:
        def call(rows: Tensor, source: Tensor) -> tuple[Tensor, ...]:
            rows.copy_(source)
            return quantise.take_largest_(rows, count, fused), rows

        return call

    def eager(rows: Tensor, source: Tensor) -> tuple[Tensor, ...]:
        rows.copy_(source)
        places = rows.abs().topk(count, sorted=False).indices
        values = rows.gather(1, places)
        return values, places, rows.scatter_(1, places, 0.0)

    return Case((torch.empty_like(source), source), {"ours": taken(True), "eager": eager}, None, taken(False), (0.0, 0.0))


def update_traffic(inputs: tuple[Tensor, ...], count: int) -> int:
    """Of an update of (master, gradient, `count` moments, copies): the gradient is read, copies are written, the rest is both."""
    return 2 * size(inputs[: 2 + count]) - size(inputs[1:2]) + size(inputs[2 + count :])


UPDATES: dict[str, Callable[..., Case]] = {
    "adamw": adamw,
    "adamw8bit": adamw8bit,
    "lamb": lamb,
    "sgd": sgd,
    "norm": norm,
    "accumulate": accumulate,
    "int8": int8,
    "top_k": top_k,
}
