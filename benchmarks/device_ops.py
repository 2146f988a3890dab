"""Section ops: every fused kernel on one card, right and fast.

First each op is held to fp64, at odd sizes, off its alignment and large: its error must be at most twice torch's own in the same
dtype. So is every attention backend that this machine has. Then everything is timed by the code of `ops.py`, with torch.compile
and Liger beside ours. What the figures are aimed at is under "targets", true or false or null where it could not be
measured; a target that is missed fails nothing, an error does.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import ops
import torch
from op_cases import Case, Maker, clones
from torch import Tensor

from dist_train.config.compose import ConfigError
from dist_train.ops import library
from dist_train.ops.attention import Documents, api, attention, document_mask
from dist_train.ops.attention.select import BACKENDS, Request, this_machine
from dist_train.ops.attention.select import choose as choose_attention

SECONDS = 200  # after which nothing more is timed: the whole section, with a build before it, takes less than five minutes
ROUNDS = 7
WIDE = 4096  # columns from which on an op that memory bounds should reach the bandwidth of a copy
BANDWIDTH, NOISE, MEMORY = 0.9, 1.02, 1 / 8
WIDTH = 64  # of an attention head
FLOOR = 1e-6  # relative: errors below it are nobody's
DTYPES = ("fp32", "bf16", "fp16")
FLAT_SIZES = ((1,), (53,), (4097,), (1_000_003,))
# (The gradient of the norm of a single number is nothing but what cancels; three are the fewest here.)
ROW_SIZES = ((1, 3), (3, 53), (7, 1000), (33, 4097), (2, 20011))
CHECKED: dict[str, tuple[tuple[int, ...], ...]] = {
    **dict.fromkeys(ops.LAYERS, ROW_SIZES),
    **dict.fromkeys(ops.UPDATES, FLAT_SIZES),
    "rotary": ((1, 3, 5, 2), (2, 53, 4, 64), (1, 1000, 3, 10)),
    "linear_cross_entropy": ((3, 8, 53), (300, 24, 4097)),
    "adamw8bit": ((256,), (4096,), (1_000_192,)),
    "int8": ROW_SIZES,
    "top_k": ROW_SIZES,
}
LARGE = {"cuda": {True: (4096, 8192), False: (1 << 26,)}, "cpu": {True: (64, 1024), False: (1 << 16,)}}  # of rows, flat
LARGE_OF_THEIR_OWN = {"rotary": (2, 512, 8, 128), "linear_cross_entropy": (512, 64, 8192), "adamw8bit": (1 << 20,)}
SMALL = {name: tuple(min(length, 64) for length in sizes) for name, sizes in ops.SIZES["cpu"].items()} | {"adamw8bit": (4096,)}


def run(device: torch.device, out: Path) -> dict[str, Any]:
    started, cuda = time.monotonic(), device.type == "cuda"
    torch.backends.cuda.matmul.allow_tf32 = False
    checks: dict[str, bool | None] = {"the library has kernels for this device": library.has_cuda if cuda else library.loaded}
    errors, failures = correctness(device), {}
    for name in ops.CASES:
        mine = {what: ratio for what, ratio in errors.items() if what.startswith(f"{name} ")}
        failures |= {what: ratio for what, ratio in mine.items() if not ratio <= 1}
        checks[f"{name}: at most twice torch's error against fp64"] = all(ratio <= 1 for ratio in mine.values())
    backends = attention_errors(device)
    for name, found in backends.items():
        checks[f"attention by {name}: at most twice the error of the formula in the same dtype"] = (
            None if isinstance(found, str) else found <= 1
        )
    print(f"checked after {time.monotonic() - started:.0f} s", flush=True)
    for what, ratio in failures.items():
        print(f"{what}: {ratio:.3g} times the error that is allowed", flush=True)
    timed = times(device, started + SECONDS)
    ops.show(timed)
    figures = {"errors": errors, "attention": backends, "checked_seconds": time.monotonic() - started} | timed
    figures["targets"] = targets(timed)
    for what, met in figures["targets"].items():
        print(f"{'not measured' if met is None else 'reached' if met else 'MISSED':>18}  {what}")
    return figures | {"checks": checks, "seconds": time.monotonic() - started}


# Right


def correctness(device: torch.device) -> dict[str, float]:
    """Largest error of each op, dtype and size, over the one that is allowed."""
    found = {}
    for name, sizes in CHECKED.items():
        large = LARGE_OF_THEIR_OWN.get(name, LARGE[device.type][len(sizes[0]) == 2])
        for dtype in DTYPES:
            maker = Maker(ops.DTYPES[dtype], device)
            for size, offset in ((size, offset) for size in (*sizes, large) for offset in (0, 1)):
                case = ops.make(name, size, dataclasses.replace(maker, offset=offset))
                what = f"{name} {dtype} {'×'.join(map(str, size))}{' unaligned' * offset}"
                found[what] = excess(case)
    return found


def excess(case: Case) -> float:
    """The largest error of any result over the one that is allowed; nan or infinite where a result is not finite."""
    ours, theirs = (case.values(*call(*clones(case))) for call in (case.calls["ours"], case.reference))
    if case.apart is not None:
        return max(apart(*each) for each in zip(ours, theirs, case.apart, strict=True))
    exact = case.reference(*clones(case, torch.float64))
    return max(error_ratio(*each) for each in zip(ours, theirs, exact, strict=True))


def apart(ours: Tensor, theirs: Tensor, limit: float) -> float:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return float("inf")
    if limit == 0:
        return 0.0 if torch.equal(ours, theirs) else float("inf")
    # (Values below the smallest code become it or zero.)
    allowed = limit * (ours.abs().maximum(theirs.abs()) + theirs.abs().max() / 2048) + 2e-7
    return ((ours - theirs).abs() / allowed).max().item()


def error_ratio(ours: Tensor, theirs: Tensor, exact: Tensor) -> float:
    """Twice torch's error is allowed, or where torch happens to be exact half a unit in the last place of the largest value."""
    if ours.dtype != theirs.dtype or ours.shape != exact.shape:
        return float("inf")
    if ours.numel() == 0:
        return 0.0
    largest = exact.abs().max().item()
    mine, others = ((each.double() - exact).abs().max().item() for each in (ours, theirs))
    allowed = 2 * others + max(FLOOR, torch.finfo(ours.dtype).eps / 2) * largest
    return mine / allowed if allowed else mine and float("inf")


