"""Engines side by side: the same model, data, optimizer and threads, interleaved round by round in one run.

    python benchmarks/engines.py [--ranks 2] [--rounds 15] [--steps 4] [--models light,heavy] [--engines ddp,stage0,…]
    python benchmarks/engines.py --link 400        # each rank a host, the two joined by a link of 400 Mbit/s; as root

Machines are shared and noisy, so only ratios within a round mean anything: in each round every engine takes the same steps, in
an order that rotates, and its wall and CPU seconds are divided by those of DDP in that round. Tables give the median ratio with
its quartiles. `plain` is the model alone, without communication: what an engine adds is measured from there, and what of its
communication is exposed. Losses of all engines are compared at every step. Engines share no process (`team.py`). Ctrl-C or
SIGTERM ends the run after the round that is under way, with the figures so far.

Ours are stage0 to stage3; ds0 to ds3 are DeepSpeed's stages. The ideal bytes of Ψ parameters over N ranks are 2Ψ(N-1)/N
elements a step, and 3Ψ(N-1)/N where parameters are sharded too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import link
from contestants import ENGINES, Contestant, Setting, shards_parameters
from team import Team, TeamFailure

SHAPES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
LIGHT = dict(zip(SHAPES, (48, 64, 2, 2, 128, 256), strict=True))  # little to compute: shows what an engine adds to each layer
HEAVY = dict(zip(SHAPES, (6, 512, 8, 8, 1376, 512), strict=True))
TINY = dict(zip(SHAPES, (3, 32, 2, 2, 64, 64), strict=True))  # says nothing about speed: to try things out
MODELS = {"light": (LIGHT, 16, 2), "heavy": (HEAVY, 128, 4), "tiny": (TINY, 8, 2)}  # model, tokens per row, rows per rank
LIMIT = 1e-5  # relative difference of losses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="default 15, over a link 5")
    parser.add_argument("--steps", type=int, help="steps of one engine in one round; default 4, over a link 3")
    parser.add_argument("--models", help=f"of {', '.join(MODELS)}; default light,heavy, over a link heavy")
    parser.add_argument("--rows", type=int, help="rows of a rank's batch, in place of the model's own; over a link 6")
    parser.add_argument("--engines", help="default all, over a link all but DeepSpeed's; all are compared with ddp")
    parser.add_argument("--extra", type=Path, help="a Python file whose make(name, model, loss, mesh, clip) makes other engines")
    parser.add_argument("--clip", type=float, default=1.0, help="global norm to clip at, in every engine; 0: none")
    parser.add_argument("--link", type=float, default=0.0, metavar="MBIT", help="rate of a link between two hosts")
    parser.add_argument("--json", type=Path, help="also write all figures here")
    arguments = parser.parse_args()
    engines, problems = complete(arguments)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results, asked_to_stop = {}, StopRequest()
    try:
        for name in arguments.models.split(","):
            if not asked_to_stop:
                results[name] = compare(name, engines, arguments, asked_to_stop)
                show(results[name])
    except TeamFailure as failure:
        print(failure, file=sys.stderr)
        return 1
    finally:
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


class StopRequest:
    """True once SIGINT or SIGTERM has come; the next one ends the program as ever."""

    def __init__(self) -> None:
        self._came = False
        self._ends = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}

    def __bool__(self) -> bool:
        return self._came

    def _note(self, *_: Any) -> None:
        self._came = True
        for number, handler in self._ends.items():
            signal.signal(number, handler)


def complete(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Fill in what was not given; the engines to compare, and what is wrong."""
    over_link = arguments.link > 0
    arguments.rounds = arguments.rounds or (5 if over_link else 15)
    arguments.steps = arguments.steps or (3 if over_link else 4)
    arguments.models = arguments.models or ("heavy" if over_link else "light,heavy")
    arguments.rows = arguments.rows or (6 if over_link else None)
    asked = arguments.engines.split(",") if arguments.engines else [n for n in ENGINES if not (over_link and n.startswith("ds"))]
    absent = [name for name in asked if name.startswith("ds") and importlib.util.find_spec("deepspeed") is None]
    if absent:
        print(f"{', '.join(absent)}: left out, since deepspeed is not installed (make setup installs it).")
    engines = [name for name in asked if name not in absent]
    unknown = [name for name in engines if name not in ENGINES and not arguments.extra]
    problems = [f"--engines {','.join(unknown)}: not among {', '.join(ENGINES)}; --extra FILE brings others."] if unknown else []
    problems += [] if "ddp" in engines else ["--engines must name ddp, with which all are compared."]
    wrong = [name for name in arguments.models.split(",") if name not in MODELS]
    problems += [f"--models {','.join(wrong)}: not among {', '.join(MODELS)}."] if wrong else []
    if arguments.extra and not arguments.extra.is_file():
        problems.append(f"--extra {arguments.extra}: no such file.")
    if over_link:
        problems += ["--link joins two hosts with a rank on each: leave --ranks 2."] if arguments.ranks != 2 else []
        problems += [why] if (why := link.missing()) else []
    return engines, problems


