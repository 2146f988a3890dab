"""Faults that are put in on purpose are found by the name of the layer; a plan that does not fit is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dist_train.comm.collectives import Collectives, Handle
from dist_train.model.plan import Layer, State, expand, tensor_plan
from dist_train.tensor import apply_tensor_plan, check_states
from tests.ranks import run_ranks
from tests.tensor.helpers import GPT, LLAMA, batch, split_model, step, tensor_group, whole_model


class Forgetful(Collectives):
    """Leaves reductions out."""

    def all_reduce(self, x: Tensor, group, op: str = "sum") -> Handle:
        return Handle()

    def reduce_scatter(self, out: Tensor, x: Tensor, group) -> Handle:
        out.copy_(x.view(group.size, *out.shape)[group.index])
        return Handle()


def message(function, *args: Any) -> str:
    try:
        function(*args)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def checked_step(mesh, comm, sequence: bool, model: dict[str, Any], forgetful: str, uneven: str) -> str:
    group = tensor_group(mesh)
    shared = split_model(whole_model(model), group, comm, sequence)
    if forgetful:
        shared.get_submodule(forgetful).comm = Forgetful()
    if uneven:
        with torch.no_grad():
            shared.get_parameter(uneven).add_(0.5 * group.index)

    def run() -> None:
        with check_states(shared, group, comm):
            step(shared, batch(2, 13))

    found = message(run)
    assert len(set(comm.all_gather_object(found, group))) == 1, "one rank raises, and the others hang"
    assert not any(module._forward_hooks for module in shared.modules())
    return found


@pytest.mark.parametrize("model", [LLAMA, GPT])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_sound_model_passes(sequence: bool, model: dict[str, Any]) -> None:
    assert run_ranks(2, checked_step, sequence, model, "", "") == ["", ""]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("layer", ["blocks.1.mlp.down", "blocks.0.attention.out", "embed"])
def test_a_missing_reduction_is_found_by_the_layers_name(layer: str, sequence: bool) -> None:
    found = run_ranks(2, checked_step, sequence, LLAMA, layer, "")[0]
    assert f"the output of {layer} is declared" in found and "reduction" in found


def test_a_missing_reduction_in_backward_is_found() -> None:
    found = run_ranks(2, checked_step, False, LLAMA, "blocks.1.mlp.project", "")[0]
    assert "the gradient of the output of blocks.1.mlp_norm is declared replicated" in found


def test_other_weights_on_a_rank_are_found() -> None:
    found = run_ranks(2, checked_step, False, LLAMA, "", "blocks.1.attention_norm.weight")[0]
    assert "the output of blocks.1.attention_norm is declared replicated" in found


def model_of(**model: Any):
    return whole_model({"family": "llama"} | model)


def changed(layer: str, **values: Any) -> list[Layer]:
    plan = tensor_plan(model_of(), sequence=False)
    assert any(row.name == layer for row in plan)
    return [replace(row, **values) if row.name == layer else row for row in plan]


@pytest.mark.parametrize(
    "plan, words",
    [
        (changed("blocks.*.mlp.down", gives=State.TOKENS), ("mlp.down gives what is split along tokens", "1.attention_norm")),
        (changed("blocks.*.mlp_norm", takes=State.FEATURES, gives=State.FEATURES), ("dropout gives what is replicated",)),
        (changed("blocks.*.mlp.down", gives=State.PARTIAL), ("blocks.0.mlp.down cannot make", "a partial sum", "row can make")),
        (changed("head", takes=State.TOKENS), ("norm gives what is replicated, but head takes what is split along tokens",)),
        (changed("norm", name="nrom"), ("nrom (local) matches nothing",)),
        (changed("blocks.*.mlp.down", name="blocks.*.mlp.dwn"), ("mlp.dwn (row) matches nothing", "no blocks.0.mlp.dwn")),
        (changed("blocks.*.mlp.project", cuts=(("gate", "ffn"), ("upp", "ffn"))), ("no blocks.0.mlp.upp",)),
        (changed("norm", style="lokal"), ("norm has style 'lokal'", "choose one of", "local")),
        (list(tensor_plan(model_of(), False))[1:], ("how ranks share embed.weight",)),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_fit_is_refused(plan: list[Layer], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        expand(plan, model_of())
    assert all(word in str(caught.value) for word in words), str(caught.value)


def refused(mesh, comm, model: dict[str, Any]) -> str:
    built = whole_model({"family": "llama"} | model)
    before = {name: parameter.shape for name, parameter in built.named_parameters()}
    found = message(apply_tensor_plan, built, tensor_group(mesh), True, comm)
    assert before == {name: parameter.shape for name, parameter in built.named_parameters()}
    return found


@pytest.mark.parametrize(
    "ranks, model, words",
    [
        (4, {"kv_heads": 2}, r"model.kv_heads=2: blocks.0.attention.k .* mesh.tp=4"),
        (3, {"kv_heads": 4}, r"model.heads=4: .* mesh.tp=3"),
        (2, {"heads": 6, "hidden": 24, "kv_heads": 3}, r"model.kv_heads=3: .* mesh.tp=2 .* divisor of 3"),
        (2, {"ffn": 33}, r"model.ffn=33: blocks.0.mlp.gate .* mesh.tp=2"),
        (4, {"vocab": 9, "kv_heads": 4}, r"model.vocab=9: .* 4 parts of 3 .* above 9"),
    ],
)
def test_F39_what_does_not_divide_is_refused_with_the_numbers(ranks: int, model: dict[str, Any], words: str) -> None:
    found = run_ranks(ranks, refused, model)
    assert len(set(found)) == 1 and re.search(words, found[0]), found[0]


def out_of_bounds(mesh, comm, key: str) -> str:
    shared = split_model(whole_model(LLAMA), tensor_group(mesh), comm, True)
    inputs = batch(2, 13)
    inputs[key][1, 2] = 53
    return message(lambda: step(shared, inputs))


@pytest.mark.parametrize("key, word", [("tokens_BT", "a token is out of bounds"), ("labels_BT", "a label is out of bounds")])
def test_tokens_that_no_rank_has_are_an_error(key: str, word: str) -> None:
    assert all(f"{word} for a vocabulary of 53" in found for found in run_ranks(2, out_of_bounds, key))
