"""The model on a tensor group against the model on one process."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_train.comm.collectives import Collectives
from dist_train.mesh.mesh import Group
from dist_train.model import generate
from dist_train.model.plan import Layer, State, tensor_plan
from dist_train.model.transformer import Cut, Transformer
from dist_train.ops.cross_entropy import cross_entropy_sum
from dist_train.ops.rms_norm import rms_norm
from dist_train.params.geometry import geometry_of
from dist_train.tensor import apply_tensor_plan, stream_shape
from tests.model.toy import toy
from tests.ranks import run_ranks
from tests.tensor.helpers import GPT, LLAMA, batch, held_to, split_model, step, tensor_group, whole_gradients, whole_model

UNTIED = {"family": "gpt", "tie_embeddings": False, "activation": "relu"}
FOUR = {"family": "llama", "kv_heads": 4, "tie_embeddings": True}


def same_step(mesh, comm, sequence: bool, model: dict[str, Any], shape: tuple[int, int], z_loss: float, ops: str, packed: bool):
    group = tensor_group(mesh)
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


def errors_in_bf16(mesh, comm, sequence: bool, ops: str) -> tuple[dict[str, float], dict[str, float]]:
    """Errors against fp64 of the tensor group, and of one process in bf16."""
    group, inputs = tensor_group(mesh), batch(3, 13)
    exact = whole_model(GPT, ops).bfloat16().double()
    single = copy.deepcopy(exact).bfloat16()
    shared = split_model(copy.deepcopy(single), group, comm, sequence)
    losses = [step(model, inputs, 1e-3)[0].double() for model in (exact, single, shared)]
    true = {name: parameter.grad for name, parameter in exact.named_parameters()}
    found = [{n: p.grad for n, p in single.named_parameters()}, whole_gradients(shared, group, comm)]
    theirs, mine = ({name: (grads[name] - true[name]).norm().item() for name in true} for grads in found)
    theirs["loss"], mine["loss"] = ((loss - losses[0]).abs().item() for loss in losses[1:])
    return mine, theirs


@pytest.mark.parametrize("sequence, ops", [(False, "fused"), (True, "fused"), (True, "reference")])
def test_bf16_is_within_twice_the_error_of_one_process(sequence: bool, ops: str) -> None:
    mine, theirs = run_ranks(2, errors_in_bf16, sequence, ops)[0]
    scale = sum(theirs.values()) / len(theirs)  # an error far below the others' is luck, which need not come twice
    assert not {name: (mine[name], theirs[name]) for name in theirs if mine[name] > 2 * max(theirs[name], scale / 4)}


def generated(mesh, comm, sequence: bool, model: dict[str, Any]) -> None:
    group = tensor_group(mesh)
    single = whole_model(model)
    shared = split_model(copy.deepcopy(single), group, comm, sequence)
    with torch.no_grad():
        for shape in ((1, 1), (2, 7)):
            tokens_BT = batch(*shape)["tokens_BT"]
            mine, true = shared(tokens_BT), single(tokens_BT)
            assert mine.shape == true.shape
            held_to("logits", mine, true)
    prompt = [5, 17, 3]
    for options in ({"temperature": 0.0}, {"seed": 4}, {"seed": 4, "cached": False}):
        assert generate(shared, prompt, 8, **options) == generate(single, prompt, 8, **options)


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("ranks, model", [(2, LLAMA), (4, GPT)])
def test_generation_is_that_of_one_process(ranks: int, model: dict[str, Any], sequence: bool) -> None:
    run_ranks(ranks, generated, sequence, model)


def logits_gradients(mesh, comm, sequence: bool) -> None:
    group, inputs = tensor_group(mesh), batch(3, 13)
    labels_BT = inputs.pop("labels_BT")
    single = whole_model(LLAMA)
    shared = split_model(copy.deepcopy(single), group, comm, sequence)
    for model in (single, shared):
        cross_entropy_sum(model(**inputs), labels_BT)[0].backward()
    found = whole_gradients(shared, group, comm)
    for name, parameter in single.named_parameters():
        held_to(name, found[name], parameter.grad)


@pytest.mark.parametrize("sequence", [False, True])
def test_a_loss_of_ones_own_on_the_logits_has_the_gradients_of_one_process(sequence: bool) -> None:
    run_ranks(2, logits_gradients, sequence)


class HeadNorm(nn.Module):
    """One weight for all heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x_BTNH: Tensor) -> Tensor:
        return rms_norm(x_BTNH, self.weight, 1e-5)


def with_head_norms() -> Transformer:
    model = whole_model(LLAMA)
    for block in model.blocks.children():
        attention = block.attention
        attention.head_norm = HeadNorm(attention.head_width)
        attention.split_heads = partial(_normed, attention, attention.split_heads)
    return model


def _normed(attention: nn.Module, split: Any, x_BTD: Tensor, shape: tuple[int, int]) -> Tensor:
    return attention.head_norm(split(x_BTD, shape))


