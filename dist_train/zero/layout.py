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

ALIGNMENT = 64  # elements: a shard then never ends inside a vector register, which would change how its tail is rounded


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
    """The neighbouring slots of a bucket that belong to one optimizer group: its elements `start..stop`."""

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
    limit = max(1, int(bucket_bytes // itemsize))
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
        segments.append(Segment(group, tuple(slots), slots[0].start, at))
    unit = shards * ALIGNMENT
    return BucketLayout(specs[0].dtype, tuple(segments), max(1, -(-at // unit)) * unit, shards)


def state_bytes(
    layouts: Sequence[BucketLayout], compute: int, grad: int, master: int, moments: int, separate_master: bool
) -> dict[str, int]:
    """Bytes of state that one rank will hold at stage 0, by kind, before any tensor exists.

    `compute`, `grad` and `master` are bytes per element; `moments` counts an optimizer's tensors, kept in the master's dtype.
    """
    padded = sum(layout.numel for layout in layouts)
    exact = sum(segment.stop - segment.start for layout in layouts for segment in layout.segments)
    return {
        "parameters": compute * padded,
        "masters": master * padded if separate_master else 0,
        "gradients": grad * padded,
        "moments": master * moments * exact,
    }