def compare(model: str, engines: list[str], arguments: argparse.Namespace, asked_to_stop: StopRequest) -> dict[str, Any]:
    """All figures of one model; fewer rounds when asked to stop, but one at least."""
    from dist_train.config.compose import compose
    from dist_train.model.flops import parameter_count

    shape, seq_len, rows = MODELS[model]
    rows = arguments.rows or rows
    overrides = (f"train.seq_len={seq_len}", *(f"model.{key}={value}" for key, value in shape.items()))
    parameters = parameter_count(compose(list(overrides)).model)
    setting = Setting(overrides, rows, arguments.clip, arguments.extra)
    figures: dict[str, dict[str, Any]] = {
        name: {
            "wall_seconds": [],
            "cpu_seconds": [],
            "sent_bytes": [],
            "ideal_bytes": (3 if shards_parameters(name) else 2) * 4 * parameters * (arguments.ranks - 1) / arguments.ranks,
        }
        for name in engines
    }
    worst = 0.0
    with ExitStack() as stack:
        teams = {}
        for name in engines:
            teams[name] = Team(name, arguments.ranks, Contestant, (name, setting), arguments.link)
            stack.callback(teams[name].close)
        for team in teams.values():
            team.started()
        for round_ in range(arguments.rounds + 1):  # the first warms up
            if asked_to_stop and round_ > 1:
                break
            print(f"{model}: {f'round {round_} of {arguments.rounds}' if round_ else 'warming up'}", file=sys.stderr)
            losses = {}
            shift = round_ % len(engines)
            for name in engines[shift:] + engines[:shift]:
                turns = teams[name].call("turn", arguments.steps)
                losses[name] = [loss for turn in turns for loss in turn.losses]
                if round_:
                    figures[name]["wall_seconds"].append(max(turn.wall_seconds for turn in turns))
                    figures[name]["cpu_seconds"].append(statistics.fmean(turn.cpu_seconds for turn in turns))
                    figures[name]["sent_bytes"].append(max(turn.sent_bytes for turn in turns))
            worst = max(worst, check(model, losses))
        for name in engines:
            counts = teams[name].call("counts")[0]
            figures[name] |= vars(counts)
    return {
        "model": model,
        "parameters": parameters,
        "layers": shape["layers"],
        "rows": rows,
        "ranks": arguments.ranks,
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        "rounds": len(figures["ddp"]["wall_seconds"]),
        "steps": arguments.steps,
        "clip": arguments.clip,
        "link_mbit": arguments.link,
        "loss_difference": worst,
        "engines": figures,
    }


def check(model: str, losses: dict[str, list[float]]) -> float:
    """The largest relative difference from DDP's losses, of any engine, rank and step. `plain` goes its own way."""
    worst = 0.0
    for name in losses.keys() - {"plain"}:
        difference = max(abs(a / b - 1) for a, b in zip(losses[name], losses["ddp"], strict=True))
        if not difference <= LIMIT:
            raise TeamFailure(f"{model}: the losses of {name} and ddp differ by {difference:.2g}")
        worst = max(worst, difference)
    return worst


