"""Packed rows for the tests of context parallelism."""

from __future__ import annotations

import torch
from torch import Tensor

from dist_train.data.batch import MicroBatch
from dist_train.mesh.mesh import ParallelMesh
from dist_train.mesh.shape import MeshShape
from tests.ranks import mesh_of


def numbers_of(*rows: list[int]) -> Tensor:
    """documents_BT from the lengths of each row's documents."""
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]).int()


def packed_rows(numbers_BT: Tensor, seed: int = 1, vocab: int = 53) -> MicroBatch:
    """Random tokens in these documents; the last of each predicts nothing."""
    generator = torch.Generator().manual_seed(seed)
    shape = numbers_BT.shape
    tokens, labels = (torch.randint(0, vocab, shape, generator=generator) for _ in range(2))
    ends = torch.ones(shape, dtype=torch.bool)
    ends[:, :-1] = numbers_BT[:, 1:] != numbers_BT[:, :-1]
    begins = torch.ones(shape, dtype=torch.bool)
    begins[:, 1:] = ends[:, :-1]
    at = torch.arange(shape[1])
    positions = at - torch.where(begins, at, 0).cummax(1).values
    return MicroBatch(tokens, labels.masked_fill(ends, -100), positions, numbers_BT, tuple(range(shape[0])))


def context_mesh(pool: ParallelMesh, tp: int = 1) -> ParallelMesh:
    return mesh_of(MeshShape(cp=pool.world.size // tp, tp=tp), pool)


def close(ours: Tensor, own: Tensor, exact: Tensor, tiny: float = 1e-7, scale: float = 0.0) -> None:
    """`ours` errs at most twice as much as `own`, one process in the same dtype, and is within 1e-5 of it where that is fp32.

    `tiny` is relative and forgives luck. `scale`: what values are measured by, where their own are smaller.
    """
    assert ours.shape == own.shape == exact.shape and torch.isfinite(ours).all()
    errors = [(x.double() - exact).norm().item() for x in (ours, own)]
    assert errors[0] <= 2 * errors[1] + tiny * max(exact.norm().item(), scale), errors
    if own.dtype == torch.float32:
        assert (ours - own).abs().max().item() <= 1e-5 * max(exact.abs().max().item(), scale)
