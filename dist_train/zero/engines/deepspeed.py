"""DeepSpeed's ZeRO (arXiv:1910.02054) as an `Engine`, stages 0 to 3.

DeepSpeed keeps, partitions, reduces and gathers; it decides when, in which buckets and over which buffers. The optimizer that
it calls is ours in a torch optimizer's dress, and so are norm, vote and clip factor, which that optimizer is told before:
a run differs from one of our engine in nothing else. What it updates, as flat fp32 tensors:

    stage 0       each parameter
    stage 1, 2    this rank's equal part of each optimizer group, cut anywhere: a copy, from which the group's parameters
                  (views of one flat buffer) are gathered
    stage 3       of each parameter a run of ceil(elements ÷ ranks), on the last ranks perhaps short or empty: a copy too

DeepSpeed is a guest here. It replaces `torch.nn.functional.linear` (stage 3), sets environment variables and keeps its groups in
module globals: all of that holds only while one of its calls runs (`Surroundings`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from dist_train.comm.collectives import Collectives
from dist_train.mesh.mesh import ParallelMesh
from dist_train.params.geometry import Piece
from dist_train.zero.engines.guest import Surroundings
from dist_train.zero.engines.peer import require_ranks
from dist_train.zero.holdings import part_pieces
from dist_train.zero.layout import FLAT, Slot, SlotPart, slot_parts
from dist_train.zero.norm import agree, sum_of_squares
from dist_train.zero.policy import Precision
from dist_train.zero.protocol import FlatSegment, Optimizer, StepReport


class DeepSpeedEngine:
    """Trains a module of fp32 parameters.

    A parameter that gets no gradient on any rank counts as zero. Raises ValueError on one data rank and for what DeepSpeed cannot
    do, and RuntimeError in a step for which ranks used different parameters, or in another order: DeepSpeed reduces what came,
    in the order in which it came, and would add gradients of one parameter to those of another.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        mesh: ParallelMesh,
        comm: Collectives | None = None,
        *,
        stage: int,
        precision: Precision | None = None,
        clip_norm: float = 0.0,
        bucket_bytes: float = 25e6,
        persistent_numel: int = 100_000,
    ) -> None:
        """`persistent_numel`: at stage 3 smaller parameters stay gathered between steps (the default is DeepSpeed's own)."""
        require_ranks(mesh, "deepspeed")
        self.module, self.mesh, self.comm, self.stage = module, mesh, comm or Collectives(), stage
        self.clip_norm, self.loss_scale = clip_norm, 1.0
        self._lr, self._pending = optimizer.lr, False
        self._came = 0  # checksum over the names of the gradients that came since the last step, in their order
        precision = precision or Precision()
        self._bucket_numel = max(2, int(bucket_bytes / precision.reduce.itemsize))
        low = precision.compute not in (None, torch.float32)
        if low and (precision.compute != torch.bfloat16 or stage < 2):
            rule = f"shard.engine=deepspeed: does not compute in {precision.compute} at stage {stage}"
            raise ValueError(f"{rule}; set fp32, or bf16 at stage 2 or 3, or shard.engine=native.")
        groups = self._prepare(optimizer)
        exact = {name: param.detach().clone() for name, param in module.named_parameters() if low}
        self._surroundings = Surroundings(mesh)
        with self._surroundings.starting():
            import deepspeed
            from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

            ZERO_SUPPORTED_OPTIMIZERS.append(_Dress)  # else it warns
            deepspeed.ops.__compatible_ops__ = {}  # else it compiles a shared-memory all-reduce first, for minutes
            parameters = [{"params": [param for _, param in members], "name": name} for name, members in groups.items()]
            self._deepspeed: Any = deepspeed.initialize(
                model=module,
                optimizer=_Dress(parameters, self._update),
                mpu=self._surroundings.groups,
                config=_config(stage, precision, self._bucket_numel, persistent_numel),
            )[0]
        self._zero: Any = self._deepspeed.optimizer  # of DeepSpeed; at stage 0 the optimizer itself
        self._surroundings.surround(module, spare_weights=stage == 3)
        self._updated, self._segments = self._lay_out(groups)
        self._place = {id(tensor): at for at, tensor in enumerate(self._updated)}
        self._begin_with(exact)
        self._optimizer = optimizer.bind(self._segments)
        self._now: tuple[float, Tensor, Tensor] | None = None  # learning rate, divisor, skipped: of the step that is being made

    def _prepare(self, optimizer: Optimizer) -> dict[str, list[tuple[str, nn.Parameter]]]:
        """The trained parameters by optimizer group; all values become those of rank 0."""
        groups: dict[str, list[tuple[str, nn.Parameter]]] = {}
        for name, param in self.module.named_parameters():
            if param.dtype != torch.float32:
                rule = f"{name} is {param.dtype}: shard.engine=deepspeed takes fp32 parameters"
                raise ValueError(f"{rule}; set shard.engine=native.")
            if param.ndim == 0 or not param.numel():
                rule = f"{name} has the shape {list(param.shape)}: DeepSpeed takes parameters with dimensions and elements"
                raise ValueError(f"{rule}; set shard.engine=native.")
            param.data = param.data.contiguous()
            if param.requires_grad:
                groups.setdefault(optimizer.group(name, param), []).append((name, param))
                param.register_post_accumulate_grad_hook(partial(self._note, name.encode()))
        if not groups:
            raise ValueError("the module has no parameter that requires a gradient: nothing to train.")
        for group in groups:
            if optimizer.cut(group) != FLAT:
                rule = f"{type(optimizer).__name__}: it needs whole parameters, or whole blocks, and DeepSpeed cuts anywhere"
                raise ValueError(f"{rule}; set another optimizer, or shard.engine=native.")
        for tensor in [*self.module.parameters(), *self.module.buffers()]:
            self.comm.broadcast(tensor.data, self.mesh.data).wait()
        return dict(sorted(groups.items()))

    def _lay_out(self, groups: dict[str, list[tuple[str, nn.Parameter]]]) -> tuple[list[Tensor], list[FlatSegment]]:
        """What DeepSpeed has our optimizer update, as it names it, and as our optimizers do."""
        zero, rank = self._zero, self.mesh.data.index
        names = {param: name for members in groups.values() for name, param in members}
        held: list[tuple[str, Tensor, list[SlotPart]]] = []
        if self.stage == 0:
            for group, members in groups.items():
                held += [(group, param, _whole(name, tuple(param.shape))) for name, param in members]
        elif self.stage < 3:
            for at, (group, flat) in enumerate(zip(groups, zero.single_partition_of_fp32_groups, strict=True)):
                placed = zip(zero.bit16_groups[at], zero.round_robin_bit16_offsets[at], strict=True)
                slots = [Slot(names[param], tuple(param.shape), start) for param, start in placed]
                start = rank * zero.partition_size[at]
                held.append((group, flat, slot_parts(slots, slice(start, start + zero.partition_size[at]))))
        else:
            for at, (params, flat) in enumerate(zip(zero.fp16_groups, zero.fp32_partitioned_groups_flat, strict=True)):
                group = list(groups)[zero.sub_group_to_group_id[at]]
                parts, start = [], 0
                for param in params:
                    parts += _run(names[param], param, rank, start)
                    start += param.partition_numel()
                held.append((group, flat, parts))
        flats = [flat.detach().view(-1) for _, flat, _ in held]
        segments = [FlatSegment(group, flat, flat, parts) for (group, _, parts), flat in zip(held, flats, strict=True)]
        return [tensor for _, tensor, _ in held], segments

    @torch.no_grad()
    def _begin_with(self, exact: dict[str, Tensor]) -> None:
        """Masters take the values from before the cast: DeepSpeed makes its own of the rounded ones."""
        if exact:
            for segment in self._segments:
                for part in segment.parts:
                    count = part.at.stop - part.at.start
                    segment.master[part.at] = exact[part.slot.name].view(-1)[part.first : part.first + count]

    def _note(self, name: bytes, _param: Tensor | None = None) -> None:
        self._came = crc32(name, self._came)

    def begin_pass(self, training: bool) -> None:
        """DeepSpeed follows what the module does."""

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Backward of one micro-batch. Stages 0 and 1 reduce in `step`, so it does not matter which is the last."""
        from deepspeed.runtime.utils import register_output_backward_hooks

        with self._surroundings:
            if self.stage:
                self._zero.clear_backward_seen_flag()  # what DeepSpeed does as a forward begins, which here goes past it
            if self.stage == 3 and not self._pending:
                self._zero.grad_partitions_flat_buffer.zero_()  # where nothing comes, the last step's gradient would stay
            self._pending = True
            self._note(b"backward")
            self._deepspeed.set_gradient_accumulation_boundary(False)
            register_output_backward_hooks(loss, self._deepspeed._backward_prologue)
            self._deepspeed.backward(loss * self.loss_scale, scale_wrt_gas=False)

    def step(
        self, lr: float | None = None, weight: Tensor | float = 1.0, sums: Sequence[Tensor | float] = (), update: bool = True
    ) -> StepReport:
        """Reduce what is left, clip and update, as `ZeroEngine.step`."""
        if not self._pending:
            raise RuntimeError("step() without a backward() since the last one: there is no gradient to step along.")
        self._pending = False
        with self._surroundings:
            self._deepspeed.set_gradient_accumulation_boundary(True)
            if self.stage < 2:
                self._deepspeed.allreduce_gradients(self._bucket_numel)
            elif self.stage == 2:
                self._zero.finalize_gradient_accumulation_boundary()
            squares = sum_of_squares(self._counted_gradients(), self.mesh.device)
            came, self._came = self._came & 0xFFFFF, 0  # few enough bits for the sums of their squares to be exact
            report, divisor = agree(
                self.comm,
                self.mesh.data,
                squares,
                weight,
                [*sums, came, came * came],
                carried=self.loss_scale / self.mesh.data.size,
                clip_norm=self.clip_norm,
                update=update,
                exposed_seconds=None,
            )
            self._require_one_order(*report.sums[-2:].tolist())
            report = replace(report, sums=report.sums[:-2])
            self._now = self._lr if lr is None else lr, divisor, report.skipped
            self._deepspeed.step()  # where a gradient is not finite, stage 3 does not even ask our optimizer
            self._now = None
        return report

    def _require_one_order(self, total: float, squares: float) -> None:
        """Numbers of the ranks are all equal where the sum of their squares is the square of their sum over their count."""
        if self.stage and int(squares) * self.mesh.data.size != int(total) ** 2:
            raise RuntimeError(
                "ranks got gradients of different parameters, or in another order, and DeepSpeed has mixed them; "
                "let every rank use the same ones, or set shard.engine=native."
            )

    def _counted_gradients(self) -> Iterator[Tensor]:
        """The elements of the averaged gradients that this rank alone counts in the norm."""
        if self.stage:
            for gradients in self._zero.averaged_gradients.values():
                yield from (gradient.reshape(-1) for gradient in gradients)
        else:
            for param in self._updated:
                if param.grad is not None:
                    yield param.grad.reshape(-1).tensor_split(self.mesh.data.size)[self.mesh.data.index]

    def _update(self, tensors: Sequence[Tensor]) -> None:
        """DeepSpeed's call for an update of some of the tensors that we laid out, their averaged gradients in place."""
        if self._now is None:
            raise RuntimeError("DeepSpeed's own step() was called on a module that this engine trains: call engine.step().")
        places = [self._place[id(tensor)] for tensor in tensors]
        for at, tensor in zip(places, tensors, strict=True):
            self._segments[at].grad = torch.zeros_like(self._segments[at].master) if tensor.grad is None else tensor.grad.view(-1)
        self._optimizer.step(*self._now, segments=range(places[0], places[-1] + 1))

    def pieces(self) -> Iterator[Piece]:
        """What this rank holds for a checkpoint, under the names of `ZeroEngine.pieces`."""
        for index, segment in enumerate(self._segments):
            moments, steps = self._optimizer.moments(index), self._optimizer.steps(index)
            for part, step in zip(segment.parts, steps.unbind(), strict=True):
                yield from part_pieces(f"model/{part.slot.name}", part, segment.master)
                for moment, flat in moments.items():
                    yield from part_pieces(f"optim/{part.slot.name}/{moment}", part, flat)
                yield Piece.whole(f"optim/{part.slot.name}/step", step)
        for name, param in self.module.named_parameters():
            if not param.requires_grad:
                yield from self._frozen(name, param)
        for name, buffer in self.module.named_buffers():
            yield Piece.whole(f"model/{name}", buffer)

    def _frozen(self, name: str, param: Any) -> Iterator[Piece]:
        if self.stage < 3:
            yield Piece.whole(f"model/{name}", param.data)
            return
        for part in _run(name, param, self.mesh.data.index, 0):
            yield from part_pieces(f"model/{name}", part, param.ds_tensor)

    def restored(self) -> None:
        """Take up what was written into the tensors of `pieces`; collective."""
        self._optimizer.restored()
        with self._surroundings:
            if self.stage in (1, 2):
                self._zero.update_lp_params()
            elif self.stage == 3:
                for at in range(len(self._segments)):
                    self._zero._reassign_or_swap_out_partitioned_parameters(at)
                self._zero.empty_partition_cache()  # what was gathered of the values before
                if persistent := self._zero.persistent_parameters:
                    persistent[0].all_gather(persistent)

    def put_away(self) -> None:
        """`pieces` takes no memory."""

    def held_bytes(self) -> dict[str, int]:
        """Bytes of tensors held by kind, each memory counted once. What DeepSpeed holds within a call is not among them."""
        zero, params = self._zero, list(self.module.parameters())
        parameters: list[Tensor] = [param.data for param in params]
        gradients: list[Tensor] = [param.grad for param in params if param.grad is not None]
        if self.stage == 3:
            parameters += [param.ds_tensor for param in params]  # type: ignore[attr-defined]
            gradients.append(zero.grad_partitions_flat_buffer)
        elif self.stage:
            gradients += [gradient for found in zero.averaged_gradients.values() for gradient in found or ()]
        masters = [segment.master for segment in self._segments]
        moments = [flat for index in range(len(self._segments)) for flat in self._optimizer.moments(index).values()]
        held = {"parameters": _bytes(parameters), "gradients": _bytes(gradients), "moments": _bytes(moments)}
        return held | {"masters": _bytes([*parameters, *masters]) - held["parameters"]}

    def predicted_bytes(self) -> None:
        """DeepSpeed decides about memory here."""
        return None


