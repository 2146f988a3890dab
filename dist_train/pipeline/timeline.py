"""When each rank of a pipeline does what: a schedule played with given costs, before anything runs. Pure, as `schedule` is.

The planner prices a run by it, pictures are drawn from it, and tests find in it every deadlock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from dist_train.pipeline.orders import COMPUTES, FREES, SENDS, Action, Kind
from dist_train.pipeline.schedule import Message, Schedule


class Sends(Enum):
    """What a send waits for. A schedule that survives one of these survives those before it."""

    BUFFERED = "buffered"  # nothing: messages are on their way at once, and wait at the receiver
    RENDEZVOUS = "rendezvous"  # a message leaves when its receive is posted; the sender computes on
    BLOCKING = "blocking"  # as rendezvous, and the sender stands still until the message has arrived


@dataclass(frozen=True)
class Costs:
    """What one micro-batch takes in one stage, all in the same unit of time; a whole backward takes the sum of its halves.

    `transfer`: of one message that leaves the stage. A channel carries one message after the other.
    """

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    transfer: float = 0.0

    def of(self, kind: Kind) -> float:
        """Of an action of computing."""
        return getattr(self, _COST[kind])

    @property
    def backward(self) -> float:
        return self.backward_input + self.backward_weight


_COST = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward_input",
    Kind.BACKWARD_WEIGHT: "backward_weight",
}


class Event(NamedTuple):
    """A rank computes."""

    action: Action
    start: float
    end: float


class Transfer(NamedTuple):
    """A message is on its way."""

    message: Message
    start: float
    end: float


class Deadlock(RuntimeError):
    """Ranks wait for each other in a circle, or one receives what another did not send."""


@dataclass(frozen=True)
class Timeline:
    """What `simulate` found. `events`: for each rank its actions of computing, in order; `transfers`: in no order."""

    schedule: Schedule
    events: tuple[tuple[Event, ...], ...]
    transfers: tuple[Transfer, ...]

    @property
    def end(self) -> float:
        """When the last rank is done."""
        return max(events[-1].end for events in self.events)

    def busy(self, rank: int) -> float:
        """The time in which `rank` computes."""
        return sum(event.end - event.start for event in self.events[rank])

    def idle(self, rank: int) -> float:
        """The rest of the time until the last rank is done."""
        return self.end - self.busy(rank)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they do not compute, 0 to 1."""
        return sum(map(self.idle, range(len(self.events)))) / (len(self.events) * self.end)

    def peak_in_flight(self, rank: int) -> int:
        """The most activations that `rank` keeps for backward at a time, each of one chunk for one micro-batch.

        A backward in halves is taken to need all of them until its second half is done.
        """
        held, peak = 0, 0
        for event in self.events[rank]:
            held += self.schedule.training and event.action.kind is Kind.FORWARD
            peak = max(peak, held)
            held -= event.action.kind in FREES
        return peak


def ideal_bubble(schedule: Schedule) -> float:
    """The bubble by formula, 0 to 1: all stages alike, transfers instant, F = I = W (in schedules without halves any F and B).

    The papers give it for p <= m. With fewer micro-batches than ranks a micro-batch comes to a rank's next chunk, or back to it,
    later than the rank is done with all others.
    """
    p, m, v = schedule.ranks, schedule.microbatches, schedule.chunks
    short = max(0, p - m)
    if p == 1:
        idle, busy = 0, 1
    elif schedule.name == "zero_bubble":
        idle, busy = p - 1 + short, 3 * m
    elif schedule.name == "zero_bubble_v":
        idle, busy = p - 1 + max(2 * short, 4 * short - p), 6 * m
    else:
        idle, busy = p - 1 + (v - 1) * short, v * m
    return idle / (idle + busy)


_UNIT = Costs()


def simulate(schedule: Schedule, costs: Costs | Sequence[Costs] = _UNIT, sends: Sends = Sends.RENDEZVOUS) -> Timeline:
    """Play `schedule` to its end. `costs`: of every stage, or of each, in order. Raises Deadlock."""
    of_stage = [costs] * schedule.stages if isinstance(costs, Costs) else list(costs)
    if len(of_stage) != schedule.stages:
        raise ValueError(f"costs of {len(of_stage)} stages for a pipeline of {schedule.stages}: give one for each.")
    play = _Play(schedule, of_stage, sends)
    waiting = {rank: play.rank(rank) for rank in range(schedule.ranks)}
    while waiting:
        before = play.steps
        reasons = {rank: next(actions, None) for rank, actions in waiting.items()}
        if None not in reasons.values() and play.steps == before:
            raise Deadlock(f"{schedule}: " + "; ".join(f"rank {rank} {reason}" for rank, reason in reasons.items()) + ".")
        waiting = {rank: actions for rank, actions in waiting.items() if reasons[rank] is not None}
    return Timeline(schedule, tuple(map(tuple, play.events)), tuple(play.transfers))


class _Channel:
    """From one rank to another: first sent, first received."""

    def __init__(self) -> None:
        self.sent: deque[tuple[Message, float]] = deque()
        self.posted: deque[tuple[Message, float]] = deque()
        self.free_at = 0.0


class _Play:
    """The state of a pipeline that runs. Ranks are generators that yield, while they wait, what for.

    Every time is a maximum over what must have been before, so it does not depend on which rank is resumed first.
    """

    def __init__(self, schedule: Schedule, costs: Sequence[Costs], sends: Sends) -> None:
        self.schedule, self.costs, self.sends = schedule, costs, sends
        self.events: list[list[Event]] = [[] for _ in range(schedule.ranks)]
        self.transfers: list[Transfer] = []
        self.steps = 0  # actions done by all ranks
        self._arrived: dict[Message | None, float] = {None: 0.0}
        self._channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)

    def rank(self, rank: int) -> Iterator[str]:
        now = 0.0
        for action in self.schedule.actions(rank):
            if action.kind in COMPUTES:
                needed = self.schedule.takes(rank, action)
                while needed not in self._arrived:
                    yield f"waits for the input of {action}"
                start = max(now, self._arrived[needed])
                now = start + self.costs[self.schedule.stage_of(rank, action.chunk)].of(action.kind)
                self.events[rank].append(Event(action, start, now))
                made = self.schedule.gives(rank, action)
                if made and self.schedule.receiver(made) == rank:
                    self._arrived[made] = now
            else:
                moved = self._pass(rank, action, now)
                if action.kind in SENDS and self.sends is Sends.BLOCKING:
                    while moved not in self._arrived:
                        yield f"cannot finish: {action}"
                    now = self._arrived[moved]
            self.steps += 1

    def _pass(self, rank: int, action: Action, now: float) -> Message:
        """A send or a receive begins; what can go on its way by that, goes."""
        message = self.schedule.message(rank, action)
        channel = self._channels[self.schedule.sender(message), self.schedule.receiver(message)]
        (channel.sent if action.kind in SENDS else channel.posted).append((message, now))
        while channel.sent and channel.posted:
            (sent, since), (posted, ready) = channel.sent.popleft(), channel.posted.popleft()
            if sent != posted:
                raise Deadlock(f"{self.schedule}: {sent} is sent to a rank that receives {posted} first.")
            start = max(since, channel.free_at, 0.0 if self.sends is Sends.BUFFERED else ready)
            channel.free_at = self._arrived[sent] = start + self.costs[sent.source].transfer
            self.transfers.append(Transfer(sent, start, channel.free_at))
        return message