def show(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{result['model']}: {result['parameters'] / 1e6:.1f} M parameters, {result['layers']} layers"
    title += f", {result['ranks']} ranks of {result['threads']} threads, {result['rows']} rows each, clip {result['clip']:g}"
    title += f", a link of {result['link_mbit']:g} Mbit/s" if result["link_mbit"] else ""
    caption = f"{result['rounds']} rounds × {result['steps']} steps; losses equal to {result['loss_difference']:.1g}"
    table = Table(title=title, caption=caption)
    columns = LINK_COLUMNS if result["link_mbit"] else COLUMNS
    table.add_column("engine")
    for column in columns:
        table.add_column(column, justify="right")
    for name in result["engines"]:
        table.add_row(name, *(of(name, result) for of in columns.values()))
    Console(width=150).print(table)


def ratio(name: str, to: str, key: str, result: dict[str, Any]) -> str:
    """Median of the round-by-round ratios, with quartiles."""
    if to not in result["engines"]:
        return "–"
    ours, theirs = (result["engines"][each][key] for each in (name, to))
    low, middle, high = quartiles([a / b for a, b in zip(ours, theirs, strict=True)])
    return f"{middle:.3f} [{low:.2f}–{high:.2f}]"


def over_plain(name: str, key: str, result: dict[str, Any]) -> float | None:
    """Median of the round-by-round differences from plain, in seconds."""
    if "plain" not in result["engines"]:
        return None
    ours, plain = (result["engines"][each][key] for each in (name, "plain"))
    return statistics.median(a - b for a, b in zip(ours, plain, strict=True))


def quartiles(values: list[float]) -> list[float]:
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3


def seconds(name: str, result: dict[str, Any]) -> float:
    return statistics.median(result["engines"][name]["wall_seconds"])


def ideal_seconds(name: str, result: dict[str, Any]) -> float | None:
    """A step that hides all but what does not fit: the longer of compute alone and the ideal bytes at the link's rate."""
    if "plain" not in result["engines"]:
        return None
    return max(seconds("plain", result), result["engines"][name]["ideal_bytes"] * 8 / (result["link_mbit"] * 1e6))


def number(value: float | None, scale: float = 1.0, digits: int = 0) -> str:
    return "–" if value is None else f"{value * scale:,.{digits}f}"


def bytes_over_ideal(name: str, result: dict[str, Any]) -> str:
    each = result["engines"][name]
    return "–" if name == "plain" else f"{statistics.median(each['sent_bytes']) / each['ideal_bytes']:.3f}"


COLUMNS = {
    "ms/step": lambda n, r: number(seconds(n, r), 1e3, 1),
    "wall ÷ ddp": lambda n, r: ratio(n, "ddp", "wall_seconds", r),
    "CPU ÷ ddp": lambda n, r: ratio(n, "ddp", "cpu_seconds", r),
    "CPU µs/layer over plain": lambda n, r: number(over_plain(n, "cpu_seconds", r), 1e6 / r["layers"]),
    "calls": lambda n, r: number(r["engines"][n]["calls"]),
    "collectives": lambda n, r: number(sum(r["engines"][n]["collectives"].values())),
    "bytes ÷ ideal": bytes_over_ideal,
    "MB held": lambda n, r: number(r["engines"][n]["held_bytes"], 1e-6, 1),
    "MB peak": lambda n, r: number(r["engines"][n]["peak_bytes"], 1e-6, 1),
}
LINK_COLUMNS = {
    "s/step": lambda n, r: number(seconds(n, r), digits=2),
    "exposed s": lambda n, r: number(over_plain(n, "wall_seconds", r), digits=2),
    "ideal s": lambda n, r: "–" if n == "plain" else number(ideal_seconds(n, r), digits=2),
    "wall ÷ ddp": lambda n, r: ratio(n, "ddp", "wall_seconds", r),
    "wall ÷ fsdp2": lambda n, r: ratio(n, "fsdp2", "wall_seconds", r),
    "collectives": lambda n, r: number(sum(r["engines"][n]["collectives"].values())),
    "bytes ÷ ideal": bytes_over_ideal,
}


if __name__ == "__main__":
    sys.exit(main())
