"""The engine: hooks, order, accumulation and the step over flat buckets.

One step, in the order of the calls:

    backward(loss)   gradients land in buckets; on the last micro-batch each full bucket is reduced while backward runs on
    step(lr)         finish what is left → norm and vote (one all-reduce) → unscale, clip and update in the optimizer's
                     own launch (device scalars: the host waits for nothing) → publish

Buckets start their collectives in one fixed order on every rank, whatever order their gradients come in. A parameter
that got no gradient counts as zero, so a rank that skips a branch neither hangs the others nor changes their order.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from dist_train.comm.collectives import Collectives
from dist_train.mesh.mesh import ParallelMesh
from dist_train.params.geometry import Piece
from dist_train.zero.bucket import ParamBucket
from dist_train.zero.layout import ParamSpec, plan_buckets
from dist_train.zero.norm import clip_factor, sum_of_squares
from dist_train.zero.policy import Precision, ShardPolicy


@dataclass(frozen=True)
class FlatSegment:
    """One optimizer group's run of a bucket: what the optimizer updates, and the gradient it reads."""

    group: str
    master: Tensor
    grad: Tensor


class BoundOptimizer(Protocol):
    """An optimizer over flat segments."""

    def step(self, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        """Divide gradients by `grad_scale` and update in place; leave everything untouched where `found_inf` is 1."""

    def moments(self, segment: int) -> dict[str, Tensor]:
        """State tensors of a segment, each as long as its master."""

    @property
    def step_count(self) -> Tensor:
        """Number of updates made, an fp32 scalar that may be written."""


class Optimizer(Protocol):
    """What `dt.AdamW(lr=…)` is: a recipe that becomes an optimizer once the engine knows its segments."""

    @property
    def lr(self) -> float: ...

    def bind(self, segments: Sequence[FlatSegment]) -> BoundOptimizer: ...


@dataclass(frozen=True)
class StepReport:
    """What a step did; equal on every rank. Tensors are scalars on the engine's device: reading one waits for the step."""

    grad_norm: Tensor  # global norm before clipping
    finite: Tensor  # bool: every gradient element on every rank is finite
    skipped: Tensor  # 1.0 when gradients were not finite, or the step had no weight: nothing was updated
    weight: Tensor  # Σ over data ranks of the weights given to `step`
    sums: Tensor  # Σ over data ranks of the sums given to `step`
    exposed_seconds: float  # how long the host waited for collectives that backward did not hide


class ZeroEngine:
    """Trains any `nn.Module` over the data axis of a mesh.

    Args:
        module: its trainable parameters are moved into flat buckets (their values stay); rank 0's values win.
        optimizer: a recipe such as `dt.AdamW(lr=3e-4)`.
        clip_norm: global norm above which gradients are scaled down; 0 for never.
        bucket_bytes: size of a bucket in the reduce dtype.
        overlap: reduce buckets during backward; off, they are reduced after it. Bits are the same.
        group_of: name and parameter → optimizer group; default: `no_decay` for tensors of fewer than two dimensions.

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
        group_of: Callable[[str, nn.Parameter], str] | None = None,
    ) -> None:
        self.module, self.mesh, self.comm = module, mesh, comm or Collectives()
        self.policy, self.precision = policy or ShardPolicy(), precision or Precision()
        self.clip_norm, self.overlap, self.loss_scale = clip_norm, overlap, 1.0
        if self.policy.optim:
            raise ValueError(f"{self.policy}: this engine replicates state over data ranks; use stage=0.")
        self._lr, self._last, self._next = optimizer.lr, True, 0
        self._in_backward = self._pending = self._warned = False
        group_of = group_of or (lambda _name, param: "decay" if param.ndim >= 2 else "no_decay")
        params = {name: param for name, param in module.named_parameters() if param.requires_grad}
        if not params:
            raise ValueError("the module has no parameter that requires a gradient: nothing to train.")
        self._prepare_rest()
        specs = [ParamSpec(n, tuple(p.shape), str(p.dtype), group_of(n, p)) for n, p in params.items()]
        layouts = plan_buckets(specs, bucket_bytes, self.precision.reduce.itemsize, mesh.data.size)
        self.buckets = [
            ParamBucket(layout, [params[s.name] for s in layout.slots], self.precision, mesh.data, self.comm, self._completed)
            for layout in layouts
        ]
        self._segments = [(bucket, segment) for bucket in self.buckets for segment in bucket.layout.segments]
        self._optimizer = optimizer.bind(
            [FlatSegment(s.group, b.master[s.start : s.stop], b.grad_full[s.start : s.stop]) for b, s in self._segments]
        )
        self._device = self.buckets[0].full.device

    def _prepare_rest(self) -> None:
        """Frozen parameters take the compute dtype, and they and the buffers the values of rank 0."""
        for param in self.module.parameters():
            if not param.requires_grad:
                if self.precision.compute is not None and param.is_floating_point():
                    param.data = param.data.to(self.precision.compute)
                self.comm.broadcast(param.data, self.mesh.data).wait()
        for buffer in self.module.buffers():
            self.comm.broadcast(buffer, self.mesh.data).wait()

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Backward of one micro-batch. `last=False` says that more follow before `step`: their sum is then reduced once."""
        for bucket in self.buckets:
            bucket.begin()
        self._last, self._next, self._in_backward, self._pending = last, 0, True, True
        try:
            (loss if self.loss_scale == 1.0 else loss * self.loss_scale).backward()
        finally:
            self._in_backward = False
        unused = [name for bucket in self.buckets if not bucket.is_complete for name in bucket.collect()]
        if unused and not self._warned:
            self._warned = True
            warnings.warn(f"no gradient in this backward, counted as zero: {', '.join(unused[:8])}", stacklevel=2)
        if last:
            self._reduce_rest()

    def _completed(self, _bucket: ParamBucket) -> None:
        if not self._in_backward:
            raise RuntimeError("loss.backward() was called on a module that an engine trains: call engine.backward(loss).")
        while self.overlap and self._last and self._next < len(self.buckets) and self.buckets[self._next].is_complete:
            self.buckets[self._next].reduce()
            self._next += 1

    def _reduce_rest(self) -> None:
        for bucket in self.buckets[self._next :]:
            bucket.reduce()
        self._next = len(self.buckets)

    def step(self, lr: float | None = None, weight: Tensor | float = 1.0, sums: Sequence[Tensor | float] = ()) -> StepReport:
        """Reduce what is left, clip, update, publish.

        The gradient of the step is the sum over micro-batches and data ranks divided by the sum of `weight` over data
        ranks: with the default that is the mean over ranks; with live tokens it is the token-weighted mean. `sums` ride
        along in the same all-reduce and come back added up. A step of weight zero, and one whose gradients hold a value
        that is not finite, changes nothing on any rank.
        """
        if not self._pending:
            raise RuntimeError("step() without a backward() since the last one: there is no gradient to step along.")
        self._pending = False
        if not self._last:
            self._reduce_rest()
        started = time.perf_counter()
        for bucket in self.buckets:
            bucket.finish()
        exposed = time.perf_counter() - started
        mine = self.mesh.data.index
        squares = sum_of_squares((b.grad_full[b.layout.shard(mine)] for b in self.buckets), self._device)
        local = [squares, *(torch.as_tensor(x, dtype=torch.float64, device=self._device) for x in (weight, *sums))]
        totals = torch.stack(local)
        self.comm.all_reduce(totals, self.mesh.data).wait()

        scale = totals[1] * self.loss_scale
        # In fp32 the norm is the same bits for every bucket size and number of ranks: their fp64 sums differ in the last place.
        norm = (totals[0].sqrt() / scale.clamp(min=torch.finfo(torch.float64).tiny)).to(torch.float32)
        finite = totals[0].isfinite()
        skipped = 1.0 - (finite & (totals[1] > 0)).to(torch.float32)
        grad_scale = torch.where(skipped > 0, 1.0, scale / clip_factor(norm, self.clip_norm)).to(torch.float32)
        self._optimizer.step(self._lr if lr is None else lr, grad_scale, skipped)
        for bucket in self.buckets:
            bucket.publish()
        return StepReport(norm, finite, skipped, totals[1], totals[2:], exposed)

    def pieces(self) -> Iterator[Piece]:
        """Everything a checkpoint holds of this engine, by logical name: `model/<name>`, `optim/<name>/<moment>`, `optim/step`.

        Writing into these tensors and then calling `restored` brings a state back.
        """
        for index, (bucket, segment) in enumerate(self._segments):
            moments = self._optimizer.moments(index)
            for slot in segment.slots:
                at, origin = slice(slot.start - segment.start, slot.stop - segment.start), (0,) * len(slot.shape)
                weights = bucket.master[slot.start : slot.stop].view(slot.shape)
                yield Piece(f"model/{slot.name}", weights, slot.shape, origin)
                for moment, flat in moments.items():
                    yield Piece(f"optim/{slot.name}/{moment}", flat[at].view(slot.shape), slot.shape, origin)
        for name, param in self.module.named_parameters():
            if not param.requires_grad:
                yield Piece(f"model/{name}", param.data, tuple(param.shape), (0,) * param.ndim)
        for name, buffer in self.module.named_buffers():
            yield Piece(f"model/{name}", buffer, tuple(buffer.shape), (0,) * buffer.ndim)
        yield Piece("optim/step", self._optimizer.step_count, (), ())

    def restored(self) -> None:
        """Take up what was written into the tensors of `pieces`."""
        for bucket in self.buckets:
            bucket.publish()

    def held_bytes(self) -> dict[str, int]:
        """Bytes of tensors held by kind (parameters, masters, gradients, moments), counted from the tensors themselves."""
        held: dict[str, int] = {"parameters": 0, "masters": 0, "gradients": 0, "moments": 0}
        for bucket in self.buckets:
            for kind, tensors in bucket.tensors().items():
                held[kind] += sum(t.untyped_storage().nbytes() for t in tensors)
        for index in range(len(self._segments)):
            held["moments"] += sum(t.untyped_storage().nbytes() for t in self._optimizer.moments(index).values())
        return held
