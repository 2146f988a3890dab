"""Start the ranks of this node through torch.distributed.elastic and turn how they end into one exit code and one message."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dist_train.launcher import guard
from dist_train.launcher.environment import threads_per_rank
from dist_train.launcher.report import OK, PREEMPTED, exit_code, failure

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

    from dist_train.launcher.agent import Agent
    from dist_train.launcher.logs import RankLogs
    from dist_train.launcher.peers import Peers


@dataclass(frozen=True)
class Job:
    """What to start on this node and how long to wait for it.

    `argv`: program and arguments of every rank, byte for byte. `ranks`: on this node. `rendezvous`: host:port of the first
    node when there are several. `port`: where one node's ranks meet; 0 takes a free one. `logs`: folder of the log files;
    None keeps none. `tee`: show every rank's output under its number; otherwise rank 0 has the terminal to itself.
    `held`: descriptors of locks that stay held until no rank is left, even when the launcher is killed.
    """

    argv: list[str]
    ranks: int
    nodes: int = 1
    node_rank: int | None = None
    rendezvous: str = ""
    port: int = 0
    logs: Path | None = None
    tee: bool = True
    env: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    grace_seconds: float = 30.0
    held: tuple[int, ...] = ()


def run(
    job: Job, listener: socket.socket | None = None, meeting: RendezvousHandler | None = None, peers: Peers | None = None
) -> int:
    """Start the ranks, wait for all of them and return the exit code of the job.

    0 when every rank ended with 0; 75 when they were asked to stop and saved; else the code of the rank that failed first
    (128+n for signal n), which is reported on standard error with its last lines; 128+n for a signal n to the launcher.
    `listener` is a socket from `rendezvous.listen`, for callers that want to know early that the port is theirs; `meeting` and
    `peers` are those of a node agent (`launcher/node.py`), which has met the other nodes already.
    Raises ConfigError for a port in use and a wrong rendezvous. Call it from the main thread: it handles signals.
    """
    from dist_train.launcher.rendezvous import OneNode, listen, several_nodes

    run_id = "dist_train"
    handler: RendezvousHandler
    if meeting is not None:
        handler = meeting
    elif job.nodes == 1:
        handler = OneNode(listener or listen(job.port), run_id)
    else:
        handler = several_nodes(job.rendezvous, job.nodes, job.node_rank, run_id)

    from torch.distributed.elastic.agent.server.api import WorkerSpec

    from dist_train.launcher.agent import STOP_SIGNALS, Agent
    from dist_train.launcher.logs import RankLogs, Tee
    from dist_train.launcher.reaper import Reaper

    if "LOGLEVEL" not in os.environ:  # elastic says in a page what the message at the end says in a line
        for name in [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]:
            logging.getLogger(name).setLevel(logging.CRITICAL)
    kept = [name for name in STOP_SIGNALS if name != "SIGHUP" or signal.getsignal(signal.SIGHUP) != signal.SIG_IGN]  # nohup
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(kept)

    with tempfile.TemporaryDirectory(prefix="dist_train_") as scratch:
        folder = job.logs or Path(scratch)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        logs = RankLogs(folder, Path(scratch), _environment(job), job.tee)
        program = [sys.executable, "-I", "-S", guard.__file__, *job.argv]
        spec = WorkerSpec(
            role="rank",
            local_world_size=job.ranks,
            rdzv_handler=handler,
            entrypoint=program[0],
            args=tuple(word.replace("$", "$$") for word in program[1:]),  # elastic substitutes $ names in arguments
            max_restarts=job.max_restarts,
            monitor_interval=0.05,
        )
        with Reaper(job.held) as reaper, Tee(logs, sys.stdout.buffer, sys.stderr.buffer) if job.tee else nullcontext():
            agent = Agent(spec, logs, reaper, job.grace_seconds, peers)
            stopped_by = _supervise(agent)
        return _conclude(agent, logs, stopped_by, keeps_logs=job.logs is not None, peers=peers)


def _environment(job: Job) -> dict[str, str]:
    threads = threads_per_rank(os.environ, len(os.sched_getaffinity(0)), job.ranks)
    env = {} if threads is None else {"OMP_NUM_THREADS": threads}
    if job.tee and "PYTHONUNBUFFERED" not in os.environ:
        env["PYTHONUNBUFFERED"] = "1"  # what a rank printed before it was killed must not be lost in its buffer
    return env | dict(job.env)


def _supervise(agent: Agent) -> signal.Signals | None:
    """Run the attempts; the signal that stopped the launcher, if one did. No rank is left when this returns."""
    from torch.distributed.elastic.multiprocessing import SignalException

    try:
        agent.run()
    except SignalException as stop:
        return stop.sigval
    return None


def _conclude(agent: Agent, logs: RankLogs, stopped_by: signal.Signals | None, keeps_logs: bool, peers: Peers | None) -> int:
    if stopped_by is not None and agent.first is None:
        statuses = set(agent.statuses().values())
        if PREEMPTED in statuses and statuses <= {OK, PREEMPTED}:
            return PREEMPTED
        if agent.all_had_ended and statuses == {OK}:
            return OK
        _say(f"dist-train: stopped by {stopped_by.name}; the ranks ended without saving (exit statuses {_listed(agent)})")
        return 128 + stopped_by
    ended = peers is not None and (agent.first is not None or peers.trouble() is not None)
    cause = peers.settled() if peers is not None and ended else None
    if peers is not None and cause is not None and cause.node != peers.node and cause.status != PREEMPTED:
        _say(f"dist-train: {cause.words()}; exit code of the job: {exit_code(cause.status)}")
        return exit_code(cause.status)
    if agent.first is None:
        return OK if cause is None else exit_code(cause.status)
    if agent.first.status == PREEMPTED:
        return PREEMPTED
    lines, log = logs.last_lines(agent.first.rank)
    if told := _told(agent.first.error_file):
        lines = told
    if agent.restarts:
        _say(f"dist-train: no attempt is left after {agent.restarts} restarts")
    _say(failure(agent.first.rank, agent.first.status, lines, log if keeps_logs else ""))
    return exit_code(agent.first.status)


def _told(error_file: str) -> list[str]:
    """What a rank wrote about its own failure, in the format of torch's error files: the traceback, else the message."""
    try:
        message = json.loads(Path(error_file).read_text())["message"]
        text = message if isinstance(message, str) else message["extraInfo"].get("py_callstack") or message["message"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return str(text).rstrip().splitlines()


def _listed(agent: Agent) -> str:
    return ", ".join(str(status) for _, status in sorted(agent.statuses().items()))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
