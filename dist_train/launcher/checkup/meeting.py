"""The ranks of an allocation meet in a store, tell what they found, and measure their links two by two.

Rank 0 leads: it says who came, what comes next and when, and waits for nobody longer than it was told to. A rank that
does not come, does not report or does not come back from a measurement is left out of what follows, and named. Nothing is
pickled: words in the store are JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistStoreError, PrefixStore, Store

from dist_train.comm.collectives import Collectives
from dist_train.launcher.checkup.links import Link, measure, rounds
from dist_train.launcher.checkup.machine import Report
from dist_train.launcher.checkup.network import interfaces, leads_to
from dist_train.launcher.folder import appears

MOST_RANKS = 16  # of which all pairs are measured; of more, the first rank of each host
MOST_ROUNDS = 128
_SEEN_SECONDS = 5.0  # in which a file of rank 0 appears on the other hosts
_SLACK_SECONDS = 60.0  # beyond what rank 0 may wait for others, for its own work on a busy machine
CAME, REPORT, MEASURE = "did not come", "came, and then did not report", "did not come back from the measurement of its link"


@dataclass
class Allocation:
    """What rank 0 knows in the end. `silent`: rank -> in which phase it was lost. `failed`: pair -> what was said of its link."""

    size: int
    seconds: float
    hosts: dict[int, str] = field(default_factory=dict)
    reports: dict[int, Report] = field(default_factory=dict)
    silent: dict[int, str] = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    failed: dict[tuple[int, int], str] = field(default_factory=dict)


Examine = Callable[[str, bool], Report]  # (a host of the same job or "", whether this rank is the first on its host)


def lead(store: Store, size: int, address: str, examine: Examine, run_dir: Path | None, seconds: float) -> Allocation:
    """Rank 0's part: collects everything. `address`: where the others met it."""
    with _Talk(store, 0, seconds) as talk:
        found = Allocation(size, seconds)
        words = talk.collect("hello", range(1, size))
        hello = {0: {"host": socket.gethostname(), "address": address}} | words
        found.hosts = {rank: word["host"] for rank, word in sorted(hello.items())}
        found.silent = {rank: CAME for rank in range(size) if rank not in hello}
        with _token(run_dir) as token:
            talk.say("present", {"hello": {str(rank): word for rank, word in hello.items()}, "token": token})
            found.reports[0] = examine(_peer(0, hello), True)
            for rank, word in talk.collect("report", sorted(words)).items():
                found.reports[rank] = Report.from_plain(word)
        found.silent |= {rank: REPORT for rank in words if rank not in found.reports}
        _lead_rounds(talk, found)
        talk.say("end", {})
        talk.part(len(found.reports) - len([rank for rank in found.silent if rank in found.reports]))
        return found


def attend(store: Store, rank: int, address: str, examine: Examine, seconds: float) -> None:
    """The part of every other rank. `address`: of rank 0. Raises DistStoreError when rank 0 falls silent."""
    with _Talk(store, rank, seconds) as talk:
        way = leads_to(address, interfaces())
        talk.say(f"hello/{rank}", {"host": socket.gethostname(), "address": way.address if way else ""})
        present = talk.hear("present")
        hello = {int(each): word for each, word in present["hello"].items()}
        if rank not in hello:
            raise DistStoreError(f"came later than the {seconds:g} s that rank 0 waits for each rank (--timeout)")
        report = examine(_peer(rank, hello), _is_first(rank, {each: word["host"] for each, word in hello.items()}))
        report = dataclasses.replace(report, sees_run_dir=not present["token"] or appears(Path(present["token"]), _SEEN_SECONDS))
        talk.say(f"report/{rank}", dataclasses.asdict(report))
        for number, pairs in enumerate(talk.hear("rounds")["rounds"]):
            dropped = talk.hear(f"go/{number}")["dropped"]
            if rank in dropped:
                raise DistStoreError("rank 0 has left this rank out, since it did not come back from a measurement in time")
            for a, b in pairs:
                if rank in (a, b) and not {a, b} & set(dropped):
                    talk.say(f"result/{number}/{rank}", _result(talk.store, a, b, rank, seconds))
        talk.hear("end")
        talk.part(0)


