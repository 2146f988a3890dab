"""The elastic agent of this node, with what it lacks: who failed first, whole groups ended, one stop signal for all."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from dist_train.launcher.logs import RankLogs
from dist_train.launcher.peers import Peers
from dist_train.launcher.reaper import Reaper
from dist_train.launcher.report import BAD_INPUT, LOST, OK, PREEMPTED

SIBLING_SECONDS = 5.0  # what ranks are given after one of them has failed: they cannot save without it
STOP_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")


@dataclass(frozen=True)
class Failure:
    """A rank that ended by itself with another status than 0; `status` is negative for a signal."""

    rank: int
    status: int
    error_file: str


class Agent(LocalElasticAgent):
    """Starts, watches and ends the ranks of this node.

    Whatever signal stops the launcher, ranks get SIGTERM, `grace_seconds`, then SIGKILL; a second SIGINT kills at once.
    When a rank ends, the processes it started end with it. Bad input and a preemption are not tried again. With `peers` the
    trouble of any node ends the attempt on all of them.
    """

    def __init__(self, spec: WorkerSpec, logs: RankLogs, reaper: Reaper, grace_seconds: float, peers: Peers | None) -> None:
        super().__init__(spec, logs)
        self._grace_seconds, self._reaper, self._peers = grace_seconds, reaper, peers
        self._ended: dict[int, int] = {}  # local rank -> status
        self._killed_by: signal.Signals | None = None
        self.first: Failure | None = None
        self.restarts = 0

    def statuses(self) -> dict[int, int | None]:
        """How the ranks of the last attempt ended, by local rank."""
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return {local_rank: handler.proc.returncode for local_rank, handler in handlers.items()}

    @property
    def all_had_ended(self) -> bool:
        """True when every rank of the last attempt ended by itself, before anybody asked it to."""
        return bool(self._ended) and len(self._ended) == len(self.statuses())

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._killed_by is not None:  # it came while the last attempt was being ended
            raise SignalException("stopped between attempts", self._killed_by)
        self.restarts = worker_group.spec.max_restarts - self._remaining_restarts
        self._ended, self.first = {}, None
        if self._peers is not None:
            self._peers.attempt(self.restarts)
        started = super()._start_workers(worker_group)
        self._reaper.watch(started.values())
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        # One look decides. Elastic's own, after ours, would find the rank that died between the two, and the job would end
        # with a failure that nobody noted: with 0.
        self._note_ends(worker_group)
        elsewhere = self._peers.trouble() if self._peers is not None and self.first is None else None
        status = self.first.status if self.first is not None else elsewhere.status if elsewhere is not None else OK
        if status != OK:
            if status in (BAD_INPUT, LOST, PREEMPTED):
                self._remaining_restarts = 0
            patience = self._grace_seconds if status == PREEMPTED else min(SIBLING_SECONDS, self._grace_seconds)
            self._end_all(patience)
            return RunResult(WorkerState.FAILED)
        if self.all_had_ended:
            return RunResult(WorkerState.SUCCEEDED, return_values={worker.global_rank: None for worker in worker_group.workers})
        return RunResult(WorkerState.HEALTHY)

    def _exit_barrier(self) -> None:
        if self._peers is None:  # otherwise nodes part by `Peers.leave`, which a dead node does not hold up
            super()._exit_barrier()

    def _note_ends(self, worker_group: WorkerGroup) -> None:
        assert self._pcontext is not None
        failures = []
        for local_rank, pid in self._pcontext.pids().items():
            if local_rank in self._ended or (status := _status(pid)) is None:
                continue
            _kill_group(pid)  # its children; it is still a zombie, so the number can belong to nobody else
            self._ended[local_rank] = status
            if status != OK:
                file = self._pcontext.error_files[local_rank]
                failures.append(Failure(worker_group.workers[local_rank].global_rank, status, file))
        if failures and self.first is None:
            self.first = min(failures, key=_when)
            if self._peers is not None:
                self._peers.report(self.first.rank, self.first.status, os.path.exists(self.first.error_file))

    def _end_all(self, seconds: float) -> None:
        assert self._pcontext is not None
        self._pcontext.close(signal.SIGTERM, max(1, round(seconds)))
        for pid in self._pcontext.pids().values():
            _kill_group(pid)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 30) -> None:
        for name in STOP_SIGNALS:
            signal.signal(getattr(signal, name), self._stop_again)
        if self._pcontext is not None:
            self._end_all(self._grace_seconds)
        super()._shutdown()

    def _stop_again(self, number: int, frame: FrameType | None) -> None:
        self._killed_by = signal.Signals(number)
        if number == signal.SIGINT and isinstance(sys.exc_info()[1], SignalException) and self._pcontext is not None:
            for local_rank, pid in self._pcontext.pids().items():
                if self.statuses()[local_rank] is None:
                    _kill_group(pid)


def _status(pid: int) -> int | None:
    """How this child ended (-n for signal n), None while it runs. Does not reap it: elastic does."""
    try:
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def _when(failure: Failure) -> tuple[float, int]:
    # Among ranks found dead together, one that left no error file died of something from outside, and the others of it;
    # a signal before an exit code, for the same reason.
    try:
        return os.path.getmtime(failure.error_file), 0
    except OSError:
        return 0.0, 0 if failure.status < 0 else 1