class _Dress(torch.optim.Optimizer):
    """What DeepSpeed takes for the optimizer: its step hands over the tensors that are to be updated now."""

    def __init__(self, groups: list[dict[str, Any]], update: Any) -> None:
        super().__init__(groups, {"lr": 0.0})
        self._update = update

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._update([param for group in self.param_groups for param in group["params"]])


def _config(stage: int, precision: Precision, bucket_numel: int, persistent_numel: int) -> dict[str, Any]:
    """DeepSpeed's own configuration: its defaults but for what our law and our optimizer do, and the size of buckets."""
    return {
        "bf16": {"enabled": precision.compute == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "bf16" if precision.reduce == torch.bfloat16 else "fp32",
        "train_micro_batch_size_per_gpu": 1,  # it only multiplies into a report that is switched off
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # the default is 1
        "timers": {"throughput": {"enabled": False}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": bucket_numel,
            "allgather_bucket_size": bucket_numel + bucket_numel % 2,
            "compute_grad_norm": stage not in (1, 2),  # ours is another; stage 3 cannot leave its own out
            "stage3_prefetch_bucket_size": bucket_numel,
            "stage3_param_persistence_threshold": persistent_numel,
        },
    }


def _whole(name: str, shape: tuple[int, ...]) -> list[SlotPart]:
    slot = Slot(name, shape, 0)
    return [SlotPart(slot, slice(0, slot.stop), 0)]


def _run(name: str, param: Any, rank: int, start: int) -> list[SlotPart]:
    """The part of a partitioned parameter that `rank` holds, its partition beginning at element `start` of what holds it."""
    slot, each = Slot(name, tuple(param.ds_shape), 0), param.partition_numel()
    first = min(slot.stop, rank * each)
    count = min(slot.stop - first, each)
    return [SlotPart(slot, slice(start, start + count), first)] if count else []


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
