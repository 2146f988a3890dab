"""Section zero: the engine's streams, prefetch and memory on one accelerator.

One card has no peers. So a first part runs a rank of eight whose others are not there: its collectives are copies of the same
bytes between the card and pinned host memory, on a stream of their own, as NCCL's are. Copies use no cores of the card, so a
trace shows what the engine hides behind kernels and what not; a second run, in which each collective is waited for at once, is
what overlap is compared with. What the other ranks would have sent is made up, and so is the loss of this part.

The second part is about numbers: two real ranks share the card over gloo, which takes tensors on a card through host memory, and
their losses at each stage are compared with those of one rank that has both batches.
"""

from __future__ import annotations

import copy
import gzip
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from team import Team, TeamFailure
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

import dist_train as dt
from dist_train.comm.collectives import Collectives, Handle
from dist_train.comm.trace import TrafficCounter
from dist_train.config.compose import compose
from dist_train.config.schema import Config
from dist_train.mesh.mesh import Group, ParallelMesh
from dist_train.model.build import build_model
from dist_train.ops.cross_entropy import cross_entropy_sum
from dist_train.zero import Precision, ZeroEngine
from dist_train.zero.residency import HostMemory

SHAPE = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
STAGES = (0, 1, 2, 3)
RANKS = 8  # of which this is the first
PARITY_STEPS = 6


@dataclass(frozen=True)
class Size:
    shape: tuple[int, ...]  # as SHAPE names them
    rows: int
    tokens: int  # per row
    compute: torch.dtype
    bucket_bytes: float
    steps: int
    parity_limit: float  # relative difference of losses

    def config(self) -> Config:
        return compose([f"train.seq_len={self.tokens}", *(f"model.{k}={v}" for k, v in zip(SHAPE, self.shape, strict=True))])


SIZES = {
    # 0.9e9 parameters: at stage 3 a rank moves about 6 GB a step, for about 45 TFLOP of compute
    "cuda": Size((16, 2048, 16, 16, 5632, 16384), 4, 2048, torch.bfloat16, 100e6, 5, 1e-4),
    "cpu": Size((3, 64, 2, 2, 128, 256), 2, 16, torch.float32, 1e5, 2, 1e-5),
}


def run(device: torch.device, out: Path) -> dict[str, Any]:
    size = SIZES[device.type]
    model = build_model(size.config(), seed=0)
    figures: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "ranks": RANKS,
        "alone_seconds": _timed(_trainer(model, 0, ParallelMesh.single(device.type), Collectives(), size), size.steps, device),
        "stages": {f"stage{stage}": _stage(model, stage, size, device, out) for stage in STAGES},
        "parity": _parity(size.parity_limit, device),
    }
    return figures | {"checks": _checks(figures, device)}


def _checks(figures: dict[str, Any], device: torch.device) -> dict[str, bool | None]:
    """By what they claim; None where this device cannot tell."""
    checks: dict[str, bool | None] = {}
    for name, stage in figures["stages"].items():
        trace, cuda = stage["trace"], device.type == "cuda"
        checks[f"{name}: state held is what was predicted"] = stage["held_bytes"] == stage["predicted_bytes"]
        possible = min(trace["compute_seconds"], trace["communication_seconds"])
        checks[f"{name}: collectives and kernels share at least half the time that they could"] = (
            trace["overlapped_seconds"] >= possible / 2 > 0 if cuda else None
        )
        checks[f"{name}: a step is faster than one that waits for each collective"] = (
            stage["seconds"] < stage["waiting_seconds"] if cuda else None
        )
        checks[f"{name}: the host waits for nothing in a step"] = not trace["host_waits"] if cuda else None
    pinned = HostMemory(device).zeros(1 << 20, torch.float32, "a trial").is_pinned() if device.type == "cuda" else None
    checks["memory on the host is pinned"] = pinned
    checks["losses of two ranks are those of one, at every stage"] = figures["parity"]["difference"] <= figures["parity"]["limit"]
    return checks


# Part one: a rank whose peers are not there


