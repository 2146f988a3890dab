"""Runs a model over micro-batches: the actions of a `Schedule`, on this rank, on real tensors.

One rank alone runs F B F B, which is plain gradient accumulation, so there is no second way to train.

What a stage gets and gives is the residual stream. A forward that begins with a message keeps (input, output) until its
backward; a backward's own result is the gradient of that input. Where a schedule has backward in halves, the first computes the
input's gradient and those of the few parameters that the same pass needs anyway, and leaves the products for matrices in a
queue; the second computes those and hands all of them to the engine (arXiv:2401.10241).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dist_train.comm.collectives import Collectives, Handle
from dist_train.mesh.mesh import Group, ParallelMesh
from dist_train.model.attention import LayerCache
from dist_train.model.transformer import Inputs, Transformer
from dist_train.pipeline.orders import COMPUTES, SENDS, Action, Kind
from dist_train.pipeline.schedule import Message, Schedule
from dist_train.pipeline.stage import units_of


class Trains(Protocol):
    """What the executor asks of an engine (`ZeroEngine`); of one that trains whole models only, `backward(loss, last)`."""

    def begin_pass(self, training: bool) -> None: ...

    def backward(
        self, loss: Any, last: bool = True, gradients: Tensor | Sequence[Tensor] | None = None, part: int = 0
    ) -> None: ...

    def input_gradients(
        self, outputs: Tensor, gradient: Tensor | None, inputs: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]: ...


class WeightQueue(Protocol):
    """Products for weights' gradients that backward left for later (`tensor.WeightGradients`): first left, first taken."""

    def __len__(self) -> int: ...

    def take(self, count: int | None = None) -> Iterable[tuple[nn.Parameter, Tensor]]: ...


@dataclass
class _Kept:
    """What a forward leaves for its backward, and the first half of one for the second."""

    source: Tensor | None
    output: Tensor | None
    gradients: list[tuple[nn.Parameter, Tensor]] = field(default_factory=list)
    products: int = 0  # in the queue