def trained_with_head_norms(mesh, comm, sequence: bool) -> None:
    group = tensor_group(mesh)
    single, shared = with_head_norms(), with_head_norms()
    plan = []
    for row in tensor_plan(shared, sequence):
        plan.append(row)
        if row.style == "column" and "attention" in row.name:
            plan.append(Layer("blocks.*.attention.head_norm", "local", State.FEATURES, State.FEATURES))
    apply_tensor_plan(shared, group, sequence, comm, plan)
    inputs = batch(3, 13)
    for _ in range(3):
        for model in (single, shared):
            model.zero_grad()
            step(model, inputs)
        gradients = whole_gradients(shared, group, comm)
        norms = [
            sum(g.double().square().sum() for g in grads) for grads in (gradients.values(), (p.grad for p in single.parameters()))
        ]
        held_to("norm", *norms)
        with torch.no_grad():
            for name, parameter in shared.named_parameters():
                geometry = geometry_of(name, parameter)
                parameter -= 0.02 * gradients[geometry.name][geometry.box(parameter)]
            for name, parameter in single.named_parameters():
                held_to(name, gradients[name], parameter.grad)
                parameter -= 0.02 * parameter.grad
    for name, parameter in shared.named_parameters():
        geometry = geometry_of(name, parameter)
        if group.axis in geometry.copies:
            copies = comm.all_gather_object(parameter.detach(), group)
            assert all(torch.equal(copies[0], other) for other in copies), name
        if name.endswith("head_norm.weight"):
            assert geometry.partial == (group.axis,)  # whether the stream is split or not
        elif name.endswith("mlp_norm.weight"):
            assert geometry.partial == ((group.axis,) if sequence else ())


@pytest.mark.parametrize("sequence", [False, True])
def test_F51_a_norm_shared_by_split_heads_has_a_partial_gradient(sequence: bool) -> None:
    run_ranks(2, trained_with_head_norms, sequence)


def norms(mesh, comm, sequence: bool, model: dict[str, Any]) -> tuple[float, float]:
    """The norm from what each rank holds, by geometry alone, and that of one process."""
    group, inputs = tensor_group(mesh), batch(3, 13)
    single = whole_model(model)
    shared = split_model(copy.deepcopy(single), group, comm, sequence)
    step(single, inputs)
    step(shared, inputs)
    squares = torch.zeros(1, dtype=torch.float64)
    elements = torch.zeros(1, dtype=torch.int64)
    for name, parameter in shared.named_parameters():
        geometry, gradient = geometry_of(name, parameter), parameter.grad
        if geometry.partial:
            comm.all_reduce(gradient, group).wait()
        if group.axis not in geometry.copies or group.index == 0:
            squares += gradient.double().square().sum()
            elements += gradient.numel()
    comm.all_reduce(squares, group).wait()
    comm.all_reduce(elements, group).wait()
    assert elements.item() == sum(parameter.numel() for parameter in single.parameters())
    return squares.sqrt().item(), sum(p.grad.double().square().sum() for p in single.parameters()).sqrt().item()


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("ranks, model", [(2, LLAMA), (4, GPT)])
def test_F02_every_element_counts_once_in_the_norm(ranks: int, model: dict[str, Any], sequence: bool) -> None:
    for mine, true in run_ranks(ranks, norms, sequence, model):
        assert mine == pytest.approx(true, rel=1e-5)


def parts(mesh, comm, sequence: bool) -> None:
    group, inputs = tensor_group(mesh), batch(3, 13)
    config = toy(**GPT).model
    whole = split_model(whole_model(GPT), group, comm, sequence)
    cuts = [Cut(0, 1), Cut(1, 2)]
    both = Transformer(config, cuts=cuts)
    both.load_state_dict(whole_model(GPT).state_dict())
    apply_tensor_plan(both, group, sequence, comm)
    assert both.head.weight is both.embed.weight
    x = both(inputs["tokens_BT"], cut=0)
    assert x.shape == stream_shape(3, 13, config.hidden, group, sequence)
    assert torch.equal(both(**inputs, cut=1, x_BTD=x)[0], whole(**inputs)[0])

    with torch.device("meta"):
        stages = [Transformer(config, cuts=[cut]) for cut in cuts]
    held: dict[str, Any] = {}
    for stage in stages:
        apply_tensor_plan(stage, group, sequence, comm)
        for name, parameter in stage.named_parameters():
            assert parameter.is_meta and isinstance(parameter, nn.Parameter)
            held[name] = parameter
    assert held["head.weight"].geometry.name == "embed.weight"  # the embedding's, on another stage
    for name, parameter in whole.named_parameters():
        assert held[name].shape == parameter.shape and held[name].geometry == parameter.geometry


@pytest.mark.parametrize("sequence", [False, True])
def test_parts_of_a_model_on_meta_and_with_values(sequence: bool) -> None:
    run_ranks(2, parts, sequence)


def test_one_rank_is_left_as_it_is() -> None:
    model = whole_model(LLAMA)
    before = {name: type(module) for name, module in model.named_modules()}
    apply_tensor_plan(model, Group("tp", (0,), 0), True, Collectives())
    assert before == {name: type(module) for name, module in model.named_modules()}
    assert not any(hasattr(parameter, "geometry") for parameter in model.parameters())
