"""Engines side by side: the same model, data, optimizer and threads, interleaved round by round in one run.

    python benchmarks/engines.py [--ranks 2] [--rounds 15] [--steps 4] [--models light,heavy] [--engines ddp,stage0]

Machines are shared and noisy, so only ratios within a round mean anything: in each round every engine takes the same steps,
in an order that rotates, and its wall and CPU seconds are divided by those of DDP in that round. The table gives the median
ratio with its quartiles. `plain` is the model alone, without communication: what an engine adds is measured from there.
Losses of all engines are compared at every step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SHAPES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
LIGHT = dict(zip(SHAPES, (48, 64, 2, 2, 128, 256), strict=True))  # little to compute: shows what an engine adds to each layer
HEAVY = dict(zip(SHAPES, (6, 512, 8, 8, 1376, 512), strict=True))
MODELS = {"light": (LIGHT, 16, 2), "heavy": (HEAVY, 128, 4)}  # model, tokens per row, rows per rank
ENGINES = ("plain", "ddp", "fsdp2", "stage0", "stage1", "stage2", "stage3")  # stage0 to stage3 are ours
LR = 1e-5  # small: AdamW amplifies the last bit of a small gradient, and losses are to be compared over many steps
LIMIT = 1e-5  # relative difference of losses


@dataclass
class Engine:
    step: Callable[[], float]  # one training step; its mean loss over ranks
    held: Callable[[], int]  # bytes of parameters, masters, gradients and moments


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="steps of one engine in one round")
    parser.add_argument("--models", default="light,heavy")
    parser.add_argument("--engines", default=",".join(ENGINES), help="must name ddp, to which all are compared")
    parser.add_argument("--clip", type=float, default=1.0, help="global norm to clip at, in every engine; 0: none")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        return measure(arguments)
    from dist_train.launcher.elastic import Job, run

    env = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": "1"}
    return run(Job(argv=[sys.executable, *sys.argv], ranks=arguments.ranks, tee=False, env=env))


def measure(arguments: argparse.Namespace) -> int:
    from dist_train.mesh.mesh import ParallelMesh

    mesh = ParallelMesh.from_environment(device="cpu", timeout_seconds=120)
    results = {name: compare(name, mesh, arguments) for name in arguments.models.split(",")}
    if mesh.is_main and arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    mesh.close()
    return 0


def compare(name, mesh, arguments):  # type: ignore[no-untyped-def]
    from dist_train.config.compose import compose

    shape, seq_len, rows = MODELS[name]
    config = compose([f"train.seq_len={seq_len}", *(f"model.{key}={value}" for key, value in shape.items())])
    names = tuple(arguments.engines.split(","))
    engines = {engine: make(engine, config, rows, mesh, arguments.clip) for engine in names}
    wall: dict[str, list[float]] = {engine: [] for engine in names}
    cpu: dict[str, list[float]] = {engine: [] for engine in names}
    worst = 0.0
    for round_ in range(arguments.rounds + 1):  # the first warms up
        losses: dict[str, list[float]] = {}
        shift = round_ % len(names)
        for engine in names[shift:] + names[:shift]:
            barrier(mesh)
            started, busy = time.perf_counter(), time.process_time()
            losses[engine] = [engines[engine].step() for _ in range(arguments.steps)]
            barrier(mesh)
            if round_:
                wall[engine].append((time.perf_counter() - started) / arguments.steps)
                cpu[engine].append((time.process_time() - busy) / arguments.steps)
        for engine in names:
            if engine != "plain":
                worst = max(worst, *(abs(a / b - 1) for a, b in zip(losses[engine], losses["ddp"], strict=True)))
    if worst > LIMIT:
        raise SystemExit(f"{name}: losses differ by {worst:.2g}")
    if mesh.is_main:
        show(name, config, arguments, wall, cpu, {engine: engines[engine].held() for engine in names}, worst)
    return {"wall_seconds": wall, "cpu_seconds": cpu, "loss_difference": worst}


def show(name, config, arguments, wall, cpu, held, worst):  # type: ignore[no-untyped-def]
    from rich.console import Console
    from rich.table import Table

    from dist_train.model.flops import parameter_count

    layers = config.model.layers
    size = f"{parameter_count(config.model) / 1e6:.1f} M parameters, {layers} layers"
    title = f"{name}: {size}, {arguments.ranks} ranks, clip {arguments.clip}"
    table = Table(title=title, caption=f"{arguments.rounds} rounds × {arguments.steps} steps; losses equal to {worst:.1g}")
    for column in ("engine", "ms/step", "wall ÷ ddp", "CPU ÷ ddp", "CPU µs/layer over plain", "MB held"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for engine in wall:
        over = [(a - b) / layers * 1e6 for a, b in zip(cpu[engine], cpu.get("plain", cpu["ddp"]), strict=True)]
        table.add_row(
            engine,
            f"{statistics.median(wall[engine]) * 1e3:.1f}",
            ratio(wall[engine], wall["ddp"]),
            ratio(cpu[engine], cpu["ddp"]),
            f"{statistics.median(over):.0f}",
            f"{held[engine] / 1e6:.1f}",
        )
    Console(width=110).print(table)


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Median of the round-by-round ratios, with quartiles."""
    found = [a / b for a, b in zip(ours, theirs, strict=True)]
    low, middle, high = statistics.quantiles(found, n=4) if len(found) > 1 else found * 3
    return f"{middle:.3f} [{low:.3f}–{high:.3f}]"


def barrier(mesh) -> None:  # type: ignore[no-untyped-def]
    from dist_train.comm.collectives import Collectives

    Collectives().barrier(mesh.world)


def make(name, config, rows, mesh, clip) -> Engine:  # type: ignore[no-untyped-def]
    """Engine `name` on a fresh model and the same sequence of batches."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import dist_train as dt
    from dist_train.model.build import build_model
    from dist_train.ops.cross_entropy import cross_entropy_sum

    model = build_model(config, seed=0)
    generator = torch.Generator().manual_seed(mesh.rank)
    tokens = rows * config.train.seq_len

    def loss(module):  # type: ignore[no-untyped-def]
        batch_BT = torch.randint(0, config.model.vocab, (rows, config.train.seq_len + 1), generator=generator)
        return cross_entropy_sum(module(batch_BT[:, :-1]), batch_BT[:, 1:])[0] / tokens

    if name.startswith("stage"):
        engine = dt.shard(model, dt.AdamW(lr=LR), mesh, stage=int(name[-1]), clip_norm=clip)

        def native() -> float:
            value = loss(model)
            engine.backward(value)
            report = engine.step(sums=(value.detach(),))
            return float(report.sums[0]) / mesh.dp.size

        return Engine(native, lambda: sum(engine.held_bytes().values()))

    if name == "fsdp2":
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        device_mesh = DeviceMesh("cpu", list(range(mesh.dp.size)))
        for block in model.blocks:
            fully_shard(block, mesh=device_mesh)
        fully_shard(model, mesh=device_mesh)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)
    module = DistributedDataParallel(model, gradient_as_bucket_view=True) if name == "ddp" else model

    def plain() -> float:
        value = loss(module)
        value.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        mean = value.detach() / mesh.dp.size
        if name != "plain":
            from dist_train.comm.collectives import Collectives

            Collectives().all_reduce(mean, mesh.dp).wait()
        return float(mean)

    def held() -> int:
        state = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
        kept = [getattr(t, "_local_tensor", t) for t in [*model.parameters(), *model.parameters(), *state]]  # and gradients
        return sum(t.numel() * t.element_size() for t in kept)

    return Engine(plain, held)


if __name__ == "__main__":
    sys.exit(main())
