"""`dist-train doctor`: a check-up before a run: what is here, what is wrong and what to do about it, what will run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from dist_train.launcher.checkup.machine import Report
    from dist_train.launcher.checkup.meeting import Allocation
    from dist_train.ops.attention.select import Machine

EPILOG = """Each check is ok, warn (a run starts, but slowly, or may fail later) or bad (it fails), with what was found.
What is printed is meant for bug reports: of the environment it shows what shapes a run, with secrets masked.

exit code: 0 ok or warnings; 1 something is bad; 2 wrong arguments

examples
  dist-train doctor --run-dir runs        this machine, and how fast its disk takes a checkpoint
  dist-train doctor --peer node02         and which interface leads to another host
  srun dist-train doctor --svg links.svg  all ranks of an allocation: who is missing, who differs, which links are slow
  mpirun -n 4 dist-train doctor           the same under mpirun, torchrun and dist-train launch
  dist-train doctor --ranks 4             the same with four ranks of its own on this machine"""
PIPED_WIDTH = 160  # columns when the output is no terminal
HEAD_WIDTH = 64  # of the attention that is asked about
CASES = (  # name, kind, dropout, whether the log-sum-exp is wanted
    ("training, one document a row", "causal", 0.0, False),
    ("training, packed documents", "packed", 0.0, False),
    ("the same with dropout", "packed", 0.1, False),
    ("decoding", "full", 0.0, False),
    ("context parallelism", "causal", 0.0, True),
)


def main(argv: list[str]) -> int:
    """0, or 1 when a check is bad. Raises ConfigError, and SystemExit for arguments that do not parse."""
    options = _parser().parse_args(argv)
    from torch.distributed import DistStoreError

    from dist_train.launcher.checkup import allocation, check, machine

    seat = allocation.find_seat(os.environ, os.getppid())
    _require(options, alone=seat is None)
    run_dir = Path(options.run_dir) if options.run_dir else None
    if seat is not None:
        try:
            found = allocation.check_allocation(seat, run_dir, options.timeout)
        except DistStoreError as error:
            allocation.say_lost(seat, error)
            return 1
        return 0 if found is None else _conclude(found, options)
    if options.ranks > 1:
        words = ["--timeout", str(options.timeout), *(["--run-dir", options.run_dir] if options.run_dir else [])]
        return _conclude(allocation.check_here(options.ranks, run_dir, options.timeout, words), options)
    report = machine.examine(run_dir, options.peer)
    _show(report)
    _write(options.json, "--json", json.dumps({"state": check.worst(report.checks), "reports": {"0": asdict(report)}}, indent=1))
    return int(check.worst(report.checks) == check.BAD)


def _require(options: argparse.Namespace, alone: bool) -> None:
    from dist_train.config.compose import ConfigError

    if options.ranks < 1:
        raise ConfigError(f"--ranks {options.ranks}: is at least 1.")
    if not 0 < options.timeout < float("inf"):
        raise ConfigError(f"--timeout {options.timeout:g}: takes more than 0 seconds.")
    if options.ranks > 1 and not alone:
        raise ConfigError(f"--ranks {options.ranks}: this process is one of a launcher's ranks already; leave the option out.")
    if options.peer and not (alone and options.ranks == 1):
        raise ConfigError(f"--peer {options.peer}: is for one process; several ranks take each other.")
    if options.svg and alone and options.ranks == 1:
        raise ConfigError(f"--svg {options.svg}: draws the links of several ranks; add --ranks 4, or run it under a launcher.")


def _conclude(found: Allocation, options: argparse.Namespace) -> int:
    """Rank 0 tells of its own machine first, then of all of them; the exit code."""
    from dist_train.launcher.checkup import check, compare, picture

    own, together = found.reports[0], compare.compare(found, compare.scheduled_hosts(os.environ))
    console = _show(own)
    _say(console, f"All {found.size} ranks: {check.verdict(together)}", check.lines(together))
    if found.links:
        _say(console, "Links: bandwidth from row to column, and the time of the shortest message", picture.table(found))
    state = check.worst([*own.checks, *together])
    plain = {
        "state": state,
        "checks": [asdict(each) for each in together],
        "hosts": found.hosts,
        "silent": found.silent,
        "reports": {rank: asdict(report) for rank, report in found.reports.items()},
        "links": [asdict(link) for link in found.links],
        "failed": [{"a": a, "b": b, "words": words} for (a, b), words in found.failed.items()],
    }
    _write(options.json, "--json", json.dumps(plain, indent=1))
    _write(options.svg, "--svg", picture.heat_map(found))
    return int(state == check.BAD)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "dist-train doctor",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--run-dir", metavar="D", help="also the disk of this run folder (writes up to 64 MiB there and removes it)")
    add("--peer", default="", metavar="HOST", help="another host of the job: do gloo and NCCL take the way that leads there?")
    add("--ranks", type=int, default=1, metavar="N", help="start N ranks here and check them together (without a launcher)")
    add("--timeout", type=float, default=60.0, metavar="S", help="seconds to wait for a rank before it is named (default 60)")
    add("--svg", metavar="FILE", help="draw the links between ranks as a heat map")
    add("--json", metavar="FILE", help="write everything to FILE, for tools")
    return parser


def _show(report: Report) -> Console:
    import torch
    from rich.console import Console

    from dist_train.launcher.checkup import check
    from dist_train.ops.attention.select import this_machine

    console = Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)
    _say(console, f"Check-up of {report.host}: {check.verdict(report.checks)}", check.lines(report.checks))
    _say(console, "Environment", [f"{name}={value}" for name, value in report.environment.items()] or ["nothing set"])
    console.print(_table("Versions", ("what", "version"), report.versions.items()))
    speeds = report.gflops.items()
    console.print(_table("Devices", ("device", "what it is"), (tuple(each.split(": ", 1)) for each in report.devices)))
    console.print(_table("Matrix products", ("device", "GFLOP/s"), ((name, f"{speed:.0f}") for name, speed in speeds)))
    console.print(_table("Fused kernels (csrc)", ("for", "state"), fused_kernels()))
    for kind in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        headers = ("case", "dtype", "runs", "why not those before it")
        title = f"Attention on {kind} (attention=auto, heads {HEAD_WIDTH} wide)"
        console.print(_table(title, headers, attention_rows(this_machine(torch.device(kind)))))
    return console


def fused_kernels() -> Iterator[tuple[str, str]]:
    """For each device: what will run there, or why nothing will."""
    from dist_train.ops import library

    if not library.loaded:
        yield "cpu, cuda", f"missing, so torch's own operations run: {library.missing}"
        return
    yield "cpu", library.cpu_isa()
    yield "cuda", "built" if library.has_cuda else "not built: there was no nvcc; torch's own operations run"


def attention_rows(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Case, dtypes, backend and reason on this machine."""
    import torch

    from dist_train.ops.attention.select import Request, choose
    from dist_train.ops.native import is_native

    for name, kind, dropout, lse in CASES:
        for dtypes, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
            choice = choose(Request(dtype, HEAD_WIDTH, kind, dropout, lse), machine)
            wide = choice.backend == "cpu_flash" and not is_native(dtype)
            yield name, dtypes, choice.backend + (" in fp32" if wide else ""), choice.reason


def _say(console: Console, title: str, text: list[str]) -> None:
    console.print(title, style="italic", markup=False, highlight=False)
    for line in text:  # never folded: a report must survive being pasted
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)


def _write(file: str | None, option: str, text: str) -> None:
    from dist_train.config.compose import ConfigError

    if file is None:
        return
    try:
        descriptor = os.open(Path(file).expanduser(), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            out.write(text)
    except OSError as error:
        raise ConfigError(f"{option} {file}: {error.strerror}; give a file in a folder that exists.") from None


def _table(title: str, headers: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for header in headers:
        table.add_column(header)
    for row in rows:
        table.add_row(*row)
    return table
