"""What the engines over torch's own data parallelism share.

Torch brings parameters and gradients together, in its buckets and at its times. The rest is ours, so a run differs in nothing
else: the law of the loss, the norm and the vote from one all-reduce, the optimizer, and the names in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from dist_train.comm.collectives import Collectives
from dist_train.mesh.mesh import ParallelMesh
from dist_train.params.geometry import ParamGeometry, Piece
from dist_train.zero.layout import FLAT, Slot, SlotPart
from dist_train.zero.norm import agree, sum_of_squares
from dist_train.zero.protocol import FlatSegment, Optimizer, StepReport


@dataclass(frozen=True)
class Share:
    """What this rank holds of one parameter: the box `offset .. offset + local.shape` of what tensor parallelism left of it here,
    which is the whole parameter or the box of it that `geometry` tells."""

    name: str
    param: nn.Parameter
    local: Tensor
    offset: tuple[int, ...]
    geometry: ParamGeometry

    @property
    def part(self) -> SlotPart:
        """It, as the optimizer knows it: one parameter."""
        return SlotPart(Slot(self.name, tuple(self.local.shape), 0), slice(0, self.local.numel()), 0)

    def piece(self, name: str, tensor: Tensor) -> Piece:
        return self.geometry.shift(Piece(name, tensor, tuple(self.local.shape), self.offset), name)


class PeerEngine:
    """An `Engine` whose gradients arrive in `param.grad`, averaged over data ranks."""

    def __init__(
        self,
        module: nn.Module,
        shares: Sequence[Share],
        optimizer: Optimizer,
        mesh: ParallelMesh,
        comm: Collectives,
        clip_norm: float,
    ) -> None:
        self.module, self.mesh, self.comm, self.clip_norm, self.loss_scale = module, mesh, comm, clip_norm, 1.0
        self._shares = [share for share in shares if share.param.requires_grad]
        self._frozen = [share for share in shares if not share.param.requires_grad]
        # Only where they lie is known yet; `step` puts the gradients in.
        groups = [optimizer.group(share.name, share.param) for share in self._shares]
        if any(optimizer.cut(group) != FLAT for group in groups):
            told = f"{type(optimizer).__name__}: it needs whole parameters or whole blocks, of which this engine knows nothing"
            raise ValueError(f"{told}; set another optimizer, or shard.engine=native.")
        self._segments = [FlatSegment(g, s.local, s.local, [s.part]) for g, s in zip(groups, self._shares, strict=True)]
        self._optimizer, self._lr = optimizer.bind(self._segments), optimizer.lr
        self._pending = False

    def begin_pass(self, training: bool) -> None:
        """Torch follows what the module does."""

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Backward of one micro-batch; `last=False`: more follow before `step`."""
        if not self._pending:
            for share in self._shares:
                share.param.grad = None
        self._pending = True
        self._before_backward(last)
        (loss if self.loss_scale == 1.0 else loss * self.loss_scale).backward()

    def _before_backward(self, last: bool) -> None:
        """Make the wrapped engine ready."""

    def _gradient(self, share: Share) -> Tensor:
        """This rank's part of a reduced gradient, like `share.local`."""
        raise NotImplementedError

    def _counted(self, gradient: Tensor) -> Tensor:
        """The elements of it that this rank alone counts in the norm."""
        raise NotImplementedError

    def step(
        self, lr: float | None = None, weight: Tensor | float = 1.0, sums: Sequence[Tensor | float] = (), update: bool = True
    ) -> StepReport:
        """Clip and update, as `ZeroEngine.step`."""
        if not self._pending:
            raise RuntimeError("step() without a backward() since the last one: there is no gradient to step along.")
        self._pending = False
        counted, groups = [], {"tp": self.mesh.tp}
        for share, segment in zip(self._shares, self._segments, strict=True):
            segment.grad = self._gradient(share)
            for axis in share.geometry.partial:
                self.comm.all_reduce(segment.grad, groups[axis]).wait()
            if all(groups[axis].index == 0 for axis in share.geometry.copies):
                counted.append(self._counted(segment.grad))
        squares = sum_of_squares(counted, self.mesh.device)
        carried = self.loss_scale / self.mesh.data.size
        report, divisor = agree(
            self.comm,
            self.mesh.world,
            squares,
            weight if self.mesh.speaks else 0.0,
            sums,
            carried=carried,
            clip_norm=self.clip_norm,
            update=update,
            exposed_seconds=None,
        )
        self._optimizer.step(self._lr if lr is None else lr, divisor, report.skipped)
        return report

    def pieces(self) -> Iterator[Piece]:
        """What this rank holds for a checkpoint, under the names of `ZeroEngine.pieces`."""
        for index, share in enumerate(self._shares):
            yield share.piece(f"model/{share.name}", share.local)
            for moment, tensor in self._optimizer.moments(index).items():
                yield share.piece(f"optim/{share.name}/{moment}", tensor)
            yield Piece.whole(f"optim/{share.name}/step", self._optimizer.steps(index)[0])
        for share in self._frozen:
            yield share.piece(f"model/{share.name}", share.local)
        for name, buffer in self.module.named_buffers():
            yield Piece.whole(f"model/{name}", buffer)

    def restored(self) -> None:
        """Take up what was written into the tensors of `pieces`."""
        self._optimizer.restored()

    def put_away(self) -> None:
        """`pieces` takes no memory."""

    def held_bytes(self) -> dict[str, int]:
        """Bytes of tensors held by kind, each memory counted once. Buffers that torch keeps to itself are not among them."""
        gradients = [self._gradient(share) for share in self._shares if share.param.grad is not None]
        moments = [tensor for index in range(len(self._shares)) for tensor in self._optimizer.moments(index).values()]
        parameters = [share.local for share in [*self._shares, *self._frozen]]
        return {"parameters": _bytes(parameters), "masters": 0, "gradients": _bytes(gradients), "moments": _bytes(moments)}

    def predicted_bytes(self) -> None:
        """Torch decides about memory here."""
        return None


def require_ranks(mesh: ParallelMesh, engine: str) -> None:
    """Raises ValueError on one data rank: torch's engines need a process group."""
    if mesh.data.size == 1:
        raise ValueError(f"shard.engine={engine}: works over two data ranks or more; start more, or set shard.engine=native.")


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())
