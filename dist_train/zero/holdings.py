"""Everything that an engine holds on this rank: by name for checkpoints, in bytes for the planner, by bucket for memories."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dist_train.comm.compress import TopK
from dist_train.params.geometry import ParamGeometry, Piece, flat_range_boxes, geometry_of
from dist_train.zero.bucket import ParamBucket, Setting
from dist_train.zero.layout import SlotPart, slot_parts, state_bytes
from dist_train.zero.protocol import BoundOptimizer, FlatSegment, Optimizer


@dataclass(frozen=True)
class Holdings:
    """The state of one engine. `segments` are those of all buckets, in order, as `optimizer` knows them."""

    module: nn.Module
    buckets: Sequence[ParamBucket]
    frozen: Sequence[ParamBucket]
    segments: Sequence[FlatSegment]
    optimizer: BoundOptimizer
    recipe: Optimizer
    setting: Setting
    rank: int  # among all ranks

    def segments_by_bucket(self) -> list[range]:
        """The indices of each bucket's segments."""
        ends = itertools.accumulate((len(bucket.layout.segments) for bucket in self.buckets), initial=0)
        return [range(start, stop) for start, stop in itertools.pairwise(ends)]

    def state_by_bucket(self) -> list[list[Tensor]]:
        """The tensors that the memory of optimizer state made, for each bucket."""
        moments = [[t for at in own for t in self.optimizer.moments(at).values()] for own in self.segments_by_bucket()]
        return [bucket.state_tensors + mine for bucket, mine in zip(self.buckets, moments, strict=True)]

    def pieces(self) -> Iterator[Piece]:
        """`model/<name>`, `optim/<name>/<moment>`, `optim/<name>/step`; where a wire owes something, `residual/<rank>/<name>`."""
        for bucket in self.buckets:
            bucket.open_master()
            if (residual := bucket.residual()) is not None:
                for part in slot_parts(bucket.layout.slots, slice(0, bucket.layout.numel)):
                    yield from part_pieces(f"residual/{self.rank}/{part.slot.name}", part, residual)
        geometries = {g.name: g for g in (geometry_of(*named) for named in self.module.named_parameters())}
        for index, segment in enumerate(self.segments):
            moments, steps = self.optimizer.moments(index), self.optimizer.steps(index)
            for part, step in zip(segment.parts, steps.unbind(), strict=True):
                name = part.slot.name
                yield from _shifted(f"model/{name}", geometries[name], part_pieces("", part, segment.master))
                for moment, flat in moments.items():
                    block = max(1, segment.master.numel() // max(1, flat.numel()))
                    found = part_pieces(f"optim/{name}/{moment}", part, flat, block)
                    yield from found if block > 1 else _shifted(f"optim/{name}/{moment}", geometries[name], found)
                yield Piece.whole(f"optim/{name}/step", step)
        for bucket in self.frozen:
            for part in slot_parts(bucket.layout.slots, bucket.owned):
                name = part.slot.name
                yield from _shifted(f"model/{name}", geometries[name], part_pieces("", part, bucket.shard))
        for name, param in self._outside_buckets():
            geometry = geometry_of(name, param)
            yield geometry.shift(Piece.whole("", param.data), f"model/{geometry.name}")
        for name, buffer in self.module.named_buffers():
            yield Piece.whole(f"model/{name}", buffer)

    def put_away(self) -> None:
        """Give back the memory that `pieces` took."""
        for bucket, state in zip(self.buckets, self.state_by_bucket(), strict=True):
            bucket.close_master()
            self.setting.state.done(state)

    def held_bytes(self) -> dict[str, int]:
        """Bytes of tensors held by kind, wherever they live, counted from the tensors themselves; the gradients that the
        optimizer reads count always, also where they have memory from a step's first reduction to its end alone."""
        held: dict[str, int] = {"parameters": 0, "masters": 0, "gradients": 0, "moments": 0}
        for bucket in [*self.buckets, *self.frozen]:
            for kind, count in bucket.held_bytes().items():
                held[kind] += count
        held["parameters"] += sum(param.numel() * param.element_size() for _, param in self._outside_buckets())
        for index in range(len(self.segments)):
            held["moments"] += sum(tensor.untyped_storage().nbytes() for tensor in self.optimizer.moments(index).values())
        return held

    def predicted_bytes(self) -> dict[str, int]:
        """What `held_bytes` says between steps, from the layouts alone, for a module without frozen parameters."""
        policy, precision, layouts = self.setting.policy, self.setting.precision, [bucket.layout for bucket in self.buckets]
        groups = {segment.group for layout in layouts for segment in layout.segments}
        compute = precision.compute or self.buckets[0].params[0].dtype
        own_master = self.buckets[0].master is not self.buckets[0].shard
        found = state_bytes(
            layouts,
            policy,
            self.setting.shards.index,
            compute=compute.itemsize,
            grad=precision.grad.itemsize,
            master=2 if precision.split else precision.master.itemsize if own_master else 0,
            moments={group: self.recipe.state_bytes(group, precision.master.itemsize) for group in groups},
        )
        if isinstance(self.setting.wire, TopK):
            found["gradients"] += 4 * sum(layout.numel for layout in layouts)
        if self.setting.state.kind != "device" and not policy.grad:  # the optimizer reads a copy on its side
            owned = (layout.shard_numel if policy.optim else layout.numel for layout in layouts)
            found["gradients"] += precision.grad.itemsize * sum(owned)
        return found

    def _outside_buckets(self) -> list[tuple[str, nn.Parameter]]:
        """Frozen parameters below stage 3."""
        if self.setting.policy.param:
            return []
        return [(name, param) for name, param in self.module.named_parameters() if not param.requires_grad]


def _shifted(name: str, geometry: ParamGeometry, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Pieces of what this rank holds of a parameter, as pieces of the whole of it."""
    return (geometry.shift(piece, name) for piece in pieces)


def part_pieces(name: str, part: SlotPart, flat: Tensor, block: int = 1) -> Iterator[Piece]:
    """What `flat` holds of a parameter, as boxes of it; `block`: it has one element for so many of the parameter's."""
    shape: tuple[int, ...] = part.slot.shape
    at, first = part.at, part.first
    if block > 1 and (numel := math.prod(shape)):  # one-dimensional, by blocks
        shape, first = (-(-numel // block),), first // block
        at = slice(at.start // block, -(-at.stop // block))
    if at.stop - at.start == math.prod(shape):
        yield Piece(name, flat[at].view(shape), shape, (0,) * len(shape))
        return
    for box, offset in flat_range_boxes(shape, first, first + at.stop - at.start):
        start = at.start + offset
        yield Piece(name, flat[start : start + box.size].view(box.shape), shape, box.offset)
