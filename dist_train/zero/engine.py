"""The engine: hooks, order, accumulation and the step over flat buckets.

One step, in the order of the calls:

    backward(loss)   gradients land in buckets, and each full bucket is reduced while backward runs on: at stages 0 and 1 on
                     the last micro-batch, at 2 and 3 (where no rank keeps whole gradients) on every one
    step(lr)         finish what is left → norm and vote (one all-reduce) → unscale, clip and update in the optimizer's
                     own launch (device scalars: the host waits for nothing) → publish

Buckets start their collectives in one fixed order on every rank, whatever order their gradients come in. A parameter
that got no gradient counts as zero, so a rank that skips a branch neither hangs the others nor changes their order.
"""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from dist_train.comm.collectives import Collectives
from dist_train.comm.compress import Exact, ExactWeights, WeightWire, WireRecipe
from dist_train.mesh.mesh import Group, ParallelMesh
from dist_train.params.geometry import Piece, geometry_of
from dist_train.zero.birth import leave_meta
from dist_train.zero.bucket import ParamBucket, Scratch, Setting
from dist_train.zero.holdings import Holdings
from dist_train.zero.layout import FLAT, ParamSpec, plan_buckets
from dist_train.zero.norm import agree, sum_of_squares
from dist_train.zero.order import GatherOrder
from dist_train.zero.policy import Precision, ShardPolicy
from dist_train.zero.protocol import Optimizer, StepReport
from dist_train.zero.residency import Residency, walk
from dist_train.zero.units import UnitHooks, users_of_parameters, wait_before_use

_IN_FLIGHT = 2  # reductions whose gradients are in memory at once, at stages 2 and 3