def attention_errors(device: torch.device) -> dict[str, float | str]:
    """For each backend the largest error over the one that is allowed, or why this machine does not have it."""
    found: dict[str, float | str] = {}
    machine = this_machine(device)
    for name in BACKENDS:
        alone = dataclasses.replace(machine, missing=(*((n, "not asked") for n in BACKENDS if n != name), *machine.missing))
        ratios, why = [], ""
        for kind in ("causal", "packed"):
            for dtype in (torch.bfloat16, torch.float32):
                try:
                    choose_attention(Request(dtype, WIDTH, kind), alone)
                except ConfigError as refused:
                    why = str(refused)
                    continue
                ratios.append(attention_excess(name, kind, dtype, device))
        found[name] = max(ratios) if ratios else dict(machine.missing).get(name, why)
    return found


def attention_excess(name: str, kind: str, dtype: torch.dtype, device: torch.device) -> float:
    """Forward and backward of one backend, with grouped heads."""
    torch.manual_seed(0)
    rows, tokens = 2, 301
    shapes = [(rows, heads, tokens, WIDTH) for heads in (8, 2, 2, 8)]
    *inputs, grad = (torch.randn(shape, device=device).to(dtype) for shape in shapes)
    numbers = (torch.rand(rows, tokens, device=device) < 0.03).cumsum(1) if kind == "packed" else torch.zeros(rows, tokens)
    mask = document_mask(numbers.to(device))

    def results(function: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        out = function(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        scores = (q @ k.transpose(-1, -2) * WIDTH**-0.5).masked_fill(~mask, float("-inf"))
        return scores.softmax(-1) @ v

    with patch.object(api, "backend_for", lambda *_: name):
        documents = Documents(numbers) if kind == "packed" else None
        ours = results(lambda q, k, v: attention(q, k, v, documents), dtype)
    theirs, exact = results(formula, dtype), results(formula, torch.float64)
    return max(error_ratio(*each) for each in zip(ours, theirs, exact, strict=True))


# Fast


def times(device: torch.device, deadline: float) -> dict[str, Any]:
    """The figures of `ops.py`, as many as there is time for: 16 bits beside torch.compile, then fp32 beside torch alone."""
    cuda = device.type == "cuda"
    sizes = ops.SIZES["cuda"] if cuda else SMALL
    peaks = {"bf16": ops.memory(torch.bfloat16, device, (8192, 4096, 50304))} if cuda else {}
    results, left_out = [], []
    for dtype in ("bf16", "fp32"):
        others = ops.find_others(device.type, compiles=cuda and dtype == "bf16", deepspeed=False)
        for name, size in sizes.items():
            if time.monotonic() > deadline:
                left_out.append(f"{name} {dtype}")
                continue
            maker = Maker(ops.DTYPES[dtype], device, others)
            results.append(ops.compare(name, size, maker, ROUNDS if cuda else 1))
            if cuda:
                torch.cuda.empty_cache()
    threads = torch.get_num_threads()
    timed = {"device": device.type, "threads": threads, "torch": torch.__version__, "ops": results, "memory": peaks}
    return timed | {"left_out": left_out}


def targets(timed: dict[str, Any]) -> dict[str, bool | None]:
    """None where this device or this run does not tell."""
    found: dict[str, bool | None] = {}
    for each in timed["ops"]:
        what, told = f"{each['op']} {each['dtype']}", timed["device"] == "cuda"
        if each["traffic"] and each["sizes"][-1] >= WIDE:
            reached = ops.of_copy(each)
            found[f"{what}: {BANDWIDTH:.0%} of a copy's bandwidth"] = (
                reached is not None and reached >= BANDWIDTH if told else None
            )
        for who in ("eager", "compile", "liger"):
            ratios = ops.ratios(each, who)
            found[f"{what}: not slower than {who}"] = ratios[1] <= NOISE if ratios and told else None
    peaks = timed["memory"].get("bf16")
    found["linear_cross_entropy: peak of memory at most an eighth of eager's"] = (
        peaks["ours"] <= MEMORY * peaks["eager"] if peaks else None
    )
    return found
