"""What the ranks of a pipeline compute, in which order: a generator of `Action`s for each schedule (see `schedule`).

Their arguments are always p ranks, this rank, v chunks on each, m micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import NamedTuple


class Kind(Enum):
    """What an action does. The values are short names for pictures and logs."""

    FORWARD = "F"  # keeps the chunk's activations of this micro-batch
    BACKWARD = "B"  # both of the next two at once; frees the activations
    BACKWARD_INPUT = "I"  # the gradient of the chunk's input, which the stage before waits for
    BACKWARD_WEIGHT = "W"  # the gradients of the chunk's weights, which nobody waits for; frees the activations
    SEND_ACTIVATION = "send activation"  # the chunk's output, to the next stage
    RECV_ACTIVATION = "recv activation"  # the chunk's input, from the stage before
    SEND_GRADIENT = "send gradient"  # of the chunk's input, to the stage before
    RECV_GRADIENT = "recv gradient"  # of the chunk's output, from the next stage


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does with one of its chunks (0 .. chunks-1) for one micro-batch (0 .. microbatches-1)."""

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value} of chunk {self.chunk} for micro-batch {self.microbatch}"


COMPUTES = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
SENDS = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT})
FREES = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})  # the activations that a forward kept


def _one_by_one(p: int, rank: int, v: int, m: int) -> Iterator[Action]:
    """F B F B: for a single rank, which waits for nobody."""
    for i in range(m):
        yield from (Action(Kind.FORWARD, chunk, i) for chunk in range(v))
        yield from (Action(Kind.BACKWARD, chunk, i) for chunk in reversed(range(v)))


def _gpipe(p: int, rank: int, v: int, m: int) -> Iterator[Action]:
    """All forwards, then all backwards."""
    for chunk in range(v):
        yield from (Action(Kind.FORWARD, chunk, i) for i in range(m))
    for chunk in reversed(range(v)):
        yield from (Action(Kind.BACKWARD, chunk, i) for i in range(m))


def _interleaved(p: int, rank: int, v: int, m: int) -> Iterator[Action]:
    """Some forwards to warm up, then one forward, one backward, then the backwards that are left (1F1B at v = 1).

    A rank takes a group of micro-batches through its first chunk, then the same group through its next one. A group that is
    shorter than p leaves ranks waiting for its return, and the paper has groups of exactly p, which must divide m. Here m is
    divided into m // p groups of p or more, as equal as can be, and no rank waits longer than in the paper, for any m.

    More warm-up than p - 1 - rank is not needed where transfers are instant, and 1F1B has no more. With several chunks messages
    are many, and twice as much (the paper's) leaves each of them the time of an action to arrive in.
    """
    groups = max(1, m // p)
    bounds = [m * k // groups for k in range(groups + 1)]
    forwards = [Action(Kind.FORWARD, c, i) for a, b in pairwise(bounds) for c in range(v) for i in range(a, b)]
    backwards = [Action(Kind.BACKWARD, c, i) for a, b in pairwise(bounds) for c in reversed(range(v)) for i in range(a, b)]
    longest = -(-m // groups)
    warmup = min(v * m, (v - 1) * longest + (p - 1 - rank) * (1 if v == 1 else 2))
    yield from forwards[:warmup]
    for k, backward in enumerate(backwards):
        yield from forwards[warmup + k : warmup + k + 1]
        yield backward


def _zero_bubble(p: int, rank: int, v: int, m: int) -> Iterator[Action]:
    """1F1B with the inputs' half of backward only."""
    for action in _interleaved(p, rank, v, m):
        yield replace(action, kind=Kind.BACKWARD_INPUT) if action.kind is Kind.BACKWARD else action


def _zero_bubble_v(p: int, rank: int, v: int, m: int) -> Iterator[Action]:
    """A V of two chunks, again with the inputs' half of backward only.

    When all runs evenly every rank repeats F0 I0 W0 F1 I1 W1, one tick each, and the next rank does so one tick later. So a
    micro-batch comes down the first chunks (F0) and down the second ones (I1) by a rank a tick, and up (F1, I0) by a rank in
    five, the next tick with that remainder by 6. Those ticks, sorted, are the order for any m; what begins and ends a step
    closes up by itself, since a rank does not wait for ticks but for messages.
    """
    down, up = rank, 5 * (p - 1 - rank)
    turn = p - 1 + 3  # F1 on the last rank, three ticks after its F0
    back = turn + 5 * (p - 1) + 1  # I1 on the first rank, one tick after its F1
    last = back + p - 1 + 3  # I0 on the last rank, three ticks after its I1
    actions = {}
    for i in range(m):
        actions[6 * i + down] = Action(Kind.FORWARD, 0, i)
        actions[6 * i + turn + up] = Action(Kind.FORWARD, 1, i)
        actions[6 * i + back + down] = Action(Kind.BACKWARD_INPUT, 1, i)
        actions[6 * i + last + up] = Action(Kind.BACKWARD_INPUT, 0, i)
    yield from (actions[tick] for tick in sorted(actions))


class Recipe(NamedTuple):
    """A row of `SCHEDULES`."""

    order: Callable[[int, int, int, int], Iterator[Action]]
    splits: bool = False  # backward comes in two halves
    turns: bool = False  # the stages are laid out as a V


ONE_RANK = Recipe(_one_by_one)  # whatever the name
SCHEDULES = {
    "gpipe": Recipe(_gpipe),
    "1f1b": Recipe(_interleaved),
    "interleaved": Recipe(_interleaved),
    "zero_bubble": Recipe(_zero_bubble, splits=True),
    "zero_bubble_v": Recipe(_zero_bubble_v, splits=True, turns=True),
}
