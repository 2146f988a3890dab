"""torch.nn.parallel.DistributedDataParallel as an `Engine` (arXiv:2006.15704): everything on every rank, gradients averaged."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dist_train.comm.collectives import Collectives
from dist_train.mesh.mesh import ParallelMesh
from dist_train.params.geometry import geometry_of
from dist_train.zero.engines.peer import PeerEngine, Share, require_ranks
from dist_train.zero.policy import Precision
from dist_train.zero.protocol import Optimizer


class DdpEngine(PeerEngine):
    """Parameters, gradients and moments stay in fp32; a lower compute dtype is torch's autocast around the module's forward.

    Raises ValueError on one data rank, RuntimeError in a step for which a parameter got no gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        mesh: ParallelMesh,
        comm: Collectives | None = None,
        *,
        precision: Precision | None = None,
        clip_norm: float = 0.0,
        bucket_bytes: float = 25e6,
    ) -> None:
        require_ranks(mesh, "ddp")
        compute = (precision or Precision()).compute
        if compute not in (None, torch.float32):
            module.forward = partial(_autocast, module.forward, mesh.device.type, compute)  # type: ignore[method-assign]
        self._ddp = DistributedDataParallel(
            module,
            process_group=mesh.data.process_group,
            bucket_cap_mb=bucket_bytes / 2**20,  # type: ignore[arg-type]  # (its MB are MiB, and it takes fractions of them)
            gradient_as_bucket_view=True,
        )
        named = [(geometry_of(name, param), param) for name, param in module.named_parameters()]
        shares = [Share(geometry.name, param, param.data, (0,) * param.ndim, geometry) for geometry, param in named]
        super().__init__(module, shares, optimizer, mesh, comm or Collectives(), clip_norm)

    def _before_backward(self, last: bool) -> None:
        # DDP decides in its forward whether the backward that follows will reduce, when a loop cannot have said yet which
        # micro-batch is the last. So forwards run on the bare module, which is all that `no_sync` makes of them, and before
        # the last backward comes what DDP's own forward would have done.
        if last:
            reducer = self._ddp.reducer
            reducer.prepare_for_forward()
            reducer._rebuild_buckets()
            reducer.prepare_for_backward([])

    def _gradient(self, share: Share) -> Tensor:
        if share.param.grad is None:
            raise RuntimeError(f"{share.name} got no gradient, and DDP needs every one; shard.engine=native counts it as 0.")
        return share.param.grad

    def _counted(self, gradient: Tensor) -> Tensor:
        # All ranks hold the same bits; each adds up its part.
        return gradient.reshape(-1).tensor_split(self.mesh.data.size)[self.mesh.data.index]


def _autocast(forward: Any, device_type: str, dtype: torch.dtype, *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device_type, dtype):
        return forward(*args, **kwargs)
