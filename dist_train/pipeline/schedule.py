"""Pipeline schedules: what each rank computes, sends and receives, in which order. Pure: no tensors, no processes.

A model is cut into stages, one after the other; a rank holds one or more of them, its chunks. A schedule is a generator
of the `Action`s of one rank, and whoever runs, simulates, prices or draws a pipeline reads the same actions. With p ranks, v
chunks on each, m >= p micro-batches in g = m // p groups, and F, I, W the times of a chunk's forward and of its two halves of
backward:

    name            chunks  a rank idles for           rank r holds at most, of one chunk for one micro-batch each
    gpipe           v       (p-1) (F + I + W)          v m                           arXiv:1811.06965; v > 1: 2211.05953
    1f1b            1       (p-1) (F + I + W)          p - r                         arXiv:2006.09503
    interleaved     v       (p-1) (F + I + W)          (v-1) ceil(m/g) + 2(p-r) - 1  arXiv:2104.04473
    zero_bubble     1       (p-1) (F + I - W)          p                             arXiv:2401.10241, ZB-H1; F = I = W
    zero_bubble_v   2       (p-1) F                    2 p                           arXiv:2401.10241, ZB-V;  F = I = W

A chunk is 1/v of a rank's layers, so at the same model the times of a row with v chunks are v times shorter. All schedules take
any m (`timeline.ideal_bubble` tells what m < p costs), and a single rank always runs F B F B.

What holds of every schedule: a chunk's forwards run in the order of micro-batches, and so do the actions that add to its weights'
gradients. So sums have one order on any number of ranks and with any schedule, that of one process that takes the
micro-batches one by one. (A weight that two stages share is summed within each of them first, so there bits may differ.)

Sends and receives follow from the orders of computing by three rules. They speak of ticks: when each action would start if all
took the same time and messages none.

    1. A result is sent right after the action that made it. A send is asynchronous: the rank computes on, and waits for its sends
       when the step ends or when it wants the memory.
    2. A receive only gives a buffer. It is posted before the rank's first action of the tick in which the message is made,
       or of a later one, and at the latest one action ahead of the one that takes the message, which then waits for it.
    3. From one rank to another goes one channel, without tags: receives are posted in the order of the sends. One that rule 2
       wants takes along those that are due before it.

So nobody waits in a circle, though no transport buffers anything, and even if sends block until they are received. Look at the
rank that is stuck at the earliest tick. An action is stuck for a message that was made at an earlier tick, and a send
from tick t for a rank that has not come to tick t: either way another rank is stuck earlier still. The tests
also search all small pipelines for a counterexample.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from dist_train.config.layouts import CHUNKS
from dist_train.pipeline.orders import COMPUTES, FREES, ONE_RANK, SCHEDULES, Action, Kind, Recipe


class Message(NamedTuple):
    """What goes from one stage to a neighbour: an activation to the next one, a gradient to the one before."""

    source: int
    target: int
    microbatch: int


_ENDS = {  # source and target of a message, relative to the stage that sends or receives it
    Kind.SEND_ACTIVATION: (0, 1),
    Kind.RECV_ACTIVATION: (-1, 0),
    Kind.SEND_GRADIENT: (0, -1),
    Kind.RECV_GRADIENT: (1, 0),
}


@dataclass(frozen=True)
class Schedule:
    """One step of a pipeline. `ranks`: the degree of mesh.pp; `chunks`: stages on each rank, so ranks × chunks in all.

    With `training` off (evaluation) there are the forwards only, in the same order, and nothing is kept for backward.
    Raises ValueError for names and numbers that are no schedule.
    """

    name: str
    ranks: int
    microbatches: int
    chunks: int = 1
    training: bool = True

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise ValueError(f"pipeline={self.name}: no such schedule. Choose one of: {', '.join(SCHEDULES)}.")
        for what in ("ranks", "microbatches", "chunks"):
            if getattr(self, what) < 1:
                raise ValueError(f"pipeline={self.name} with {what}={getattr(self, what)}: there must be at least 1.")
        if CHUNKS.get(self.name) not in (None, self.chunks):
            raise ValueError(
                f"pipeline={self.name} with {self.chunks} chunks on each rank: this schedule has exactly {CHUNKS[self.name]}. "
                f"Set that, or choose another of: {', '.join(SCHEDULES)}."
            )

    @property
    def _recipe(self) -> Recipe:
        return SCHEDULES[self.name]

    @property
    def splits(self) -> bool:
        """Whether backward comes in two halves."""
        return self.ranks > 1 and self._recipe.splits

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    def stage_of(self, rank: int, chunk: int) -> int:
        """Where in the model a chunk lies. A loop goes round the ranks; a V turns, so rank 0 has the first and the last stage."""
        back = self._recipe.turns and chunk % 2 == 1
        return chunk * self.ranks + (self.ranks - 1 - rank if back else rank)

    def place_of(self, stage: int) -> tuple[int, int]:
        """The (rank, chunk) of a stage: the inverse of `stage_of`. Stage 0 takes the data, stage `stages - 1` makes the loss."""
        chunk, place = divmod(stage, self.ranks)
        back = self._recipe.turns and chunk % 2 == 1
        return (self.ranks - 1 - place if back else place), chunk

    def actions(self, rank: int) -> Iterator[Action]:
        """All that `rank` does in one step, in order."""
        for action, receives in zip(self.orders[rank], self._receives(rank)):
            yield from receives
            yield action
            if (message := self.gives(rank, action)) and self.receiver(message) != rank:
                kind = Kind.SEND_ACTIVATION if action.kind is Kind.FORWARD else Kind.SEND_GRADIENT
                yield Action(kind, action.chunk, action.microbatch)

    @cached_property
    def orders(self) -> tuple[tuple[Action, ...], ...]:
        """What each rank computes, in order: `actions` without sends and receives."""
        return tuple(tuple(action for _, action in rank) for rank in self._ticks)

    def takes(self, rank: int, action: Action) -> Message | None:
        """The message that an action of computing begins with. None: it begins with data, or with what this rank keeps."""
        stage = self.stage_of(rank, action.chunk)
        if action.kind is Kind.FORWARD:
            return Message(stage - 1, stage, action.microbatch) if stage > 0 else None
        if action.kind is Kind.BACKWARD_WEIGHT or stage == self.stages - 1:
            return None
        return Message(stage + 1, stage, action.microbatch)

    def gives(self, rank: int, action: Action) -> Message | None:
        """The message that an action of computing ends with."""
        stage = self.stage_of(rank, action.chunk)
        if action.kind is Kind.FORWARD:
            return Message(stage, stage + 1, action.microbatch) if stage < self.stages - 1 else None
        if action.kind is Kind.BACKWARD_WEIGHT or stage == 0:
            return None
        return Message(stage, stage - 1, action.microbatch)

    def message(self, rank: int, action: Action) -> Message:
        """What a send or receive moves."""
        stage, (source, target) = self.stage_of(rank, action.chunk), _ENDS[action.kind]
        return Message(stage + source, stage + target, action.microbatch)

    def sender(self, message: Message) -> int:
        """The rank that a message comes from."""
        return self.place_of(message.source)[0]

    def receiver(self, message: Message) -> int:
        """The rank that a message goes to; where it is the sender itself (the turn of a V), nothing is sent."""
        return self.place_of(message.target)[0]

    def _receives(self, rank: int) -> list[deque[Action]]:
        """The receives to post before each of the rank's actions of computing, by rules 2 and 3."""
        ticks = [tick for tick, _ in self._ticks[rank]]
        wanted = {self.takes(rank, action): place for place, action in enumerate(self.orders[rank])}
        senders = {self.sender(message) for message in wanted if message} - {rank}
        posted: list[deque[Action]] = [deque() for _ in ticks]
        for sender in sorted(senders):
            due = len(ticks)
            for tick, maker in reversed(self._ticks[sender]):
                message = self.gives(sender, maker)
                if message and message in wanted:
                    place = wanted[message]
                    due = min(due, bisect_left(ticks, tick), max(0, place - 1))
                    taker = self.orders[rank][place]
                    kind = Kind.RECV_ACTIVATION if taker.kind is Kind.FORWARD else Kind.RECV_GRADIENT
                    posted[due].appendleft(Action(kind, taker.chunk, taker.microbatch))
        return posted

    @cached_property
    def _ticks(self) -> list[list[tuple[int, Action]]]:
        """What each rank computes, in order, and at which tick. It does what comes next when the input is there.

        Where a backward comes in halves, the weights' half, which nobody waits for, is put in here: where a rank would wait,
        or would hold more activations than rank 0 holds under 1F1B. Each takes a tick, as in the papers' hand-made schedules.
        """
        recipe = self._recipe if self.ranks > 1 else ONE_RANK
        todo = [deque(recipe.order(self.ranks, rank, self.chunks, self.microbatches)) for rank in range(self.ranks)]
        weights: list[deque[Action]] = [deque() for _ in todo]
        done: list[list[tuple[int, Action]]] = [[] for _ in todo]
        held = [0] * self.ranks
        made: set[Message | None] = {None}
        tick = 0
        while any(todo) or any(weights):
            sent = set()
            for rank, order in enumerate(todo):
                full = recipe.splits and held[rank] == self.stages
                if order and self.takes(rank, order[0]) in made and not (full and order[0].kind is Kind.FORWARD):
                    action = order.popleft()
                elif weights[rank]:
                    action = weights[rank].popleft()
                else:
                    continue
                if action.kind is Kind.BACKWARD_INPUT:
                    weights[rank].append(Action(Kind.BACKWARD_WEIGHT, action.chunk, action.microbatch))
                held[rank] += (action.kind is Kind.FORWARD) - (action.kind in FREES)
                done[rank].append((tick, action))
                sent.add(self.gives(rank, action))
            if not sent:
                raise RuntimeError(f"{self}: all ranks wait; the orders of computing contradict each other.")
            made |= sent
            tick += 1
        kinds = COMPUTES if self.training else {Kind.FORWARD}
        return [[(tick, action) for tick, action in rank if action.kind in kinds] for rank in done]
