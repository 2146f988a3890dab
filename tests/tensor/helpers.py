"""One process and a tensor group on the same model and batch, and what must agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dist_train.comm.collectives import Collectives
from dist_train.config.schema import Config
from dist_train.mesh.mesh import Group, ParallelMesh
from dist_train.mesh.shape import MeshShape
from dist_train.model import build_model
from dist_train.model.transformer import Transformer
from dist_train.params.geometry import geometry_of
from dist_train.tensor import apply_tensor_plan
from tests.model.toy import shake, toy
from tests.ranks import mesh_of

LLAMA = {"family": "llama"}
GPT = {"family": "gpt"}  # biases and a tied head
UPSTREAM = 0.125


def whole_model(
    model: dict[str, Any], ops: str = "fused", dtype: torch.dtype = torch.float32, backend: str = "auto"
) -> Transformer:
    config = toy(attention=backend, **model)
    built = build_model(Config(config.model, train=config.train, attention=backend, ops=ops))
    shake(built)
    return built.to(dtype)


def tensor_group(pool: ParallelMesh) -> Group:
    return mesh_of(MeshShape(tp=pool.world.size), pool).tp


def batch(rows: int, tokens: int, vocab: int = 53, packed: bool = False) -> dict[str, Tensor]:
    """Rows whose live tokens differ in number; `packed`: with two documents each."""
    generator = torch.Generator().manual_seed(3)
    tokens_BT = torch.randint(0, vocab, (rows, tokens), generator=generator)
    labels_BT = torch.randint(0, vocab, (rows, tokens), generator=generator)
    for row in range(rows):
        labels_BT[row, tokens - 3 * row :] = -100 if row else labels_BT[row, tokens:]
    found = {"tokens_BT": tokens_BT, "labels_BT": labels_BT}
    if packed:
        first = tokens // 3
        found["positions_BT"] = torch.cat((torch.arange(first), torch.arange(tokens - first))).expand(rows, -1)
        found["documents_BT"] = (torch.arange(tokens) >= first).long().expand(rows, -1)
    return found


def step(model: Transformer, inputs: dict[str, Tensor], z_loss: float = 0.0) -> tuple[Tensor, Tensor]:
    """(objective, entropy) after a backward of `UPSTREAM · objective`."""
    objective, entropy = model(**inputs, z_loss=z_loss)
    (objective * UPSTREAM).backward()
    return objective.detach(), entropy


def whole_gradients(model: Transformer, group: Group, comm: Collectives) -> dict[str, Tensor]:
    """Gradients by logical name, with partial ones summed and split ones joined, as every rank sees them."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        geometry, gradient = geometry_of(name, parameter), parameter.grad
        assert gradient is not None and gradient.shape == parameter.shape, name
        whole = torch.zeros(geometry.shape, dtype=gradient.dtype)
        whole[geometry.box(gradient)] = gradient
        if group.axis in geometry.partial or group.axis not in geometry.copies:
            comm.all_reduce(whole, group).wait()
        found[geometry.name] = whole
    return found


def held_to(name: str, mine: Tensor, true: Tensor, tolerance: float = 1e-5) -> None:
    error = (mine - true).abs().max() / true.abs().max().clamp(min=1e-2)  # of a key bias all is rounding: its gradient is 0
    assert error <= tolerance, f"{name}: {error:.2e} off"


def split_model(whole: Transformer, group: Group, comm: Collectives, sequence: bool) -> Transformer:
    apply_tensor_plan(whole, group, sequence, comm)
    return whole