class ZeroEngine:
    """Trains any `nn.Module` over the data axis of a mesh.

    Args:
        module: its trainable parameters are moved into flat buckets (their values stay); rank 0's values win.
        optimizer: a recipe such as `dt.AdamW(lr=3e-4)`.
        clip_norm: global norm above which gradients are scaled down; 0 for never.
        bucket_bytes: size of a bucket in the reduce dtype, at most; smaller where the model would fill less than six of them.
        overlap: reduce buckets during backward; off, they are reduced after it. Bits are the same.
        policy: what is sharded over data ranks (`ShardPolicy.from_stage`).
        replicas: data ranks are cut in so many runs, and state is sharded inside a run only.
        publish_ahead: at stages 1 and 2, let `step` return while updated parameters are still on their way: the forward of each
            unit waits for its own. Who reads parameters in another way must call `wait` first.
        skip_unused: leave a parameter that got no gradient on any rank as it is, with its moments and its count of updates, as
            torch's optimizers do. Off, its gradient is zero; a step then reads nothing on the host.
        residency: where optimizer state, and at stage 3 shards of parameters, live; default: on the device. State that lives
            elsewhere is stepped by the CPU.
        wire: how gradients travel (`comm/compress.py`); default: in the reduce dtype of `precision`.
        weight_wire: how parameters travel when they are gathered; default: as they are.
        init: fills a parameter, or a buffer, that the module holds on the meta device, given its name. Parameters are made
            bucket by bucket, so a model larger than one rank's memory can start at stage 3.
        fused: the norm of the gradients by our kernel; off, by plain torch.
        part_of: where backward goes through one part of the module at a time (stages of a pipeline): the part to which a
            parameter belongs, 0, 1, …, given its name.

    `loss_scale` multiplies every loss before backward and is divided out again before the norm.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        mesh: ParallelMesh,
        comm: Collectives | None = None,
        *,
        policy: ShardPolicy | None = None,
        precision: Precision | None = None,
        clip_norm: float = 0.0,
        bucket_bytes: float = 25e6,
        overlap: bool = True,
        replicas: int = 1,
        publish_ahead: bool = False,
        skip_unused: bool = True,
        residency: Residency | None = None,
        wire: WireRecipe | None = None,
        weight_wire: WeightWire | None = None,
        init: Callable[[str, Tensor], None] | None = None,
        fused: bool = True,
        part_of: Callable[[str], int] | None = None,
    ) -> None:
        self.module, self.mesh, self.comm = module, mesh, comm or Collectives()
        self.policy, self.precision = policy or ShardPolicy(), precision or Precision()
        self.clip_norm, self.overlap, self.loss_scale = clip_norm, overlap, 1.0
        self._lr, self._fused = optimizer.lr, fused
        self._in_backward = self._pending = self._warned = self._reduces_now = False
        self._running = 0  # the part that a backward runs through
        self._ahead, self._skip_unused = publish_ahead and self.policy.optim and not self.policy.param, skip_unused
        if not any(param.requires_grad for param in module.parameters()):
            raise ValueError("the module has no parameter that requires a gradient: nothing to train.")
        if replicas > 1 and not self.policy.optim:
            raise ValueError(f"replicas={replicas}: at stage 0 every rank is a replica already; set stage 1 to 3 or replicas=1.")
        self.shards, self.replicas = mesh.split_data(replicas)
        residency = residency or Residency()
        residency.check(self.policy)
        unborn = leave_meta(module, mesh.device, init)

        def fill(name: str, param: nn.Parameter, values: Tensor) -> None:
            geometry = geometry_of(name, param)
            if init is not None and param in unborn:
                if values.dtype == param.dtype and geometry.shape == tuple(values.shape):
                    init(name, values)
                else:
                    whole = torch.empty(geometry.shape, dtype=param.dtype, device=values.device)
                    init(name, whole)
                    values.copy_(whole[geometry.box(values)])
            else:
                values.copy_(param.detach())

        self._prepare_rest(fill)
        self._state, store = residency.memories(mesh.device)
        setting = Setting(
            self.policy, self.precision, self.shards, self.replicas, self.comm, self._state, store,
            wire or Exact(self.precision.reduce), weight_wire or ExactWeights(), fill, self._completed,
            {"tp": mesh.tp, "ends": mesh.ends},
        )  # fmt: skip
        needed = self._make_buckets(optimizer, bucket_bytes, setting, part_of or (lambda name: 0))
        gathering = self.shards if self.policy.param else Group("alone", (mesh.rank,), 0)
        named = sorted([*self.buckets, *self.frozen], key=lambda bucket: bucket.number)
        order = GatherOrder([bucket.name for bucket in named], gathering, self.comm, mesh)
        self._units = UnitHooks(module, needed if self.policy.param else {}, order)
        if self._ahead:
            wait_before_use(module, needed)
            module.register_state_dict_pre_hook(lambda *_: self.wait())
        segments = [segment for bucket in self.buckets for segment in bucket.segments()]
        self._optimizer = optimizer.bind(segments)
        self._holdings = Holdings(module, self.buckets, self.frozen, segments, self._optimizer, optimizer, setting, mesh.rank)
        self._carried = 1.0  # the loss scale that residuals of a wire carry
        self._device = self.buckets[0].full.device

    def _prepare_rest(self, fill: Callable[[str, nn.Parameter, Tensor], None]) -> None:
        """Frozen parameters outside buckets take the compute dtype, and they and the module's buffers the values of rank 0."""
        for name, param in self.module.named_parameters():
            if not param.requires_grad and not self.policy.param:
                values = torch.empty(param.shape, dtype=param.dtype, device=param.device)
                fill(geometry_of(name, param).name, param, values)
                compute = self.precision.compute if param.is_floating_point() else None
                param.data = values.to(compute or values.dtype)
                self.comm.broadcast(param.data, self.mesh.data).wait()
        for buffer in self.module.buffers():
            self.comm.broadcast(buffer, self.mesh.data).wait()

    def _make_buckets(
        self, optimizer: Optimizer, size: float, setting: Setting, part_of: Callable[[str], int]
    ) -> dict[str, list[ParamBucket]]:
        """Make the buckets: by size, or at stage 3 one for each unit. Returns the buckets that each unit uses, by its name."""
        geometries = {param: geometry_of(name, param) for name, param in self.module.named_parameters()}
        params = {geometry.name: param for param, geometry in geometries.items()}
        parts: dict[int, list[str]] = {}
        for name, param in self.module.named_parameters():
            parts.setdefault(part_of(name), []).append(geometries[param].name)

        def spec(name: str) -> ParamSpec:
            param, geometry = params[name], geometries[params[name]]
            group = optimizer.group(name, param)
            cut = optimizer.cut(group) if param.requires_grad else FLAT
            if cut != FLAT and geometry.shape != tuple(param.shape):
                told = f"{type(optimizer).__name__}: it needs all of {name}, which is divided over ranks"
                raise ValueError(f"{told}; set another optimizer, or mesh.tp=1.")
            return ParamSpec(name, tuple(param.shape), str(param.dtype), group, cut, geometry.copies, geometry.partial)

        def make(names: Sequence[str], size: float) -> list[ParamBucket]:
            layouts = plan_buckets([spec(name) for name in names], size, self.precision.reduce.itemsize, self.shards.size)
            held = [[params[slot.name] for slot in layout.slots] for layout in layouts]
            pairs = zip(layouts, held, strict=True)
            return [ParamBucket(layout, mine, setting, next(numbers), scratch) for layout, mine in pairs]

        numbers, scratch = itertools.count(), Scratch()
        users = users_of_parameters(self.module)
        units = list(dict.fromkeys(unit for names in users.values() for unit in names))
        total = sum(param.numel() for param in params.values() if param.requires_grad) * self.precision.reduce.itemsize
        self.frozen: list[ParamBucket] = []
        self._parts: list[list[ParamBucket]] = []
        for index in range(max(parts) + 1):
            mine = parts.get(index, [])
            made: list[ParamBucket] = []
            if self.policy.param:
                for unit in units:
                    own = [name for name in mine if users[params[name]][0] == unit]
                    # Backward completes units in the reverse of their registration.
                    made[:0] = make([name for name in own if params[name].requires_grad], math.inf)
                    self.frozen += make([name for name in own if not params[name].requires_grad], math.inf)
            else:
                # No backward is left to hide the last bucket behind, so a small model comes in several, if not in any number.
                made = make([name for name in mine if params[name].requires_grad], min(size, max(total / 6, 8e6)))
            self._parts.append(made)
        self.buckets = [bucket for part in self._parts for bucket in part]
        self._next, self._owed = [0] * len(self._parts), [False] * len(self._parts)
        needed: dict[str, list[ParamBucket]] = {unit: [] for unit in units}
        for bucket in [*self.buckets, *self.frozen]:
            for user in dict.fromkeys(user for param in bucket.params for user in users[param]):
                needed[user].append(bucket)
        return needed

    def begin_pass(self, training: bool) -> None:
        """What follows, until the next call, is one pass: ranks that make the same passes gather in the same order (stage 3).

        Never called, each forward of the module begins a pass."""
        self._units.begin_pass(training)

    def backward(
        self,
        loss: Tensor | Sequence[Tensor],
        last: bool = True,
        gradients: Tensor | Sequence[Tensor] | None = None,
        part: int = 0,
    ) -> None:
        """Backward of one micro-batch. `last=False`: more follow before `step`, and stages 0 and 1 reduce only their sum.

        With `gradients` it begins from several tensors and what came back for each, carrying the loss scale already; then `part`
        says which part of the module it goes through.
        """
        if self._carried != self.loss_scale:
            for bucket in self.buckets:
                if (residual := bucket.residual()) is not None:
                    residual *= self.loss_scale / self._carried
            self._carried = self.loss_scale
        buckets = self._parts[part]
        for bucket in buckets:
            bucket.begin()
        self._running, self._next[part], self._in_backward, self._pending = part, 0, True, True
        self._reduces_now = last or self.policy.grad
        self._owed[part] = not self._reduces_now
        try:
            torch.autograd.backward(self._scaled(loss) if gradients is None else loss, gradients)
        finally:
            self._in_backward = False
        unused = [name for bucket in buckets if not bucket.is_complete for name in bucket.collect()]
        if unused and not self._warned:
            self._warned = True
            warnings.warn(f"no gradient in this backward, counted as zero: {', '.join(unused[:8])}", stacklevel=2)
        if self._reduces_now:
            self._reduce_rest(part)
        self._units.end_backward()

    def input_gradients(self, outputs: Tensor, gradient: Tensor | None, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """The first half of a backward in two: gradients of `inputs`, parameters among them or not; nothing is accumulated.

        Without `gradient`, `outputs` is the loss of a micro-batch. `backward(parameters, last, gradients, part)` is the rest.
        """
        start = self._scaled(outputs) if gradient is None else outputs
        found = torch.autograd.grad(start, list(inputs), gradient, allow_unused=True)
        self._units.end_backward()
        return found

    def _scaled(self, loss: Tensor | Sequence[Tensor]) -> Tensor:
        assert isinstance(loss, Tensor), "without gradients a backward begins from one loss"
        return loss if self.loss_scale == 1.0 else loss * self.loss_scale

    def _completed(self, bucket: ParamBucket) -> None:
        if not self._in_backward:
            raise RuntimeError("loss.backward() was called on a module that an engine trains: call engine.backward(loss).")
        if not bucket.is_complete:
            return
        self._units.done(bucket)
        part = self._parts[self._running]
        while self.overlap and self._reduces_now and (at := self._next[self._running]) < len(part) and part[at].is_complete:
            self._reduce_next(self._running)

    def _reduce_next(self, part: int) -> None:
        buckets, at = self._parts[part], self._next[part]
        buckets[at].reduce()
        if self.policy.grad and at >= _IN_FLIGHT:
            buckets[at - _IN_FLIGHT].wait()  # gives the memory of its grad_full back
        self._next[part] += 1

    def _reduce_rest(self, part: int) -> None:
        while self._next[part] < len(self._parts[part]):
            self._reduce_next(part)

    def step(
        self, lr: float | None = None, weight: Tensor | float = 1.0, sums: Sequence[Tensor | float] = (), update: bool = True
    ) -> StepReport:
        """Reduce what is left, clip, update, publish.

        The gradient of the step is the sum over micro-batches and data ranks divided by the sum of `weight` over data
        ranks: with the default that is the mean over ranks; with live tokens it is the token-weighted mean. (Of ranks that work
        on the same tokens the weight of the one that `ParallelMesh.speaks` counts.) `sums` ride along in the same all-reduce and
        come back added up over all ranks. A step of weight zero, and one whose gradients hold a value
        that is not finite, changes nothing on any rank; nor does one with `update=False`, which all ranks must give alike.
        """
        if not self._pending:
            raise RuntimeError("step() without a backward() since the last one: there is no gradient to step along.")
        self._pending = False
        for part, owed in enumerate(self._owed):
            if owed:
                self._reduce_rest(part)
                self._owed[part] = False
        started = time.perf_counter()
        for bucket in self.buckets:
            bucket.advance()
        for bucket in self.buckets:
            bucket.finish()
        exposed = time.perf_counter() - started
        counted = (bucket.own_slice_of_grad() for bucket in self.buckets if bucket.counted)
        squares = sum_of_squares(counted, self._device, self._fused)
        idle = [name for bucket in self.buckets for name in bucket.idle]
        report, divisor = agree(
            self.comm,
            self.mesh.world,
            squares,
            weight if self.mesh.speaks else 0.0,
            [*sums, len(idle)],
            carried=self.loss_scale,
            clip_norm=self.clip_norm,
            update=update,
            exposed_seconds=exposed,
        )
        report, idle_somewhere = replace(report, sums=report.sums[:-1]), report.sums[-1]
        idle = self._idle_everywhere(idle) if self._skip_unused and bool(idle_somewhere) else []
        for bucket in self.buckets:
            bucket.settle(report.skipped)
        self._update(self._lr if lr is None else lr, divisor, report.skipped, idle)
        self._publish()
        if not self._ahead:
            self.wait()
        return report

    def _update(self, lr: float, divisor: Tensor, skipped: Tensor, idle: Collection[str]) -> None:
        """The optimizer's step, where state lives; bucket by bucket where not all of it is to be in memory at once."""
        divisor, skipped = divisor.to(self._state.device), skipped.to(self._state.device)
        if self._state.resident_at_once and not self.precision.split:
            self._optimizer.step(lr, divisor, skipped, idle=idle)
            for bucket in self.buckets:
                bucket.close_master(stepped=True)
            return
        segments = self._holdings.segments_by_bucket()
        for index in walk(self._state, self._holdings.state_by_bucket()):
            self.buckets[index].open_master()
            self._optimizer.step(lr, divisor, skipped, segments[index], idle)
            self.buckets[index].close_master(stepped=True)

    def _idle_everywhere(self, idle: Collection[str]) -> list[str]:
        """The parameters that got no gradient in this step on any rank."""
        names = [slot.name for bucket in self.buckets for slot in bucket.layout.slots]
        flags = torch.tensor([name in idle for name in names], dtype=torch.float32, device=self._device)
        self.comm.all_reduce(flags, self.mesh.data, "min").wait()
        return [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]

    def _publish(self) -> None:
        for bucket in reversed(self.buckets):  # in the order in which a forward uses them
            bucket.publish()

    def wait(self) -> None:
        """Return when the module's parameters are what the last step made of them."""
        if not self.policy.param:
            for bucket in self.buckets:
                bucket.ensure_full()

    def pieces(self) -> Iterator[Piece]:
        """What this rank holds for a checkpoint, by logical name (`Holdings.pieces`).

        Writing into these tensors and then calling `restored` brings a state back.
        """
        self.wait()
        return self._holdings.pieces()

    def restored(self) -> None:
        """Take up what was written into the tensors of `pieces`."""
        self._optimizer.restored()
        self.put_away()
        self._publish()
        self.wait()

    def put_away(self) -> None:
        """Give back memory that `pieces` took, when nothing was written into them."""
        self._holdings.put_away()

    def held_bytes(self) -> dict[str, int]:
        """Bytes of tensors held by kind: parameters, masters, gradients, moments."""
        return self._holdings.held_bytes()

    def predicted_bytes(self) -> dict[str, int]:
        """What `held_bytes` says between steps, from the layouts alone, for a module without frozen parameters."""
        return self._holdings.predicted_bytes()
