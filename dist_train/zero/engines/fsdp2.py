"""torch.distributed.fsdp.fully_shard (FSDP2) as an `Engine`: each rank holds rows of every parameter.

    param    the DTensor that stays; between a gather and a release the module holds the whole parameter in its place
    local    this rank's rows of it, in fp32: what the optimizer updates. torch.chunk's rule: the first ranks have ceil(rows ÷ N)
             each, the next what is left, the last ones perhaps none

A unit is a block; the root unit holds the rest, and is not released between forward and backward. Gradients are
reduce-scattered after every micro-batch and added up in fp32, as at our stage 3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from dist_train.comm.collectives import Collectives
from dist_train.mesh.mesh import ParallelMesh
from dist_train.params.geometry import ParamGeometry, geometry_of
from dist_train.zero.engines.peer import PeerEngine, Share, require_ranks
from dist_train.zero.policy import Precision
from dist_train.zero.protocol import Optimizer


class Fsdp2Engine(PeerEngine):
    """Shards a module with `blocks`. A lower compute dtype is FSDP2's own mixed precision over fp32 parameters.

    Raises ValueError on one data rank, and for parameters without dimensions, of which FSDP2 knows no shards.
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
    ) -> None:
        require_ranks(mesh, "fsdp2")
        comm, precision = comm or Collectives(), precision or Precision()
        for name, param in module.named_parameters():
            if param.ndim == 0:
                raise ValueError(f"{name}: FSDP2 cannot shard a parameter without dimensions; set shard.engine=native.")
        geometries = {name: geometry_of(name, param) for name, param in module.named_parameters()}  # DTensors forget them
        for tensor in [*module.parameters(), *module.buffers()]:  # rank 0's values win, as everywhere
            comm.broadcast(tensor.data, mesh.data).wait()
        assert mesh.data.process_group is not None
        device_mesh = DeviceMesh.from_group(mesh.data.process_group, mesh.device.type)
        # Inputs are left alone: rotation tables are fp32 on purpose, and activations take the dtype of the parameters.
        policy = MixedPrecisionPolicy(precision.compute, precision.reduce, cast_forward_inputs=False)
        for block in module.get_submodule("blocks").children():
            fully_shard(block, mesh=device_mesh, mp_policy=policy)
        self._root = fully_shard(module, mesh=device_mesh, mp_policy=policy)
        shares = [_share(geometries[name], param, mesh) for name, param in module.named_parameters()]
        super().__init__(module, shares, optimizer, mesh, comm, clip_norm)

    def _gradient(self, share: Share) -> Tensor:
        return torch.zeros_like(share.local) if share.param.grad is None else _local(share.param.grad)

    def _counted(self, gradient: Tensor) -> Tensor:
        return gradient.reshape(-1)

    def restored(self) -> None:
        """Forget what was gathered from the values before."""
        super().restored()
        self._root.reshard()

    def held_bytes(self) -> dict[str, int]:
        held = super().held_bytes()
        gathered = [param for param in self.module.parameters() if not isinstance(param, DTensor)]
        held["parameters"] += sum(param.untyped_storage().nbytes() for param in gathered)
        return held


def _share(geometry: ParamGeometry, param: nn.Parameter, mesh: ParallelMesh) -> Share:
    rows, *rest = param.shape
    first = min(rows, -(-rows // mesh.data.size) * mesh.data.index)
    return Share(geometry.name, param, _local(param), (first, *(0 for _ in rest)), geometry)


def _local(tensor: Tensor) -> Tensor:
    """This rank's rows, the very memory that FSDP2 uses."""
    assert isinstance(tensor, DTensor)
    with torch.no_grad():
        return tensor.to_local().detach()
