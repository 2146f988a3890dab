"""Layer 6: parameters, gradients and optimizer state in flat buckets over data ranks."""

from __future__ import annotations

from typing import Any

from torch import nn

from dist_train.mesh.mesh import ParallelMesh
from dist_train.zero.engine import ZeroEngine
from dist_train.zero.policy import DTYPES, Precision, ShardPolicy
from dist_train.zero.protocol import Optimizer

__all__ = ["DTYPES", "Precision", "ShardPolicy", "ZeroEngine", "shard"]


def shard(module: nn.Module, optimizer: Optimizer, mesh: ParallelMesh, stage: int = 0, **options: Any) -> ZeroEngine:
    """Train any module over a mesh's data ranks: `engine.backward(loss)` for each micro-batch, then `engine.step()`.

    The engine takes over the memory of the module's parameters; keep using `engine.module`. `options` are those of
    `ZeroEngine` (clip_norm, bucket_bytes, precision, …).
    """
    return ZeroEngine(module, optimizer, mesh, policy=ShardPolicy.from_stage(stage), **options)
