"""Fused ops side by side with torch eager and others: forward and backward, or one update, interleaved round by round.

    python benchmarks/ops.py [--ops rms_norm,adamw,…] [--dtype fp32,bf16] [--rounds 9] [--threads 1]
                             [--compile] [--deepspeed] [--memory] [--device cpu|cuda] [--json figures.json]

In each round all who compute an op take their turn, in an order that rotates, beside a copy of as many bytes as the op cannot do
without; ratios are ours ÷ theirs within a round, as medians with quartiles. torch eager, torch's fused optimizers and on CUDA
Liger (where it is installed) always take part; `--compile` adds torch.compile, `--deepspeed` DeepSpeedCPUAdam, whose first build
takes minutes. `--memory` also measures the peak of memory that linear+cross-entropy in fp32 allocates at a vocabulary of 50k.

Tensors are larger than caches. On a CPU, times are of the wall clock, and malloc keeps its memory as torch does on a card, so
that no time is spent on pages that appear. On CUDA they are the card's own, the second-level cache is flushed before each
call, and the host runs ahead: time to launch is not counted, as it is hidden in a large model.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import importlib.util
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from engines import StopRequest, number, quartiles
from op_cases import LAYERS, Case, Maker, Others
from op_updates import UPDATES

CASES = LAYERS | UPDATES
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ROWS_CPU, ROWS_CUDA, FLAT = (4096, 1024), (16384, 4096), (1 << 25,)
SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "cpu": dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "dropout_add"), ROWS_CPU)
    | dict.fromkeys(("swiglu", "geglu", "gelu"), (2048, 2816))
    | {"rotary": (4, 1024, 16, 64), "cross_entropy": (1024, 8192), "cross_entropy_50k": (256, 50304)}
    | {"linear_cross_entropy": (256, 64, 50304), "adamw": FLAT, "sgd": FLAT, "norm": FLAT, "accumulate": FLAT}
    | {"adamw8bit": (1 << 23,), "lamb": (1 << 24,), "int8": (4, 1 << 22), "top_k": (4, 1 << 20)},
    "cuda": dict.fromkeys(("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm", "dropout_add"), ROWS_CUDA)
    | dict.fromkeys(("swiglu", "geglu", "gelu"), (8192, 14336))
    | {"rotary": (4, 4096, 32, 128), "cross_entropy": (16384, 8192), "cross_entropy_50k": (8192, 50304)}
    | {"linear_cross_entropy": (8192, 4096, 50304), "adamw": (1 << 27,), "sgd": (1 << 27,), "norm": (1 << 28,)}
    | {"accumulate": (1 << 28,), "adamw8bit": (1 << 26,), "lamb": (1 << 26,), "int8": (8, 1 << 24), "top_k": (8, 1 << 22)},
}
MEMORY_SIZE = (4096, 256, 50304)  # tokens, width, vocabulary
TURN_SECONDS, MOST_REPEATS = 0.05, 20  # of one who computes, in one round
SLOW_SECONDS, FEW_ROUNDS = 1.0, 3  # where a call of anyone takes so long, there are so many rounds at most
FLUSH_BYTES, HEAD_START_CYCLES = 1 << 28, 1 << 20
Figures = dict[str, Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=",".join(CASES))
    parser.add_argument("--dtype", default="fp32,bf16", help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="of the CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=SIZES)
    parser.add_argument("--compile", action="store_true", help="torch.compile too; it takes long on a CPU")
    parser.add_argument("--deepspeed", action="store_true", help="DeepSpeedCPUAdam too; its build takes minutes")
    parser.add_argument("--memory", action="store_true", help="peak of memory of linear+cross-entropy")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    arguments = parser.parse_args()
    wrong = [f"--ops {name}: not among {', '.join(CASES)}." for name in arguments.ops.split(",") if name not in CASES]
    wrong += [f"--dtype {name}: not among {', '.join(DTYPES)}." for name in arguments.dtype.split(",") if name not in DTYPES]
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 2
    torch.set_num_threads(arguments.threads)
    keep_memory()
    others = find_others(arguments.device, arguments.compile, arguments.deepspeed)
    device, asked_to_stop = torch.device(arguments.device), StopRequest()
    results: list[Figures] = []
    for name in arguments.ops.split(","):
        for dtype in arguments.dtype.split(","):
            if not asked_to_stop:
                print(f"{name} {dtype}", file=sys.stderr)
                maker = Maker(DTYPES[dtype], device, others)
                results.append(compare(name, SIZES[device.type][name], maker, arguments.rounds))
    figures: Figures = {"device": arguments.device, "threads": arguments.threads, "torch": torch.__version__, "ops": results}
    if arguments.memory:
        figures["memory"] = {"fp32": memory(torch.float32, device)}
    show(figures)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def make(name: str, sizes: tuple[int, ...], maker: Maker) -> Case:
    """The case of that name, the same for the same arguments."""
    torch.manual_seed(0)
    return CASES[name](maker, *sizes)


def find_others(device: str, compiles: bool, deepspeed: bool) -> Others:
    liger = adam = None
    if device == "cuda" and importlib.util.find_spec("liger_kernel") and importlib.util.find_spec("triton"):
        liger = importlib.import_module("liger_kernel.transformers.functional")
    if deepspeed and device == "cpu":
        adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    return Others(functools.partial(torch.compile, fullgraph=True, dynamic=False) if compiles else None, liger, adam)


def keep_memory() -> None:
    """glibc's malloc maps no large blocks of their own and gives nothing back."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        trim_threshold, mmap_max = -1, -4
        mallopt(trim_threshold, -1)
        mallopt(mmap_max, 0)


