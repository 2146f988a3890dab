"""Where every parameter lies in which flat bucket. Pure integers: no tensors, no processes.

Buckets are filled in the order in which backward produces gradients (the reverse of registration), so that a bucket is
complete, and can be reduced, while backward still runs. Within a bucket the slots of one optimizer group are neighbours:
a *segment*. Weight decay differs between segments, yet they share one collective. (A bucket for each group instead would
double the collectives, and the one with the norms would stay open until backward ends.)

A bucket is cut into equal shards, and what an optimizer does decides where a cut may fall (`Cut`): AdamW does not care,
block-scaled moments must not be cut inside a block, and Muon needs whole matrices.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dist_train.zero.policy import ShardPolicy

# Elements. Slots and shards begin at multiples of it: kernels find aligned memory, and an optimizer's vector loop, over a
# segment or over one slot, never has a tail. (Tails round differently, and with other shards other elements would be tails.)
ALIGNMENT = 64


@dataclass(frozen=True)
class Cut:
    """Where a shard may end inside a parameter: at multiples of `block` elements from its start; `whole`: nowhere."""

    block: int = 1
    whole: bool = False


FLAT, WHOLE = Cut(), Cut(whole=True)


@dataclass(frozen=True)
class ParamSpec:
    """What the layout must know of a parameter. `group` names its optimizer group (decay, no_decay)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    group: str
    cut: Cut = FLAT
    copies: tuple[str, ...] = ()  # `ParamGeometry`: who has it too, and with whom its gradient is to be summed
    partial: tuple[str, ...] = ()

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
    """The neighbouring slots of a bucket that belong to one optimizer group: its elements `start..stop`, some of them padding.

    Where parameters stay whole there is one for each group and shard."""

    group: str
    slots: tuple[Slot, ...]
    start: int
    stop: int


class SlotPart(NamedTuple):
    """The part of a parameter that a rank owns."""

    slot: Slot
    at: slice  # where it lies in the tensor that holds it
    first: int  # element of the flattened parameter with which it begins