def _lead_rounds(talk: _Talk, found: Allocation) -> None:
    there = {rank: host for rank, host in found.hosts.items() if rank in found.reports}
    if len(there) > MOST_RANKS:
        there = {rank: host for rank, host in there.items() if _is_first(rank, there)}
    plan = rounds(there, MOST_ROUNDS)
    talk.say("rounds", {"rounds": plan})
    for number, pairs in enumerate(plan):
        dropped = sorted(found.silent)
        talk.say(f"go/{number}", {"dropped": dropped})
        pairs = [pair for pair in pairs if not set(pair) & set(dropped)]
        results: dict[int, Any] = {}
        for a, b in pairs:
            if a == 0:
                results[0] = _result(talk.store, a, b, 0, found.seconds)
        # the making of a connection and what goes over it have this time each, and rank 0 may have begun before them
        results |= talk.collect(f"result/{number}", [rank for pair in pairs for rank in pair if rank], 2 * found.seconds + 5)
        for a, b in pairs:
            found.silent |= {rank: MEASURE for rank in (a, b) if rank not in results}
            said = [results[rank] for rank in (a, b) if rank in results]
            trouble = [word["failed"] for word in said if "failed" in word]
            if len(said) == 2 and not trouble:
                found.links.append(Link(**results[a]["link"]))
            else:
                found.failed[a, b] = trouble[0] if trouble else "no answer"


def _result(store: Store, a: int, b: int, rank: int, seconds: float) -> dict[str, Any]:
    try:
        link = measure(store, a, b, rank, seconds, Collectives())
    except RuntimeError as error:
        return {"failed": (str(error).splitlines() or [type(error).__name__])[0][:200]}
    return {"link": None if link is None else dataclasses.asdict(link)}


class _Talk:
    """Words in the store, as JSON, and a watchdog: a store that stops answering blocks its clients for ever."""

    def __init__(self, store: Store, rank: int, seconds: float) -> None:
        self.store, self._rank, self._seconds = PrefixStore("doctor", store), rank, seconds
        self._patience = 4 * seconds + _SLACK_SECONDS  # for a word of rank 0, who waits up to twice `seconds` and 5 more
        self._fed, self._closed = time.monotonic(), threading.Event()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def say(self, key: str, word: dict[str, Any]) -> None:
        self.store.set(key, json.dumps(word))
        self._fed = time.monotonic()

    def hear(self, key: str) -> dict[str, Any]:
        """What rank 0 says here."""
        self.store.wait([key], timedelta(seconds=self._patience))
        self._fed = time.monotonic()
        return json.loads(self.store.get(key))

    def collect(self, key: str, ranks: Iterable[int], seconds: float | None = None) -> dict[int, Any]:
        """The words of these ranks, without those that did not come in `seconds`."""
        keys = {rank: f"{key}/{rank}" for rank in ranks}
        try:
            if keys:
                self.store.wait(list(keys.values()), timedelta(seconds=self._seconds if seconds is None else seconds))
        except DistStoreError:
            keys = {rank: name for rank, name in keys.items() if self.store.check([name])}
        self._fed = time.monotonic()
        return {rank: json.loads(self.store.get(name)) for rank, name in keys.items()}

    def part(self, others: int) -> None:
        """Rank 0, who may host the store, is the last to go; `others`: how many will leave after it said so."""
        until = time.monotonic() + 5.0
        count = self.store.add("left", 1)
        while self._rank == 0 and count < others and time.monotonic() < until:
            time.sleep(0.02)
            count = self.store.add("left", 0)

    def __enter__(self) -> _Talk:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()  # whatever happened: a process that goes on must not be ended for it later

    def _watch(self) -> None:
        while not self._closed.wait(1.0):
            if time.monotonic() - self._fed > self._patience + _SLACK_SECONDS:
                who = f"dist-train doctor: rank {self._rank} ({socket.gethostname()})"
                print(f"{who}: the store in which the ranks meet stopped answering", file=sys.stderr, flush=True)
                os._exit(1)


class _token:
    """A file of rank 0 in the run folder, or in the folder that will hold it, for the others to look for; "" without one."""

    def __init__(self, run_dir: Path | None) -> None:
        self._run_dir, self._file = run_dir, ""

    def __enter__(self) -> str:
        if self._run_dir is not None:
            folder = self._run_dir.expanduser().absolute()
            while not folder.is_dir() and folder != folder.parent:
                folder = folder.parent
            try:
                descriptor, self._file = tempfile.mkstemp(prefix=".doctor_", dir=folder)
                os.close(descriptor)
            except OSError:
                pass  # rank 0's own check of the folder says so
        return self._file

    def __exit__(self, *_: object) -> None:
        if self._file:
            os.unlink(self._file)


def _peer(rank: int, hello: dict[int, dict[str, str]]) -> str:
    """An address on another host than this rank's, "" when there is none."""
    return next((word["address"] for _, word in sorted(hello.items()) if word["host"] != hello[rank]["host"]), "")


def _is_first(rank: int, hosts: dict[int, str]) -> bool:
    return rank == min(each for each, host in hosts.items() if host == hosts[rank])
