"""One flat bucket of parameters: its tensors, where they live, and how gradients pass through it.

Tensors (all flat; N ranks of the shard group, S = numel ÷ N; names as everywhere in this package):

    param       what the module sees: a view into `full`
    full        compute dtype, numel elements: all parameters of the bucket. Kept, or at stage 3 only while FULL
    shard       compute dtype, this rank's part of `full`: a view of it, or at stage 3 a tensor of its own
    master      what the optimizer updates: `shard` itself where the dtypes agree, else a wider copy
    grad_full   numel elements: this rank's gradients, summed over micro-batches. At stages 2 and 3 only while they travel
    grad        what the optimizer reads, as long as master: Σ over data ranks; a part of `grad_full`, at stages 2 and 3 its own,
                there from the first reduction of a step to its end

"This rank's part" is all of it at stage 0 and its slice of S elements at stages 1 to 3. Memory that comes and goes is the
*storage* of a tensor that stays, so every view into it stays valid.

Residence of `full`: SHARDED (no memory) → GATHERING → FULL. Below stage 3 it is FULL, or, after a step, GATHERING what other
ranks updated.

Phases of a gradient: ACCUMULATING (grad_full holds this rank's own sum) → REDUCING (it belongs to a collective) → REDUCED
(`grad` holds the sum over ranks). A backward that follows a reduction within one step opens another round, and `grad`
becomes the sum of all rounds, so it is right however a training loop calls us.

With replicas (`ParallelMesh.split_data`) slices are cut over the shard group alone: gathers and reduce-scatters stay inside
it, and the reduced slice is then summed over the replica group (HSDP; MiCS, arXiv:2205.00119). Without, that group has size 1.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dist_train.comm.collectives import Collectives, Handle
from dist_train.comm.compress import ExactWeights, WeightWire, WireRecipe
from dist_train.mesh.mesh import Group
from dist_train.ops.optim import join_master, split_master
from dist_train.params.geometry import geometry_of
from dist_train.zero.layout import BucketLayout, owned_part, slot_parts
from dist_train.zero.policy import Precision, ShardPolicy
from dist_train.zero.protocol import FlatSegment
from dist_train.zero.residency import DeviceMemory, HostMemory, Memory


class Residence(enum.Enum):
    SHARDED = "sharded"  # S elements: only `shard`
    GATHERING = "gathering"  # numel + S elements, `full` not to be read yet
    FULL = "full"  # numel elements, + S at stage 3


class Phase(enum.Enum):
    ACCUMULATING = "accumulating"
    REDUCING = "reducing"
    REDUCED = "reduced"


@dataclass(frozen=True)
class Setting:
    """What all buckets of an engine share."""

    policy: ShardPolicy
    precision: Precision
    shards: Group
    replicas: Group
    comm: Collectives
    state: Memory  # of masters and moments
    store: Memory  # of `shard` at stage 3
    wire: WireRecipe  # how gradients travel
    weights: WeightWire  # how parameters travel
    fill: Callable[[str, nn.Parameter, Tensor], None]  # writes a parameter's first values into a tensor of its shape
    complete: Callable[[ParamBucket], None]  # called when every gradient of a bucket has arrived
    groups: Mapping[str, Group]  # the axes of `ParamGeometry`


class Scratch:
    """Memory for the first values of one bucket after the other."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros; what was taken before is overwritten."""
        if self._memory.numel() < numel * dtype.itemsize or self._memory.device != device:
            self._memory = torch.empty(0, dtype=torch.uint8)  # gives the old memory back first
            self._memory = torch.empty(numel * dtype.itemsize, dtype=torch.uint8, device=device)
        return self._memory[: numel * dtype.itemsize].view(dtype).zero_()


