"""What the launchers of a job's nodes tell each other: who is alive, which failure came first, and how the job ended.

torch's agents watch their own ranks only: the others hang in a collective until its timeout, and an agent whose store is gone
can stay for ever. Here every node gives a sign of life to the store of node 0, the first failure of an attempt is everybody's,
all nodes end with the same exit code, and a node that cannot end is ended from a thread of its own.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict, dataclass

from torch.distributed import Store

from dist_train.launcher.report import LOST, OK, exit_code, meaning

BEAT_SECONDS = 0.5
_SETTLE_SECONDS = 5.0  # beyond `lost_seconds`: until all have heard whose failure was the first
_GONE_SECONDS = 10.0  # what node 0 waits, at the end, for the others to read how the job ended
_SLACK_SECONDS = 60.0  # beyond the grace of the ranks, for everything that comes after them


@dataclass(frozen=True)
class Trouble:
    """What ends an attempt on all nodes. `status` is that of `rank` as in `agent.Failure`; without a rank, of the launcher."""

    node: int
    host: str
    rank: int | None
    status: int

    def words(self) -> str:
        if self.status == LOST:
            return f"node {self.node} ({self.host}) was lost: nothing was heard of it any more"
        who = "its launcher" if self.rank is None else f"rank {self.rank}"
        return f"node {self.node} ({self.host}) ended first: {who} {meaning(self.status)}"


class Peers:
    """This node among the nodes of a job. `store` is for the use of this object alone, since its calls may block.

    Methods may be called from one thread; none of them blocks but `leave`, for at most `grace_seconds` and a minute once
    something is wrong. A node that was not heard of for `lost_seconds` is lost, and the job with it.
    """

    def __init__(self, store: Store, node: int, nodes: int, lost_seconds: float, grace_seconds: float) -> None:
        self.node, self.hosts = node, ["not met yet"] * nodes
        self._complete = False
        self._store, self._lost_seconds, self._grace_seconds = store, lost_seconds, grace_seconds
        self._attempt = 0
        self._found: dict[int, Trouble] = {}  # attempt -> what ended it
        self._report: tuple[int, Trouble, bool] | None = None  # attempt, trouble, whether it may be another's
        self._suspected: dict[int, float] = {}  # node 0: attempt -> when it heard of a failure that may be another's
        self._heard = time.monotonic()  # when the store answered last
        self._broken: Trouble | None = None  # no store any more
        self._leaving = self._left = False
        self._leaving_since = 0.0
        self._verdict: int | None = None
        self._last_beat: dict[int, tuple[bytes, float]] = {}
        self._closed = threading.Event()
        threading.Thread(target=self._talk, name="peers", daemon=True).start()
        threading.Thread(target=self._guard, name="peers-guard", daemon=True).start()

    def met(self, hosts: list[str]) -> None:
        """All nodes have arrived and `beat<node>` is in the store for each: from now on they are missed when they are silent."""
        self.hosts, self._complete = hosts, True

    def attempt(self, number: int) -> None:
        """The ranks are about to be started for the `number`th time, from 0."""
        self._attempt = number

    def report(self, rank: int | None, status: int, told: bool) -> None:
        """This attempt ended here. `told`: the rank wrote why, so it may be a victim: of a rank that wrote nothing, or of a node
        that is gone. It counts once every node has given a sign of life since then, and nobody has reported otherwise."""
        if self._report is None or self._report[0] < self._attempt:
            self._report = self._attempt, Trouble(self.node, self.hosts[self.node], rank, status), told

    def trouble(self) -> Trouble | None:
        """What ended the present attempt, wherever it happened; None as long as nothing did."""
        if self._broken is None and not self._closed.is_set() and time.monotonic() - self._heard > self._lost_seconds:
            self._broken = Trouble(0, self.hosts[0], None, LOST)
        return self._found.get(self._attempt) or self._broken

    def settled(self) -> Trouble | None:
        """`trouble`, after waiting for the nodes to agree which one was the first; None when they did not in good time."""
        until = time.monotonic() + self._lost_seconds + _SETTLE_SECONDS
        while (found := self.trouble()) is None and time.monotonic() < until:
            time.sleep(0.05)
        return found

    def leave(self, code: int) -> int:
        """No rank runs here any more and none will; wait for the other nodes and return the exit code of the whole job."""
        if code != OK and self.trouble() is None:
            self.report(None, code, told=False)
        self._leaving, self._leaving_since = True, time.monotonic()
        ending: float | None = None
        while self._verdict is None and self._broken is None:
            if ending is None and self.trouble() is not None:
                ending = time.monotonic()
            if ending is not None and time.monotonic() - ending > self._grace_seconds + _SLACK_SECONDS / 2:
                break
            time.sleep(0.05)
        until = time.monotonic() + _GONE_SECONDS + 2 * BEAT_SECONDS
        while self._verdict is not None and self._broken is None and not self._closed.is_set() and time.monotonic() < until:
            time.sleep(0.05)
        self._closed.set()
        if self._verdict is not None:
            return self._verdict
        found = self.trouble()
        return code or (exit_code(found.status) if found else LOST)

    def _talk(self) -> None:
        beat = 0
        try:
            while not self._closed.wait(BEAT_SECONDS):
                beat += 1
                self._store.set(f"beat{self.node}", str(beat))
                self._share_trouble()
                silent = 0
                if self.node == 0 and self._complete:
                    silent = self._silent()
                    self._clear_suspicion()
                self._heard = time.monotonic()
                if self._leaving:
                    self._part(silent)
        except RuntimeError:  # torch's errors of a store whose host is gone
            if not self._closed.is_set():
                self._broken = Trouble(0, self.hosts[0], None, LOST)

    def _share_trouble(self) -> None:
        if self._report is not None and self._report[0] not in self._found:
            attempt, trouble, told = self._report
            if told and not self._store.check([f"trouble{attempt}"]):
                self._store.compare_set(f"suspect{attempt}", "", json.dumps(asdict(trouble)))
            else:
                self._settle(attempt, trouble)
        elif (attempt := self._attempt) not in self._found and self._store.check([f"trouble{attempt}"]):
            self._found[attempt] = Trouble(**json.loads(self._store.get(f"trouble{attempt}")))

    def _silent(self) -> int:
        """Node 0: how many nodes gave no new sign of life for too long; the first of them is the job's trouble."""
        now, others = time.monotonic(), range(1, len(self.hosts))
        names = [f"beat{node}" for node in others]
        for node, value in zip(others, self._store.multi_get(names) if names else []):
            if self._last_beat.get(node, (b"", 0.0))[0] != value:
                self._last_beat[node] = value, now
        silent = [node for node, (_, when) in self._last_beat.items() if now - when > self._lost_seconds]
        if silent and self._attempt not in self._found:
            self._settle(self._attempt, Trouble(silent[0], self.hosts[silent[0]], None, LOST))
        return len(silent)

    def _clear_suspicion(self) -> None:
        """Node 0: the first failure that may have been another's is what it says, now that no node can have been lost with it."""
        for attempt in set(range(self._attempt + 1)) - self._found.keys():
            if self._store.check([f"suspect{attempt}"]):
                since = self._suspected.setdefault(attempt, time.monotonic())
                if time.monotonic() - since > 2 * BEAT_SECONDS and all(beat > since for _, beat in self._last_beat.values()):
                    self._settle(attempt, Trouble(**json.loads(self._store.get(f"suspect{attempt}"))))

    def _settle(self, attempt: int, trouble: Trouble) -> None:
        """Whoever comes first says for all what ended the attempt."""
        first = self._store.compare_set(f"trouble{attempt}", "", json.dumps(asdict(trouble)))
        self._found[attempt] = Trouble(**json.loads(first))

    def _part(self, silent: int) -> None:
        """Once nothing is left to report: node 0 says how it ended when all have left, and is the last to go."""
        if self._report is not None and self._report[0] not in self._found:
            return
        if not self._left:
            self._left = True
            self._store.add("left", 1)
        if self.node == 0 and self._verdict is None and self._store.add("left", 0) + silent >= self._expected():
            found = self._found.get(self._attempt)
            self._store.set("verdict", str(exit_code(found.status) if found else OK))
        if self._verdict is None and self._store.check(["verdict"]):
            self._verdict = int(self._store.get("verdict"))
            self._store.add("read", 1)
        if self._verdict is not None and (self.node != 0 or self._store.add("read", 0) + silent >= len(self.hosts)):
            self._closed.set()

    def _expected(self) -> int:
        """All nodes; of those that never came, only for a while (the store has counted who came)."""
        if self._complete or time.monotonic() - self._leaving_since < _GONE_SECONDS:
            return len(self.hosts)
        return self._store.add("arrived", 0)

    def _guard(self) -> None:
        """What blocks this process after the job has failed (a store behind a dead link, a driver) does not block it for ever."""
        since: tuple[Trouble, float] | None = None
        while not self._closed.wait(1.0):
            found = self.trouble()
            if found is None or since is None or since[0] is not found:
                since = None if found is None else (found, time.monotonic())
            elif time.monotonic() - since[1] > self._grace_seconds + _SLACK_SECONDS:
                print(f"dist-train: {found.words()}; this node did not end in time and is ended", file=sys.stderr, flush=True)
                os._exit(exit_code(found.status))  # the reaper sees the pipe close and ends the ranks
