"""The model on a tensor group against the model on one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.tensor.helpers import GPT, LLAMA, batch, held_to, split_model, step, tensor_group, whole_gradients, whole_model

UNTIED = {"family": "gpt", "tie_embeddings": False, "activation": "relu"}
FOUR = {"family": "llama", "kv_heads": 4, "tie_embeddings": True}


def same_step(mesh, comm, sequence: bool, model: dict[str, Any], shape: tuple[int, int], z_loss: float, ops: str, packed: bool):
    group = tensor_group(mesh.world.size)
    single = whole_model(model, ops)
    shared = split_model(copy.deepcopy(single), group, comm, sequence)
    inputs = batch(*shape, packed=packed)
    true, mine = step(single, inputs, z_loss), step(shared, inputs, z_loss)
    for name, a, b in zip(("objective", "entropy"), mine, true, strict=True):
        held_to(name, a, b)
        assert len({value.item() for value in comm.all_gather_object(a, group)}) == 1
    found = whole_gradients(shared, group, comm)
    assert found.keys() == dict(single.named_parameters()).keys()
    for name, parameter in single.named_parameters():
        held_to(name, found[name], parameter.grad)
    return None


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    "ranks, model, shape, z_loss, ops, packed",
    [
        (2, LLAMA, (3, 12), 0.0, "fused", False),
        (2, LLAMA, (3, 13), 1e-2, "reference", True),
        (2, GPT, (3, 13), 1e-2, "fused", True),
        (2, UNTIED, (1, 12), 0.0, "reference", False),
        (4, FOUR, (3, 13), 1e-2, "fused", True),
        (4, GPT, (2, 12), 0.0, "fused", False),
        (4, UNTIED, (3, 13), 0.0, "fused", False),
        (2, LLAMA, (30, 23), 1e-2, "fused", False),  # several chunks of the head
    ],
)
def test_F40_losses_and_gradients_are_those_of_one_process(ranks, model, shape, z_loss, ops, packed, sequence) -> None:
    run_ranks(ranks, same_step, sequence, model, shape, z_loss, ops, packed)