class ParamBucket:
    """Owns the memory of its parameters from construction on.

    All its parameters are trainable or all are frozen; frozen ones have no gradient, no master and no optimizer state.
    """

    def __init__(
        self, layout: BucketLayout, params: Sequence[nn.Parameter], setting: Setting, number: int, scratch: Scratch
    ) -> None:
        self.layout, self.params, self.number = layout, list(params), number
        self.policy, self.precision = setting.policy, setting.precision
        self.trainable = self.params[0].requires_grad
        self._shards, self._replicas, self._comm = setting.shards, setting.replicas, setting.comm
        self._state, self._store, self._weights = setting.state, setting.store, setting.weights
        self._complete, geometry = setting.complete, geometry_of(layout.slots[0].name, self.params[0])
        self._sums = [setting.groups[axis] for axis in geometry.partial]
        self.counted = all(setting.groups[axis].index == 0 for axis in geometry.copies)  # in the norm, of all copies
        self.owned = layout.shard(setting.shards.index) if self.policy.optim else slice(0, layout.numel)
        device, compute = self.params[0].device, self.precision.compute or self.params[0].dtype
        # A master keeps what the cast to the compute dtype would lose, so first values come in its dtype.
        initial = scratch.take(layout.numel, self.precision.master if self.trainable else compute, device)
        for slot, param, view in zip(layout.slots, self.params, self._views(initial), strict=True):
            setting.fill(slot.name, param, view)
        self._comm.broadcast(initial, self._shards).wait()
        self._comm.broadcast(initial, self._replicas).wait()
        self._place_parameters(initial, compute)
        if self.trainable:
            self._place_master(initial)
            self._place_gradients(setting.wire)

    def _place_parameters(self, initial: Tensor, compute: torch.dtype) -> None:
        self.full = torch.empty(self.layout.numel, dtype=compute, device=initial.device)
        for param, view in zip(self.params, self._views(self.full), strict=True):
            param.data = view
        if self.policy.param:
            self.shard = self._store.zeros(self.layout.shard_numel, compute, f"parameters {self.name}")
            self.shard.copy_(initial[self.owned])
            _free(self.full)  # nothing was written into it yet, so it never took memory
        else:
            self.shard = self.full.copy_(initial)[self.owned]
        self.residence, self._gathering = Residence.SHARDED if self.policy.param else Residence.FULL, Handle()

    def _place_master(self, initial: Tensor) -> None:
        part, self._remainder = initial[self.owned], None
        # A gather that rounds writes over this rank's part of `full` too.
        rounded = not self.policy.param and not isinstance(self._weights, ExactWeights)
        if self.precision.split:
            self._remainder = self._state.zeros(part.numel(), torch.int16, f"remainders of {self.name}")
            self.master = torch.empty_like(part, device=self._state.device).copy_(part)
            self.close_master()
        elif self._state.kind == self._store.kind == "device" and part.dtype == self.shard.dtype and not rounded:
            self.master = self.shard
        else:
            self.master = self._state.zeros(part.numel(), part.dtype, f"masters of {self.name}").copy_(part)
        # A skipped update writes nothing, so what it writes must be what nobody else changes.
        beside = self._state.kind == self._store.kind == "device" and self.master is not self.shard
        self._written = beside and not (rounded or self.precision.split) and self.shard.dtype.itemsize == 2

    def _place_gradients(self, wire: WireRecipe) -> None:
        device, dtype = self.full.device, self.precision.grad
        self._wire = wire.bind(self.layout.numel, device)
        self.grad_full = torch.empty(self.layout.numel, dtype=dtype, device=device)
        self._grad_views = self._views(self.grad_full)
        self._grad_padding = [self.grad_full[gap] for gap in self.layout.padding]
        self.grad = self.grad_full[self.owned]
        elsewhere = self._state.kind != "device"
        self._grad_stays = elsewhere or not self.policy.grad
        if self.policy.grad:
            place = HostMemory(device) if elsewhere else DeviceMemory(device)
            self.grad = place.zeros(self.layout.shard_numel, dtype, f"gradients of {self.name}")
            _free(self.grad_full)
        else:
            self.grad_full.zero_()
        # What the optimizer reads, where it steps.
        self._handed = self.grad if self.policy.grad or not elsewhere else torch.zeros_like(self.grad, device=self._state.device)
        self._earlier: Tensor | None = None  # Σ of earlier rounds, below stage 2
        self._reduced_before = False  # `grad` holds earlier rounds, at stages 2 and 3
        self.phase, self._fresh, self._handle = Phase.ACCUMULATING, True, Handle()
        self._missing = len(self.params)  # gradients still to come in this backward
        self._expected = False  # a backward that is to deliver them runs
        self._idle: set[int] | None = None  # parameters without a gradient in any backward of this step; None: before the first
        for param in self.params:
            param.register_post_accumulate_grad_hook(self._arrived)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat[slot.start : slot.stop].view(slot.shape) for slot in self.layout.slots]

    @property
    def name(self) -> str:
        """What to call it in errors."""
        first, *rest = self.layout.slots
        return f"{first.name} and {len(rest)} more" if rest else first.name

    # Parameters: gathered before use and released after it (stage 3)

    def gather(self) -> None:
        """Start bringing `full` together, unless it is there or on its way."""
        if self.residence is Residence.SHARDED:
            _allocate(self.full)
            self._store.ahead([self.shard], read_only=True)
            self._gathering = self._weights.all_gather(self._comm, self.full, self.shard.to(self.full.device), self._shards)
            self.residence = Residence.GATHERING

    def ensure_full(self) -> None:
        """Return when the module may read its parameters."""
        if self.residence is not Residence.FULL:
            self.gather()
            self._gathering.wait()
            self.residence = Residence.FULL

    def release(self) -> None:
        """Give the memory of `full` back, where it is sharded."""
        if self.policy.param and self.residence is Residence.FULL:
            _free(self.full)
            self._store.done([self.shard])
            self.residence = Residence.SHARDED

    # Gradients: they arrive, are collected into grad_full, and are reduced

    @property
    def is_complete(self) -> bool:
        """True once the running backward has delivered, and `collect` taken, every gradient."""
        return self._missing == 0

    def _arrived(self, _param: Tensor) -> None:
        if not self._expected:  # from another part of the model: it waits in `param.grad`
            return self._complete(self)
        self._missing -= 1
        if self._missing == 0:
            # A parameter may have come twice (reentrant recompute); then another is still on its way.
            self._missing = sum(param.grad is None for param in self.params)
            if self._missing == 0:
                self.collect()
                self._complete(self)

    def begin(self) -> None:
        """Before a backward: expect every gradient again, and open another round if the last one was reduced."""
        if self.residence is Residence.GATHERING and not self.policy.param:
            self.ensure_full()  # published, but nobody's forward waited for it
        self._missing, self._expected = len(self.params), True
        if self.phase is not Phase.ACCUMULATING:
            self.wait()
            if not self.policy.grad:
                self._earlier = self.grad.clone() if self._earlier is None else self._earlier + self.grad
            self.phase, self._fresh = Phase.ACCUMULATING, True

    def collect(self) -> list[str]:
        """Move the parameters' gradients into `grad_full`; the names of those that got none (they count as zero)."""
        assert self.phase is Phase.ACCUMULATING, "grad_full belongs to a collective"
        if self.policy.grad and self._fresh:
            _allocate(self.grad_full)
            for gap in self._grad_padding:  # it travels too
                gap.zero_()
        present = [param.grad for param in self.params if param.grad is not None]
        views, missing = self._grad_views, []
        if len(present) < len(self.params):
            missing = [at for at, param in enumerate(self.params) if param.grad is None]
            views = [view for at, view in enumerate(views) if at not in missing]
            if self._fresh:
                torch._foreach_zero_([self._grad_views[at] for at in missing])
        if present and self._fresh:
            torch._foreach_copy_(views, present)
        elif present:
            torch._foreach_add_(views, present)
        for param in self.params:
            param.grad = None
        self._idle = set(missing) if self._idle is None else self._idle.intersection(missing)
        self._fresh, self._missing, self._expected = False, 0, False
        return [self.layout.slots[at].name for at in missing]

    def reduce(self) -> None:
        """Start summing `grad_full` over data ranks, into `grad`."""
        assert self.phase is Phase.ACCUMULATING
        self.phase = Phase.REDUCING
        if not self.policy.optim:
            self._handle = self._wire.all_reduce(self._comm, self.grad_full, self._shards)
            return
        if not (self._grad_stays or self._reduced_before):
            _allocate(self.grad)
        part, device, dtype = self.grad, self.grad_full.device, self.precision.reduce
        if self._reduced_before or (part.device, part.dtype) != (device, dtype):
            part = torch.empty(self.layout.shard_numel, dtype=dtype, device=device)
        inside = self._wire.reduce_scatter(self._comm, part, self.grad_full, self._shards)
        self._handle = Handle(inside, lambda: Handle(self._comm.all_reduce(part, self._replicas), lambda: self._take(part)))

    def _take(self, part: Tensor) -> None:
        if self._reduced_before:
            self.grad += part.to(self.grad.device)
        elif part is not self.grad:
            self.grad.copy_(part)
        if self.policy.grad:
            self._reduced_before = True
            _free(self.grad_full)

    def advance(self) -> None:
        """Wait for the first leg of a reduction in two and start the second."""
        self._handle.advance()

    def wait(self) -> None:
        """Return when `grad` holds the sum over data ranks of all rounds (below stage 2: of the last one)."""
        self._handle.wait()
        self.phase = Phase.REDUCED

    def finish(self) -> None:
        """After the last backward of a step: every round's reduced gradients are in `grad`, and what copies elsewhere got too."""
        self.wait()
        if self._earlier is not None:
            self.grad += self._earlier
            self._earlier = None
        for group in self._sums:
            self._comm.all_reduce(self.grad, group).wait()
        if self._handed is not self.grad:
            self._handed.copy_(self.grad)

    def own_slice_of_grad(self) -> Tensor:
        """The reduced gradients that this rank counts in the norm: its slice, even where it holds more; replicas split theirs."""
        mine = self.grad if self.policy.optim else self.grad_full[self.layout.shard(self._shards.index)]
        each = -(-mine.numel() // self._replicas.size)
        return mine[self._replicas.index * each : (self._replicas.index + 1) * each]

    @property
    def idle(self) -> list[str]:
        """Names of the parameters that got no gradient here since the last step."""
        return [self.layout.slots[at].name for at in sorted(self._idle or ())]

    def publish(self) -> None:
        """Begin to show the module what `close_master` made of it, and get ready for the next step's gradients.

        `ensure_full` waits for it."""
        self.phase, self._fresh, self._reduced_before, self._idle = Phase.ACCUMULATING, True, False, None
        if not self._grad_stays:
            _free(self.grad)
        if self.policy.optim and not self.policy.param:
            self._gathering = self._weights.all_gather(self._comm, self.full, self.shard, self._shards)
            self.residence = Residence.GATHERING

    # Masters: opened before the optimizer or a checkpoint uses them, closed after they were written

    def open_master(self) -> None:
        """`master` holds its values. (It always does, but where masters are split and it has no memory between steps.)"""
        if self._remainder is not None and self.master.untyped_storage().nbytes() == 0:
            _allocate(self.master)
            join_master(self.shard.to(self._remainder.device), self._remainder, out=self.master)

    def close_master(self, stepped: bool = False) -> None:
        """`shard` takes the values of `master`, in its own dtype. `stepped`: the optimizer has written them where it can."""
        if self._remainder is None:
            if self.master is not self.shard and not (stepped and self._written):
                self.shard.copy_(self.master)
        elif self.master.untyped_storage().nbytes():
            upper, remainder = split_master(self.master)
            self._remainder.copy_(remainder)
            self.shard.copy_(upper)
            _free(self.master)
        if self.policy.param:
            self._store.done([self.shard])

    @property
    def state_tensors(self) -> list[Tensor]:
        """What the memory of optimizer state made for this bucket."""
        return [] if self.master is self.shard else [self.master if self._remainder is None else self._remainder]

    def settle(self, skipped: Tensor) -> None:
        """The step's verdict: what gradients left behind on their way is kept, or where it was skipped as before."""
        self._wire.settle(skipped)

    def residual(self) -> Tensor | None:
        """What gradients left behind on their way, as long as the bucket; None where nothing is."""
        return self._wire.residual()

    def segments(self) -> list[FlatSegment]:
        """What the optimizer updates here, one run for each of the layout's segments."""
        found = []
        self.open_master()  # views are made of memory that is there
        if not self._grad_stays:
            _allocate(self.grad)
        for segment in self.layout.segments:
            at = owned_part(segment, self.owned)
            held = slice(self.owned.start + at.start, self.owned.start + at.stop)
            parts = slot_parts(segment.slots, held)
            copy = self.shard[at] if self._written else None
            found.append(FlatSegment(segment.group, self.master[at], self._handed[at], parts, self._state, copy))
        self.close_master()
        if not self._grad_stays:
            _free(self.grad)
        return found

    def held_bytes(self) -> dict[str, int]:
        """Bytes of tensors held, by kind, each memory counted once; `grad` as when a backward has ended."""
        found = {"parameters": _bytes(self.full), "masters": 0, "gradients": 0}
        if self.policy.param:
            found["parameters"] += _bytes(self.shard)
        if self.trainable:
            found["masters"] = sum(map(_bytes, self.state_tensors))
            found["gradients"] = _bytes(self.grad_full) + (self.grad.nbytes if self.policy.grad else 0)
            others = (self._earlier, None if self._handed is self.grad else self._handed, self.residual())
            found["gradients"] += sum(_bytes(tensor) for tensor in others if tensor is not None)
        return found


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _allocate(flat: Tensor) -> None:
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())


def _free(flat: Tensor) -> None:
    flat.untyped_storage().resize_(0)