class StandIn(Collectives):
    """Rank 0's collectives in a group whose other ranks hold what it holds and add nothing to what it reduces.

    On CUDA each copies, on one stream of its own, the bytes that a rank sends or receives; with `waits` the stream that
    computes waits for them at once.
    """

    def __init__(self, device: torch.device, waits: bool = False, recorder: TrafficCounter | None = None) -> None:
        super().__init__(recorder)
        self._waits = waits
        self._stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._host = torch.empty(0, dtype=torch.uint8)

    def all_reduce(self, x: Tensor, group: Group, op: str = "sum") -> Handle:
        def copies() -> None:
            moved = self._others(x, group)
            self._pinned(moved).copy_(moved, non_blocking=True)
            moved.copy_(self._pinned(moved), non_blocking=True)

        return self._travel("all_reduce", x, group, copies)

    def reduce_scatter(self, out: Tensor, x: Tensor, group: Group) -> Handle:
        def copies() -> None:
            moved = self._others(x, group)
            self._pinned(moved).copy_(moved, non_blocking=True)

        return self._travel("reduce_scatter", x, group, copies, lambda: out.copy_(x.view(group.size, -1)[0]))

    def all_gather(self, out: Tensor, x: Tensor, group: Group) -> Handle:
        def copies() -> None:
            moved = self._others(out, group)
            moved.copy_(self._pinned(moved), non_blocking=True)

        def result() -> None:
            slices = out.view(group.size, -1)
            slices[1:].copy_(x.view(1, -1))
            if slices[0].data_ptr() != x.data_ptr():
                slices[0].copy_(x.view(-1))

        return self._travel("all_gather", out, group, copies, result)

    def broadcast(self, x: Tensor, group: Group, source: int = 0) -> Handle:
        return Handle()

    def broadcast_object(self, value: Any, group: Group, source: int = 0) -> Any:
        return value

    def meet(self, place: str, word: str, group: Group, patience: timedelta) -> list[str]:
        return [word] * group.size

    def is_host(self, group: Group) -> bool:
        return self._stream is None

    def _travel(
        self, name: str, x: Tensor, group: Group, copies: Callable[[], None], result: Callable[[], Any] = lambda: None
    ) -> Handle:
        if group.size > 1:
            self._record(name, group, x)
        if self._stream is None:
            result()
            return Handle()
        computing = torch.cuda.current_stream()
        self._stream.wait_stream(computing)
        with torch.cuda.stream(self._stream), record_function(f"stand-in {name}"):
            if group.size > 1:
                copies()
            result()
            done = self._stream.record_event()
        if self._waits:
            computing.wait_event(done)
        return Handle(then=lambda: torch.cuda.current_stream().wait_event(done))

    @staticmethod
    def _others(x: Tensor, group: Group) -> Tensor:
        """The bytes of `x` beyond the first rank's slice, (N-1)/N of them."""
        flat = x.view(-1).view(torch.uint8)
        return flat[flat.numel() // group.size :]

    def _pinned(self, like: Tensor) -> Tensor:
        if self._host.numel() < like.numel():
            self._host = torch.empty(like.numel(), dtype=torch.uint8, pin_memory=True)
        return self._host[: like.numel()]


def _pretended_mesh(device: torch.device) -> ParallelMesh:
    group = Group("dp", tuple(range(RANKS)), 0)
    return replace(ParallelMesh.single(device.type), dp=group, data=group)


def _trainer(model: nn.Module, stage: int, mesh: ParallelMesh, comm: Collectives, size: Size) -> Callable[[], ZeroEngine]:
    """A function that takes one training step and returns its engine."""
    device = mesh.device
    precision = Precision(compute=size.compute)
    options: dict[str, Any] = {"precision": precision, "clip_norm": 1.0, "bucket_bytes": size.bucket_bytes}
    engine = dt.shard(copy.deepcopy(model).to(device), dt.AdamW(lr=1e-4), mesh, stage=stage, comm=comm, **options)
    batch_BT = torch.randint(0, size.shape[-1], (size.rows, size.tokens + 1), device=device)

    def step() -> ZeroEngine:
        with record_function("forward"):
            loss = cross_entropy_sum(engine.module(batch_BT[:, :-1]), batch_BT[:, 1:])[0]
        with record_function("backward"):
            engine.backward(loss)
        with record_function("update"):
            engine.step(weight=size.rows * size.tokens)
        return engine

    return step


def _stage(model: nn.Module, stage: int, size: Size, device: torch.device, out: Path) -> dict[str, Any]:
    """Times, memory, traffic and a trace of one stage."""
    before, traffic = _allocated(device), TrafficCounter()
    step = _trainer(model, stage, _pretended_mesh(device), StandIn(device, recorder=traffic), size)
    seconds = _timed(step, size.steps, device)
    traffic.reset()
    engine = step()
    allocated, peak = _allocated(device), _peak(device)
    figures = {
        "seconds": seconds,
        "traffic": traffic.per_step(1),
        "held_bytes": engine.held_bytes(),
        "predicted_bytes": engine.predicted_bytes(),
        "allocated_bytes": None if allocated is None else allocated - before,  # the whole between steps, the batch among it
        "peak_bytes": None if peak is None else peak - before,
        "trace": read_trace(_traced(step, device, out / f"zero_stage{stage}.trace.json.gz")),
    }
    del step, engine
    waiting = _trainer(model, stage, _pretended_mesh(device), StandIn(device, waits=True), size)
    return figures | {"waiting_seconds": _timed(waiting, size.steps, device)}


def _timed(step: Callable[[], Any], steps: int, device: torch.device) -> float:
    """Seconds of one step, after two that warm up; the peak of memory is counted from there on."""
    for _ in range(2):
        step()
    _synchronize(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    _synchronize(device)
    return (time.perf_counter() - started) / steps


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _allocated(device: torch.device) -> Any:
    return torch.cuda.memory_allocated() if device.type == "cuda" else None


def _peak(device: torch.device) -> Any:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else None


def _traced(step: Callable[[], Any], device: torch.device, target: Path) -> Path:
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as seen:
        with record_function("traced step"):
            step()
        _synchronize(device)
    seen.export_chrome_trace(str(target))
    return target


Spans = list[tuple[float, float]]  # µs, in order and apart from each other


def read_trace(path: Path) -> dict[str, Any]:
    """What a trace of one step says of a card: how long it computed and communicated, and how much of that at once."""
    with gzip.open(path, "rt") as file:
        events = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    copies = [event for event in events if event.get("cat") == "gpu_memcpy" and "Pinned" in event["name"]]
    streams = {event["args"]["stream"] for event in copies}
    kernels = [event for event in events if event.get("cat") == "kernel" and event["args"]["stream"] not in streams]
    communicating, computing = _union(copies), _union(kernels)
    steps = _union(event for event in events if event["name"] == "traced step" and event.get("cat") == "user_annotation")
    waits = [e["name"] for e in events if e.get("cat") == "cuda_runtime" and "Synchronize" in e["name"] and _inside(e, steps)]
    both = _length(computing) + _length(communicating) - _length(_union_of(computing + communicating))
    return {
        "file": path.name,
        "events": len(events),
        "compute_seconds": _length(computing) * 1e-6,
        "communication_seconds": _length(communicating) * 1e-6,
        "overlapped_seconds": both * 1e-6,
        "exposed_seconds": (_length(communicating) - both) * 1e-6,
        "host_waits": waits,
    }


def _union(events: Iterable[dict[str, Any]]) -> Spans:
    return _union_of([(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events])


def _union_of(spans: Spans) -> Spans:
    found: Spans = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _length(spans: Spans) -> float:
    return sum(stop - start for start, stop in spans)


def _inside(event: dict[str, Any], spans: Spans) -> bool:
    return any(start <= float(event["ts"]) < stop for start, stop in spans)


# Part two: two real ranks on one card


class Trainee:
    """One rank that trains a small model on its rows of a batch that all ranks share."""

    def __init__(self, mesh: ParallelMesh) -> None:
        self._mesh = mesh
        self._size = SIZES["cpu"]

    def losses(self, stage: int) -> list[float]:
        """The losses of the first steps at one stage, over all ranks' tokens."""
        size, mesh = self._size, self._mesh
        model = build_model(size.config(), seed=0).to(mesh.device)
        engine = dt.shard(model, dt.SGD(lr=0.1), mesh, stage=stage, bucket_bytes=size.bucket_bytes)
        generator, found = torch.Generator().manual_seed(1), []
        for _ in range(PARITY_STEPS):
            whole_BT = torch.randint(0, size.shape[-1], (4, size.tokens + 1), generator=generator)
            mine_BT = whole_BT.tensor_split(mesh.data.size)[mesh.data.index].to(mesh.device)
            loss = cross_entropy_sum(engine.module(mine_BT[:, :-1]), mine_BT[:, 1:])[0]
            engine.backward(loss)
            report = engine.step(weight=mine_BT[:, 1:].numel(), sums=(loss.detach(),))
            found.append(float(report.sums[0] / report.weight))
        return found


def _parity(limit: float, device: torch.device) -> dict[str, Any]:
    """The largest relative difference of losses between two ranks and one, at any stage."""
    teams = [Team(f"{ranks} ranks", ranks, Trainee, device=device.type) for ranks in (1, 2)]
    try:
        for team in teams:
            team.started()
        alone = teams[0].call("losses", 0)[0]
        shared = {f"stage{stage}": teams[1].call("losses", stage)[0] for stage in STAGES}
    except TeamFailure as failure:
        return {"limit": limit, "difference": float("inf"), "failure": str(failure)}
    finally:
        for team in teams:
            team.close()
    difference = max(abs(a / b - 1) for losses in shared.values() for a, b in zip(losses, alone, strict=True))
    return {"limit": limit, "difference": difference, "one_rank": alone, "two_ranks": shared}
