"""`dist-train launch SCRIPT …`: any program on several ranks, with the environment that torch.distributed reads."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from dist_train.config.compose import ConfigError

_EPILOG = """SCRIPT is a Python file, or any program on PATH; what follows it reaches every rank byte for byte.
Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT in its environment.
Exit code: 0; 75 when the ranks were asked to stop and ended with 75; else that of the rank that failed first, which is
128+n for signal n."""


def main(argv: list[str]) -> int:
    from dist_train.launcher.elastic import Job, run

    end = _end_of_options(argv)
    options = _parser().parse_args(argv[:end])
    if options.ranks < 1 or options.nodes < 1:
        raise ConfigError(f"--ranks {options.ranks} --nodes {options.nodes}: both are at least 1.")
    if options.nodes > 1 and not options.rdzv:
        raise ConfigError(f"--nodes {options.nodes}: several nodes must meet somewhere; give --rdzv HOST:PORT of the first node.")
    if options.nodes > 1 and options.port:
        raise ConfigError(f"--port {options.port}: is for one node; give the port of several nodes in --rdzv HOST:PORT.")
    if options.nodes > 1 and options.max_restarts and options.node_rank is None:
        # in order of arrival, nodes count their attempts each for itself, and attempts that differ never meet
        raise ConfigError(f"--max-restarts {options.max_restarts}: nodes that restart need fixed places; give --node-rank too.")
    job = Job(
        argv=[*_program(options.script), *argv[end:]],
        ranks=options.ranks,
        nodes=options.nodes,
        node_rank=options.node_rank,
        rendezvous=options.rdzv,
        port=options.port,
        logs=Path(options.log_dir) if options.log_dir else None,
        max_restarts=options.max_restarts,
        grace_seconds=options.grace,
    )
    return run(job)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "dist-train launch",
        usage="dist-train launch [options] SCRIPT [arguments of the script]",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--ranks", type=int, default=1, metavar="N", help="ranks on this node (default 1)")
    add("--nodes", type=int, default=1, metavar="N", help="nodes; run this command on each (default 1)")
    add("--node-rank", type=int, metavar="R", help="place of this node; without it, in the order of arrival")
    add("--rdzv", default="", metavar="HOST:PORT", help="where several nodes meet: a port on the first node")
    add("--log-dir", metavar="D", help="keep the output of rank 3 in D/rank_00003.out and .err")
    add("--max-restarts", type=int, default=0, metavar="N", help="start all ranks again after a failure (default 0)")
    add("--port", type=int, default=0, metavar="P", help="where the ranks of one node meet (default: a free port)")
    add("--grace", type=float, default=30.0, metavar="S", help="seconds between SIGTERM and SIGKILL (default 30)")
    add("script", metavar="SCRIPT")
    return parser


def _end_of_options(argv: list[str]) -> int:
    """Where the script's own arguments begin. Cut here and not by argparse, whose versions differ in what they do to `--`."""
    at = 0
    while at < len(argv) and argv[at].startswith("-"):
        at += 1 if "=" in argv[at] or argv[at] in ("-h", "--help") else 2  # every other option has a value
    return at + 1


def _program(script: str) -> list[str]:
    if script.endswith(".py"):
        if not Path(script).is_file():
            raise ConfigError(f"{script}: no such file; give the path of a Python file or the name of a program.")
        return [sys.executable, script]
    found = shutil.which(script)
    if found is None:
        raise ConfigError(f"{script}: no such program; give the path of a Python file (*.py) or a program on PATH.")
    return [found]
