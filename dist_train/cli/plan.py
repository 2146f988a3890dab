"""`dist-train plan`: the pipeline of a configuration, played before anything runs: its bubble, its memory, its timeline."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from dist_train.config.schema import Config
    from dist_train.pipeline import Costs, Schedule, Timeline

EPILOG = """The first row is the schedule of this configuration; the others are what else its ranks could run. A backward
is taken to cost two forwards, half of it for inputs and half for weights; recompute and other communication are not counted.

bubble     the share of all ranks' time in which they wait; by formula: if all stages were alike and messages took no time,
           simulated: with the blocks that each stage has, and with --transfer
held       the most activations that each rank keeps, in micro-batches of all its blocks, first rank first

examples
  dist-train plan model=llama_7b mesh.pp=4 mesh.dp=1 train.global_batch=32 --timeline 1f1b.svg
  dist-train plan pipeline=interleaved mesh.pp=2 mesh.chunks=2 --transfer 0.2 --timeline messages.svg
"""
UNIT = "forwards of one micro-batch on one rank"
MOST_RANKS = 8  # whose activations fit in a row of the table


def main(argv: list[str]) -> int:
    """Print the table, and write the timeline where it is asked for. Raises ConfigError."""
    options = _parser().parse_intermixed_args(argv)

    from dist_train.config.compose import ConfigError, compose
    from dist_train.pipeline import simulate
    from dist_train.pipeline.draw import draw

    if not 0.0 <= options.transfer < float("inf"):
        raise ConfigError(f"--transfer {options.transfer:g}: takes 0 or more {UNIT}.")
    config = compose(options.overrides)
    chosen, *others = schedules(config)
    played = simulate(chosen, stage_costs(config, chosen, options.transfer))
    rows = [played, *(simulate(each, stage_costs(config, each, options.transfer)) for each in others)]
    _print(rows)
    if options.timeline:
        path = Path(options.timeline).expanduser()
        try:
            path.write_text(draw(played, options.transfer > 0, UNIT), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--timeline {options.timeline}: {error.strerror}; give a file in a folder that exists.") from None
        print(f"timeline: {path}", file=sys.stderr)
    return 0


def schedules(config: Config) -> list[Schedule]:
    """That of the config, then others for the same ranks and micro-batches. Raises ConfigError where it cannot run."""
    import torch

    from dist_train.config import check
    from dist_train.config.layouts import CHUNKS
    from dist_train.pipeline import Schedule
    from dist_train.pipeline.stage import schedule_of

    mesh, train = config.mesh, config.train
    world_size = check.world_size(config, 0 if config.launch.device == "cpu" else torch.cuda.device_count())
    check.require(config, world_size)
    dp = world_size // (mesh.pp * mesh.cp * mesh.tp)
    microbatches = train.global_batch // (train.micro_batch * dp)
    found = [schedule_of(config, microbatches)]
    for name, only in CHUNKS.items() if mesh.pp > 1 else ():
        chunks = only or (max(2, mesh.chunks) if name == "interleaved" else 1)
        if name != config.pipeline and mesh.pp * chunks <= config.model.layers:
            found.append(Schedule(name, mesh.pp, microbatches, chunks))
    return found


def stage_costs(config: Config, schedule: Schedule, transfer: float) -> list[Costs]:
    """By the blocks of each stage and the head of the last one; in forwards of an average rank."""
    from dist_train.model.flops import head_in_blocks
    from dist_train.pipeline import Costs
    from dist_train.pipeline.stage import layers_of

    blocks = [float(n) for n in layers_of(config, schedule)]
    blocks[-1] += head_in_blocks(config.model)
    average = sum(blocks) / schedule.ranks
    return [Costs(each / average, each / average, each / average, transfer) for each in blocks]


def _print(timelines: list[Timeline]) -> None:
    from rich.console import Console
    from rich.table import Table

    from dist_train.pipeline import ideal_bubble

    table = Table()
    for header in ("schedule", "ranks", "chunks", "micro-batches", "bubble by formula", "simulated", "held by each rank"):
        table.add_column(header, justify="left" if header == "schedule" else "right", no_wrap=True)
    for timeline in timelines:
        schedule = timeline.schedule
        numbers = map(str, (schedule.ranks, schedule.chunks, schedule.microbatches))
        bubbles = (f"{bubble:.1%}" for bubble in (ideal_bubble(schedule), timeline.bubble))
        table.add_row(schedule.name, *numbers, *bubbles, _held(timeline))
    console = Console() if sys.stdout.isatty() else Console(width=160)
    console.print(table)


def _held(timeline: Timeline) -> str:
    ranks, chunks = timeline.schedule.ranks, timeline.schedule.chunks
    held = [f"{timeline.peak_in_flight(rank) / chunks:.3g}" for rank in range(ranks)]
    return " ".join(held if ranks <= MOST_RANKS else [*held[: MOST_RANKS - 2], "…", held[-1]])


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        from dist_train.config.compose import ConfigError

        raise ConfigError(f"{message}. See: dist-train plan --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dist-train plan",
        usage="dist-train plan [hydra overrides] [--timeline FILE.svg] [--transfer T]",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the configuration, as for dist-train train")
    parser.add_argument("--timeline", metavar="FILE.svg", help="draw what each rank does when")
    parser.add_argument("--transfer", type=float, default=0.0, metavar="T", help=f"time of a message, in {UNIT}; draws messages")
    return parser