def compare(name: str, sizes: tuple[int, ...], maker: Maker, rounds: int) -> Figures:
    """All figures of one op at one size: for each who computes it and for the copy, the seconds of a call in each round."""
    case = make(name, sizes, maker)
    turns: dict[str, Callable[[], Any]] = {who: functools.partial(call, *case.inputs) for who, call in case.calls.items()}
    if case.traffic:
        source = torch.ones(case.traffic // 8, dtype=torch.int32, device=maker.device)  # half is read and half is written
        turns["copy"] = functools.partial(torch.empty_like(source).copy_, source)
    clock, repeats, failures = Clock(maker.device), {}, {}
    for who in list(turns):
        try:
            clock.seconds(turns[who], 1)
            once = clock.seconds(turns[who], 1)
            repeats[who] = min(MOST_REPEATS, max(1, round(TURN_SECONDS / once)))
            rounds = min(rounds, FEW_ROUNDS) if once > SLOW_SECONDS else rounds
        except Exception as error:  # another's, or a compiler's, on this device
            if who == "ours":
                raise
            failures[who] = f"{type(error).__name__}: {error}"[:300]
            del turns[who]
    names = list(turns)
    seconds: dict[str, list[float]] = {who: [] for who in names}
    for round_ in range(rounds):
        shift = round_ % len(names)
        for who in names[shift:] + names[:shift]:
            seconds[who].append(clock.seconds(turns[who], repeats[who]))
    torch._dynamo.reset()
    dtype = next(key for key, value in DTYPES.items() if value == maker.dtype)
    return {"op": name, "sizes": sizes, "dtype": dtype, "traffic": case.traffic, "seconds": seconds, "failures": failures}


class Clock:
    """Seconds of a call."""

    def __init__(self, device: torch.device) -> None:
        self._flushed = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None

    def seconds(self, call: Callable[[], Any], repeats: int) -> float:
        """On a CPU the mean of several calls, on a card their median."""
        if self._flushed is None:
            started = time.perf_counter()
            for _ in range(repeats):
                call()
            return (time.perf_counter() - started) / repeats
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, stop in events:
            self._flushed.zero_()
            torch.cuda._sleep(HEAD_START_CYCLES)  # about half a millisecond, in which the host gets ahead
            start.record()
            call()
            stop.record()
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(stop) for start, stop in events) / 1e3


def memory(dtype: torch.dtype, device: torch.device, sizes: tuple[int, ...] = MEMORY_SIZE) -> dict[str, int | None]:
    """The most bytes that linear+cross-entropy holds beyond its inputs, its gradients among them: ours and eager."""
    found = {}
    for who in ("ours", "eager"):
        if device.type == "cuda":
            found[who] = _peak(who, dtype, device, sizes)
        else:  # a process for each: what one leaves with malloc is nothing to the other
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                found[who] = pool.apply(_peak, (who, dtype, device, sizes))
    return found


def _peak(who: str, dtype: torch.dtype, device: torch.device, sizes: tuple[int, ...]) -> int | None:
    case = make("linear_cross_entropy", sizes, Maker(dtype, device))
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        case.calls[who](*case.inputs)
        return torch.cuda.max_memory_allocated() - before
    small = make("linear_cross_entropy", (8, 8, 64), Maker(dtype, device))
    small.calls[who](*small.inputs)  # loads what is loaded at first use
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    except OSError:
        return None
    before = _resident("VmRSS")
    case.calls[who](*case.inputs)
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith(f"{field}:"))


def ratios(figures: Figures, to: str) -> list[float] | None:
    """Quartiles of ours ÷ theirs, round by round."""
    ours, theirs = figures["seconds"]["ours"], figures["seconds"].get(to)
    return theirs and quartiles([a / b for a, b in zip(ours, theirs, strict=True)])


def of_copy(figures: Figures) -> float | None:
    """Bandwidth that ours reached, as a part of the copy's."""
    found = ratios(figures, "copy")
    return found and 1 / found[1]


def show(figures: Figures) -> None:
    from rich.console import Console
    from rich.table import Table

    threads = f", {figures['threads']} threads" if figures["device"] == "cpu" else ""
    table = Table(title=f"Ours on {figures['device']}{threads}, torch {figures['torch']}; ratios are ours ÷ theirs")
    for column in ("op", "dtype", "size", "ms", "÷ eager", "÷ compile", "÷ others", "GB/s", "of copy"):
        table.add_column(column, justify="left" if column in ("op", "dtype") else "right")
    for each in figures["ops"]:
        middle = statistics.median(each["seconds"]["ours"])
        others = [who for who in each["seconds"] if who not in ("ours", "eager", "compile", "copy")]
        told = [f"{who} {_told(ratios(each, who))}" for who in others] + [f"{who} failed" for who in each["failures"]]
        bandwidth = each["traffic"] / middle if each["traffic"] else None
        size, reached = "×".join(map(str, each["sizes"])), of_copy(each)
        row = [each["op"], each["dtype"], size, f"{middle * 1e3:.2f}", *(_told(ratios(each, to)) for to in ("eager", "compile"))]
        table.add_row(*row, ", ".join(told), number(bandwidth, 1e-9, 1), number(reached, 1, 2))
    Console(width=170).print(table)
    for dtype, peaks in figures.get("memory", {}).items():
        if all(peaks.values()):
            told = [f"{who} {peak / 1e6:.0f} MB" for who, peak in peaks.items()]
            print(f"peak of linear+cross-entropy, {dtype}: {', '.join(told)}: {peaks['ours'] / peaks['eager']:.3f}")


def _told(found: Sequence[float] | None) -> str:
    return f"{found[1]:.2f} [{found[0]:.2f}–{found[2]:.2f}]" if found else "–"


if __name__ == "__main__":
    sys.exit(main())