@dataclass(frozen=True)
class BucketLayout:
    """A flat buffer of `numel` elements, cut into `shards` equal slices. Segments stand in order, with padding between slots."""

    dtype: str
    segments: tuple[Segment, ...]
    numel: int
    shards: int

    @property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(slot for segment in self.segments for slot in segment.slots)

    @property
    def padding(self) -> list[slice]:
        """The elements that belong to no parameter."""
        ends = [0, *(slot.stop for slot in self.slots)]
        starts = [*(slot.start for slot in self.slots), self.numel]
        return [slice(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    @property
    def shard_numel(self) -> int:
        return self.numel // self.shards

    def shard(self, index: int) -> slice:
        """The elements that data rank `index` owns."""
        return slice(index * self.shard_numel, (index + 1) * self.shard_numel)


def plan_buckets(specs: Sequence[ParamSpec], bucket_bytes: float, itemsize: int, shards: int) -> list[BucketLayout]:
    """Lay parameters out in buckets of about `bucket_bytes` (of `itemsize`-byte elements), in order of completion.

    `specs` come in registration order. A parameter larger than a bucket has one of its own; nothing is ever split. Whole
    parameters share no bucket with others: they are packed differently. Their shards are as long as the largest of them, so
    their buckets hold at least as much as would fill all shards: a large matrix alone would be padded to `shards` times its size.
    """
    limit = bucket_bytes / itemsize
    limits = {False: limit, True: max(limit, shards * max((s.numel for s in specs if s.cut.whole), default=0))}
    open_: dict[Hashable, list[ParamSpec]] = {}
    done: list[list[ParamSpec]] = []
    for spec in reversed(specs):
        # What is summed over other ranks than the rest shares no bucket with it: those ranks may hold more or less of the rest.
        key = spec.dtype, spec.cut.whole, spec.copies, spec.partial
        held = open_.setdefault(key, [])
        if held and sum(s.numel for s in held) + spec.numel > limits[spec.cut.whole]:
            done.append(held)
            held = open_[key] = []
        held.append(spec)
    done += [held for held in open_.values() if held]
    # Collectives start in this order on every rank, so a bucket must not stand before one that completes earlier.
    place = {spec.name: at for at, spec in enumerate(reversed(specs))}
    done.sort(key=lambda held: max(place[spec.name] for spec in held))
    return [_lay_out_whole(held, shards) if held[0].cut.whole else _lay_out(held, shards) for held in done]


def _lay_out(specs: Sequence[ParamSpec], shards: int) -> BucketLayout:
    step = math.lcm(ALIGNMENT, *(spec.cut.block for spec in specs))
    segments, stop = _segments(specs, 0, step)
    return BucketLayout(specs[0].dtype, tuple(segments), _round_up(max(1, stop), shards * step), shards)


def _lay_out_whole(specs: Sequence[ParamSpec], shards: int) -> BucketLayout:
    """Each parameter goes, largest first, to the shard that holds least; shards are as long as the fullest."""
    bins: list[list[ParamSpec]] = [[] for _ in range(shards)]
    filled = [0] * shards
    for spec in sorted(specs, key=lambda spec: -spec.numel):  # (stable: among equals the order of completion)
        index = filled.index(min(filled))
        bins[index].append(spec)
        filled[index] += _round_up(spec.numel, ALIGNMENT)
    each = max(ALIGNMENT, *filled)
    segments = [segment for index, held in enumerate(bins) for segment in _segments(held, index * each, ALIGNMENT)[0]]
    return BucketLayout(specs[0].dtype, tuple(segments), each * shards, shards)


def _segments(specs: Sequence[ParamSpec], at: int, step: int) -> tuple[list[Segment], int]:
    """Segments from element `at` on, every slot at a multiple of `step`; and where they end."""
    segments = []
    for group in sorted({spec.group for spec in specs}):
        start, slots = at, []
        for spec in (spec for spec in specs if spec.group == group):
            slots.append(Slot(spec.name, spec.shape, at))
            at = _round_up(slots[-1].stop, step)
        segments.append(Segment(group, tuple(slots), start, at))
    return segments, at


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def owned_part(segment: Segment, owned: slice) -> slice:
    """The elements of a segment that lie in `owned`, counted from the start of `owned`; may be empty."""
    start = min(max(segment.start, owned.start), owned.stop)
    return slice(start - owned.start, max(start, min(segment.stop, owned.stop)) - owned.start)


def slot_parts(slots: Iterable[Slot], held: slice) -> list[SlotPart]:
    """What of `slots` lies in the elements `held` of their bucket, seen from a tensor of those elements.

    A parameter without elements lies on every rank whose elements its place touches.
    """
    parts = []
    for slot in slots:
        start, stop = max(slot.start, held.start), min(slot.stop, held.stop)
        if start < stop or (slot.start == slot.stop and held.start <= slot.start <= held.stop):
            parts.append(SlotPart(slot, slice(start - held.start, stop - held.start), start - slot.start))
    return parts


def state_bytes(
    layouts: Sequence[BucketLayout],
    policy: ShardPolicy,
    index: int,
    compute: int,
    grad: int,
    master: int,
    moments: Mapping[str, float],
) -> dict[str, int]:
    """Bytes of state that data rank `index` holds between steps, by kind, before any tensor exists.

    `compute`, `grad` and `master` are bytes per element, `master=0` where the compute dtype is its own master; `moments` are
    the bytes of all of an optimizer's tensors per element that it updates, by optimizer group.
    """
    whole = sum(layout.numel for layout in layouts)
    mine = [layout.shard(index) if policy.optim else slice(0, layout.numel) for layout in layouts]
    owned = sum(part.stop - part.start for part in mine)
    updated = [(s.group, owned_part(s, part)) for b, part in zip(layouts, mine, strict=True) for s in b.segments]
    return {
        "parameters": compute * (owned if policy.param else whole),
        "masters": master * owned,
        "gradients": grad * (owned if policy.grad else whole),
        "moments": round(sum(moments[group] * (part.stop - part.start) for group, part in updated)),
    }