class Executor:
    """One rank's side of a pipeline. `stream(rows, tokens)`: shape of the residual stream on this rank, `dtype` its dtype."""

    def __init__(
        self,
        model: Transformer,
        engine: Trains,
        mesh: ParallelMesh,
        comm: Collectives,
        schedule: Callable[[int, bool], Schedule],
        stream: Callable[[int, int], tuple[int, ...]],
        dtype: torch.dtype,
        queue: WeightQueue | None = None,
    ) -> None:
        """`schedule(microbatches, training)`: what to run. `queue`: where backward leaves products, if the schedule splits it."""
        self.model, self.engine, self.mesh, self.comm = model, engine, mesh, comm
        self.schedule, self._stream, self._dtype, self._queue = schedule, stream, dtype, queue
        self.watch, self._step = Stopwatch(mesh.device), Stopwatch(mesh.device)
        self.busy_seconds = self.step_seconds = 0.0  # of all steps but the newest: how long this rank computed, and in all
        self._ends = [cut.last == model.config.layers for cut in model.cuts]
        parts = [units_of(model, cut) for cut in model.cuts]
        self._parameters = [list(dict.fromkeys(p for unit in units for p in unit.parameters())) for units in parts]

    def train(self, micro_batches: Sequence[Inputs], scale: float, z_loss: float) -> Tensor:
        """Forward and backward of a step's micro-batches, each objective times `scale`. Their cross entropy, a scalar in fp64,
        on one of the ranks that work on them; zero on the others."""
        self.read_clocks()
        with self._step:
            return _Pass(self, self.schedule(len(micro_batches), True), micro_batches, scale, z_loss).run()

    def read_clocks(self) -> None:
        """Add the newest step to `busy_seconds` and `step_seconds`; cheap once it is done."""
        self.busy_seconds += self.watch.take()
        self.step_seconds += self._step.take()

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[Inputs]) -> Tensor:
        """The cross entropy of micro-batches, as `train`, without gradients."""
        self.read_clocks()
        try:
            return _Pass(self, self.schedule(len(micro_batches), False), micro_batches, 1.0, 0.0).run()
        finally:
            self.watch.take()

    @torch.no_grad()
    def logits(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        documents_BT: Tensor | None = None,
        caches: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        """logits_BTV on every rank, of tokens that every rank has; called on all of them."""
        schedule, here = self.schedule(1, False), self.mesh.pp.index
        x: Tensor | None = None
        for stage in range(schedule.stages):
            rank, chunk = schedule.place_of(stage)
            if rank == here:
                x = self.model(tokens_BT, positions_BT, documents_BT, caches=caches, cut=chunk, x_BTD=x)
            if stage + 1 < schedule.stages:
                to, _ = schedule.place_of(stage + 1)
                if rank != to and rank == here:
                    assert x is not None
                    self.send(x.contiguous(), to).wait()
                elif rank != to and to == here:
                    x = self.empty(tokens_BT)
                    self.receive(x, rank).wait()
        last, _ = schedule.place_of(schedule.stages - 1)
        if last != here:
            x = tokens_BT.new_empty(*tokens_BT.shape, self.model.config.vocab, dtype=self._dtype)
        assert x is not None
        self.comm.broadcast(x, self.mesh.pp, last).wait()
        return x

    def empty(self, tokens_BT: Tensor) -> Tensor:
        """Memory for a message about these tokens."""
        rows, tokens = tokens_BT.shape
        return torch.empty(self._stream(rows, tokens), dtype=self._dtype, device=self.mesh.device)

    def send(self, x: Tensor, to: int) -> Handle:
        return self.comm.send(x, self._channel(self.mesh.pp.index, to), to)

    def receive(self, out: Tensor, source: int) -> Handle:
        return self.comm.receive(out, self._channel(source, self.mesh.pp.index), source)

    def _channel(self, source: int, to: int) -> Group:
        return self.mesh.pp if source < to else self.mesh.back


class _Pass:
    """One run of a schedule."""

    def __init__(
        self, executor: Executor, schedule: Schedule, micro_batches: Sequence[Inputs], scale: float, z_loss: float
    ) -> None:
        self.executor, self.schedule, self.micro_batches = executor, schedule, micro_batches
        self.scale, self.z_loss = scale, z_loss
        self.rank, self.engine = executor.mesh.pp.index, executor.engine
        self.entropy = torch.zeros((), dtype=torch.float64, device=executor.mesh.device)
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.arrived: dict[Message, tuple[Tensor, Handle]] = {}
        self.made: dict[Message, Tensor] = {}
        self.sends: deque[tuple[Handle, Tensor]] = deque()
        self.does: dict[Kind, Callable[[Action, Tensor | None], Tensor | None]] = {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.BACKWARD_INPUT: self.backward_input,
            Kind.BACKWARD_WEIGHT: self.backward_weight,
        }

    def run(self) -> Tensor:
        self.engine.begin_pass(self.schedule.training)
        for action in self.schedule.actions(self.rank):
            if action.kind in COMPUTES:
                self.compute(action)
            elif action.kind in SENDS:
                self.send(self.schedule.message(self.rank, action))
            else:
                message = self.schedule.message(self.rank, action)
                buffer = self.executor.empty(self.micro_batches[action.microbatch].tokens_BT)
                self.arrived[message] = buffer, self.executor.receive(buffer, self.schedule.sender(message))
        for handle, _ in self.sends:
            handle.wait()
        return self.entropy

    def compute(self, action: Action) -> None:
        taken, given = self.schedule.takes(self.rank, action), self.schedule.gives(self.rank, action)
        source = None
        if taken is not None:
            source, handle = self.arrived.pop(taken)
            handle.wait()
        with self.executor.watch:
            result = self.does[action.kind](action, source)
        if given is not None:
            assert result is not None
            if self.schedule.receiver(given) == self.rank:
                self.arrived[given] = result, Handle()
            else:
                self.made[given] = result

    def send(self, message: Message) -> None:
        x = self.made.pop(message).contiguous()
        self.sends.append((self.executor.send(x, self.schedule.receiver(message)), x))
        if len(self.sends) > 2 * self.schedule.stages:  # (schedules survive sends that block)
            self.sends.popleft()[0].wait()

    def forward(self, action: Action, source: Tensor | None) -> Tensor | None:
        micro, training = self.micro_batches[action.microbatch], self.schedule.training
        if source is not None and training:
            source.requires_grad_()
        ends = self.executor._ends[action.chunk]
        labels_BT = micro.labels_BT if ends else None
        inputs = (micro.tokens_BT, micro.positions_BT, micro.documents_BT)
        output = self.executor.model(*inputs, labels_BT=labels_BT, z_loss=self.z_loss, cut=action.chunk, x_BTD=source)
        if ends:
            objective, entropy = output
            if self.executor.mesh.tp.index == 0:
                self.entropy += entropy
            output = objective * self.scale
        if training:
            self.kept[action.chunk, action.microbatch] = _Kept(source, output)
        return None if ends else output.detach()

    def backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        kept = self.kept.pop((action.chunk, action.microbatch))
        if self.schedule.stages == 1:
            self.engine.backward(kept.output, self.is_last(action))
        else:
            self.engine.backward(kept.output, self.is_last(action), gradient, action.chunk)
        return None if kept.source is None else kept.source.grad

    def backward_input(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        kept, queue = self.kept[action.chunk, action.microbatch], self.executor._queue
        assert queue is not None and kept.output is not None, "a schedule with backward in halves needs a queue"
        params = [param for param in self.executor._parameters[action.chunk] if param.requires_grad]
        sources, before = [] if kept.source is None else [kept.source], len(queue)
        found = self.engine.input_gradients(kept.output, gradient, [*sources, *params])
        at_once = zip(params, found[len(sources) :], strict=True)
        kept.gradients = [(param, gradient) for param, gradient in at_once if gradient is not None]
        kept.products, kept.output = len(queue) - before, None  # the graph is done with
        return found[0] if sources else None

    def backward_weight(self, action: Action, _: Tensor | None) -> None:
        kept, queue = self.kept.pop((action.chunk, action.microbatch)), self.executor._queue
        assert queue is not None
        # (A rank's second halves come in the order of its first ones.)
        pairs = [*kept.gradients, *queue.take(kept.products)]
        params, gradients = [param for param, _ in pairs], [gradient for _, gradient in pairs]
        self.engine.backward(params, self.is_last(action), gradients, action.chunk)

    def is_last(self, action: Action) -> bool:
        return action.microbatch == len(self.micro_batches) - 1


class Stopwatch:
    """How long a device computes in the blocks that it is around: by the host's clock on a CPU, by events on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._cuda, self._started, self._seconds = device.type == "cuda", 0.0, 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        if self._cuda:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            self._events.append(pair)
        else:
            self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._started

    def take(self) -> float:
        """Seconds since the last call. On CUDA it waits for what was recorded."""
        for start, end in self._events:
            end.synchronize()
            self._seconds += start.elapsed_time(end) / 1e3
        seconds, self._seconds = self._seconds, 0.0
        self._events.clear()
        return seconds
