"""Where every parameter lies in which flat bucket. Pure integers: no tensors, no processes.

Buckets are filled in the order in which backward produces gradients (the reverse of registration), so that a bucket is
complete, and can be reduced, while backward still runs. Within a bucket the slots of one optimizer group are neighbours:
a *segment*. Weight decay differs between segments, yet they share one collective. (A bucket for each group instead would
double the collectives, and the one with the norms would stay open until backward ends.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dist_train.zero.policy import ShardPolicy

# Elements. Segments and shards begin and end at multiples of it, so an optimizer's vector loop never has a tail: tails round
# differently, and with other shards other elements would be tails.
ALIGNMENT = 64


@dataclass(frozen=True)
class ParamSpec:
    """What the layout must know of a parameter. `group` names its optimizer group (decay, no_decay)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """One parameter's place in its bucket, in elements."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


@dataclass(frozen=True)
class Segment:
    """The neighbouring slots of a bucket that belong to one optimizer group: its elements `start..stop`, some of them padding."""

    group: str
    slots: tuple[Slot, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class BucketLayout:
    """A flat buffer of `numel` elements (padding at the end), cut into `shards` equal slices."""

    dtype: str
    segments: tuple[Segment, ...]
    numel: int
    shards: int

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for segment in self.segments for slot in segment.slots)

    @property
    def shard_numel(self) -> int:
        return self.numel // self.shards

    def shard(self, index: int) -> slice:
        """The elements that data rank `index` owns."""
        return slice(index * self.shard_numel, (index + 1) * self.shard_numel)


def plan_buckets(specs: Sequence[ParamSpec], bucket_bytes: float, itemsize: int, shards: int) -> list[BucketLayout]:
    """Lay parameters out in buckets of about `bucket_bytes` (of `itemsize`-byte elements), in order of completion.

    `specs` come in registration order. A parameter larger than a bucket has one of its own; nothing is ever split.
    """
    limit = bucket_bytes / itemsize
    open_: dict[str, list[ParamSpec]] = {}
    done: list[list[ParamSpec]] = []
    for spec in reversed(specs):
        held = open_.setdefault(spec.dtype, [])
        if held and sum(s.numel for s in held) + spec.numel > limit:
            done.append(held)
            held = open_[spec.dtype] = []
        held.append(spec)
    done += [held for held in open_.values() if held]
    # Collectives start in this order on every rank, so a bucket must not stand before one that completes earlier.
    place = {spec.name: at for at, spec in enumerate(reversed(specs))}
    done.sort(key=lambda held: max(place[spec.name] for spec in held))
    return [_lay_out(held, shards) for held in done]


def _lay_out(specs: Sequence[ParamSpec], shards: int) -> BucketLayout:
    segments, at = [], 0
    for group in sorted({spec.group for spec in specs}):
        slots = []
        for spec in (spec for spec in specs if spec.group == group):
            slots.append(Slot(spec.name, spec.shape, at))
            at = slots[-1].stop
        at = _round_up(at, ALIGNMENT)
        segments.append(Segment(group, tuple(slots), slots[0].start, at))
    return BucketLayout(specs[0].dtype, tuple(segments), _round_up(max(1, at), shards * ALIGNMENT), shards)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def owned_part(segment: Segment, owned: slice) -> slice:
    """The elements of a segment that lie in `owned`, counted from the start of `owned`; may be empty."""
    start = min(max(segment.start, owned.start), owned.stop)
    return slice(start - owned.start, max(start, min(segment.stop, owned.stop)) - owned.start)


def state_bytes(
    layouts: Sequence[BucketLayout], policy: ShardPolicy, index: int, compute: int, grad: int, master: int, moments: int
) -> dict[str, int]:
    """Bytes of state that data rank `index` holds between steps, by kind, before any tensor exists.

    `compute`, `grad` and `master` are bytes per element, `master=0` where the compute dtype is its own master; `moments` is
    the bytes of all of an optimizer's tensors per element that it updates.
    """
    whole = sum(layout.numel for layout in layouts)
    mine = [layout.shard(index) if policy.optim else slice(0, layout.numel) for layout in layouts]
    owned = sum(part.stop - part.start for part in mine)
    updated = [owned_part(segment, part) for b, part in zip(layouts, mine, strict=True) for segment in b.segments]
    return {
        "parameters": compute * (owned if policy.param else whole),
        "masters": master * owned,
        "gradients": grad * (owned if policy.grad else whole),
        "moments": moments * sum(part.stop - part.start for part in updated),
    }
