"""The link between two ranks, measured with what training uses: gloo's sends and receives over a group of the two."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dist_train.comm.collectives import Collectives
from dist_train.mesh.mesh import Group

PINGS = 20
FIRST_BYTES, MOST_BYTES = 64 * 2**10, 64 * 2**20
ENOUGH_SECONDS = 0.05  # for a transfer to say something about the link


@dataclass(frozen=True)
class Link:
    """Between ranks `a` and `b`: bytes per second each way, seconds of the shortest message one way, and their clocks."""

    a: int
    b: int
    a_to_b: float
    b_to_a: float
    latency: float
    offset: float  # seconds that b's clock is ahead of a's
    error: float  # bound of what the offset may be wrong by: half the shortest round trip


def measure(
    store: dist.Store, a: int, b: int, rank: int, seconds: float, comm: Collectives, clock: Callable[[], int] = time.time_ns
) -> Link | None:
    """Called by ranks `a` and `b` at once. The link on `a`, None on `b`. `clock`: nanoseconds of this rank's wall clock.

    Raises RuntimeError (of which torch's own are kinds) when the other does not answer; `seconds` bound the making of the
    connection, and again what follows.
    """
    index = (a, b).index(rank)
    gloo: Any = dist.ProcessGroupGloo(dist.PrefixStore(f"pair/{a}-{b}", store), index, 2, timedelta(seconds=seconds))
    end = _End(Group("pair", (a, b), index, gloo), comm, time.monotonic() + seconds)
    if index == 0:
        trip, offset = end.ping(clock)
        a_to_b = end.push(trip)
        b_to_a = end.pull()
        return Link(a, b, a_to_b, b_to_a, trip / 2, offset, trip / 2)
    end.answer(clock)
    end.drain()
    end.tell(end.push(end.trip))
    return None


class _End:
    """This rank's end of the link."""

    def __init__(self, group: Group, comm: Collectives, until: float) -> None:
        self.group, self.comm, self.until = group, comm, until
        self.other = 1 - group.index
        self.trip = 0.0

    def send(self, x: torch.Tensor) -> None:
        if time.monotonic() > self.until:
            raise RuntimeError("the link is too slow to be measured in time")
        self.comm.send(x, self.group, self.other).wait()

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        self.comm.receive(out, self.group, self.other).wait()
        return out

    def tell(self, value: float) -> None:
        self.send(torch.tensor([value], dtype=torch.float64))

    def hear(self) -> float:
        return self.receive(torch.empty(1, dtype=torch.float64)).item()

    def ping(self, clock: Callable[[], int]) -> tuple[float, float]:
        """Shortest round trip in seconds, and the other clock's lead as that trip shows it (Cristian, 1989)."""
        best, offset, word = float("inf"), 0.0, torch.zeros(1, dtype=torch.int64)
        for _ in range(PINGS):
            begin, sent = time.perf_counter(), clock()
            self.send(word)
            self.receive(word)
            trip = time.perf_counter() - begin
            if trip < best:
                best, offset = trip, (word.item() - sent) / 1e9 - trip / 2
        self.tell(best)
        return best, offset

    def answer(self, clock: Callable[[], int]) -> None:
        word = torch.zeros(1, dtype=torch.int64)
        for _ in range(PINGS):
            self.receive(word)
            word[0] = clock()
            self.send(word)
        self.trip = self.hear()

    def push(self, trip: float) -> float:
        """Bytes per second to the other end: transfers four times as large each, until one takes long enough."""
        size = FIRST_BYTES
        while True:
            payload = torch.zeros(size, dtype=torch.uint8)
            self.tell(size)
            begin = time.perf_counter()
            self.send(payload)
            self.hear()
            taken = time.perf_counter() - begin
            if taken > ENOUGH_SECONDS or size >= MOST_BYTES:
                self.tell(0)
                return size / max(taken - trip / 2, taken / 2)  # the answer's way back is none of the transfer's
            size *= 4

    def drain(self) -> None:
        while size := int(self.hear()):
            self.receive(torch.empty(size, dtype=torch.uint8))
            self.tell(size)

    def pull(self) -> float:
        """The other's `push`, and what it found."""
        self.drain()
        return self.hear()


def rounds(hosts: dict[int, str], most: int) -> list[list[tuple[int, int]]]:
    """All pairs of ranks in rounds whose pairs run at once: no host is in two, so that none shares its way with another.

    At most `most` rounds, in which every rank meets as many others as any (the circle method of tournaments).
    """
    ranks: list[int | None] = [*sorted(hosts), *([None] if len(hosts) % 2 else [])]
    found: list[list[tuple[int, int]]] = []
    for _ in range(len(ranks) - 1):
        half = len(ranks) // 2
        pairs = zip(ranks[:half], reversed(ranks[half:]))
        left = [(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None]
        while left and len(found) < most:
            busy: set[str] = set()
            now = []
            for pair in left:
                if not busy & {hosts[rank] for rank in pair}:
                    busy |= {hosts[rank] for rank in pair}
                    now.append(pair)
            found.append(now)
            left = [pair for pair in left if pair not in now]
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]
    return found


def clock_offsets(links: list[Link], start: int) -> dict[int, tuple[float, float]]:
    """Rank -> (seconds ahead of `start`'s clock, bound of the error), by the chain of links with the least error."""
    known, open_ends = {}, {start: (0.0, 0.0)}
    while open_ends:
        rank = min(open_ends, key=lambda each: open_ends[each][1])
        offset, error = known[rank] = open_ends.pop(rank)
        for link in links:
            for here, there, sign in ((link.a, link.b, 1), (link.b, link.a, -1)):
                if here == rank and there not in known:
                    reached = (offset + sign * link.offset, error + link.error)
                    if there not in open_ends or reached[1] < open_ends[there][1]:
                        open_ends[there] = reached
    return known
