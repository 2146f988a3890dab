"""Recompute changes memory and time, and no bit of a gradient."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dist_train.remat.policy as policy_module
from dist_train.config.compose import ConfigError
from dist_train.model import build_model
from dist_train.ops.cross_entropy import cross_entropy_sum
from dist_train.remat import apply_remat
from tests.model.toy import token_rows, toy

DOCUMENTS = torch.tensor([[0] * 5 + [1] + [2] * 6] * 3)


def step(model: torch.nn.Module, micro_batches: int = 1) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss and gradients of one step; several micro-batches go forward before any goes backward, as in a pipeline."""
    model.zero_grad()
    torch.manual_seed(11)
    losses = [cross_entropy_sum(model(token_rows(), None, DOCUMENTS), token_rows().roll(-1))[0] for _ in range(micro_batches)]
    for loss in losses:
        loss.backward()
    return torch.stack(losses).detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("policy", ["selective", "full"])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("family, backend", [("llama", "sdpa"), ("llama", "math"), ("gpt", "sdpa"), ("gpt", "math")])
def test_F41_gradients_are_bit_equal_with_dropout(family, backend, micro_batches, policy):
    model = build_model(toy(family, backend, dropout=0.3))
    losses, gradients = step(model, micro_batches)
    assert losses.unique().numel() == micro_batches  # each micro-batch drew its own masks
    after = torch.get_rng_state()
    apply_remat(model, policy)
    recomputed_losses, recomputed = step(model, micro_batches)
    assert torch.equal(losses, recomputed_losses)
    assert all(torch.equal(a, b) for a, b in zip(gradients, recomputed))
    assert torch.equal(torch.get_rng_state(), after)  # the next step draws what it would have drawn


class _Count(TorchDispatchMode):
    """Calls of each aten operation, in forward and backward together."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        return function(*args, **(kwargs or {}))


def count(model: torch.nn.Module) -> dict[str, int]:
    with _Count() as counter:
        step(model)
    return counter.calls


def test_what_each_policy_computes_again():
    calls = {}
    for policy in ("none", "selective", "full"):
        model = build_model(toy())
        apply_remat(model, policy)
        calls[policy] = count(model)
    attention = "flash_attention"
    assert [calls[policy][attention] for policy in calls] == [2, 2, 4]
    # 7 products a block forward and 14 backward, 1 and 2 for the head; full runs a block again up to what backward needs last.
    assert [calls[policy]["mm"] for policy in calls] == [45, 45, 45 + 2 * 6]
    assert [calls[policy]["swiglu"] for policy in calls] == [2, 4, 4]


def saved_bytes(policy: str) -> int:
    """Bytes alive between forward and backward that autograd alone holds on to, parameters left out."""
    model = build_model(toy(layers=3, hidden=64, ffn=256))
    apply_remat(model, policy)
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages: dict[int, int] = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple) else (out,):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in own:
                    references.append(torch.multiprocessing.reductions.StorageWeakRef(tensor.untyped_storage()))
                    storages[references[-1].cdata] = tensor.untyped_storage().nbytes()
            return out

    references: list = []
    with Watch():
        loss = model(token_rows(), None, DOCUMENTS).sum()
    alive = {reference.cdata: storages[reference.cdata] for reference in references if not reference.expired()}
    loss.backward()
    return sum(alive.values())


def test_each_policy_keeps_less_than_the_one_before():
    none, selective, full = (saved_bytes(policy) for policy in ("none", "selective", "full"))
    assert full < selective < none
    assert full < none / 3


def test_names_stay_and_the_policy_can_be_changed_and_taken_off():
    model = build_model(toy())
    names, expected = list(model.state_dict()), step(model)[1]
    for policy in ("full", "selective", "selective", "none"):
        apply_remat(model, policy)
        assert list(model.state_dict()) == names
        assert all(torch.equal(a, b) for a, b in zip(expected, step(model)[1]))
    assert "forward" not in model.blocks[0].__dict__
    apply_remat(model, "full")
    assert count(model)["swiglu"] == 4


def test_hooks_of_a_block_run_once_a_forward():
    model, seen = build_model(toy()), []
    model.blocks[0].register_forward_hook(lambda *_: seen.append("forward"))
    apply_remat(model, "full")
    step(model)
    assert seen == ["forward"]


def test_a_copy_recomputes_with_its_own_weights():
    model = build_model(toy())
    apply_remat(model, "full")
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(gradient.abs().max() > 0 for gradient in step(copied)[1])


def test_evaluation_pays_nothing_for_recompute(monkeypatch):
    model = build_model(toy())
    expected = model(token_rows())
    apply_remat(model, "selective")
    monkeypatch.setattr(policy_module, "checkpoint", None)
    with torch.no_grad():
        assert torch.equal(model(token_rows()), expected)


def test_frozen_blocks_train_what_is_left():
    gradients = {}
    for policy in ("none", "selective", "full"):
        model = build_model(toy(dropout=0.3, tie_embeddings=False))
        model.requires_grad_(False)
        model.blocks[1].attention.q.weight.requires_grad_()
        apply_remat(model, policy)
        torch.manual_seed(11)
        model(token_rows()).square().sum().backward()
        gradients[policy] = model.blocks[1].attention.q.weight.grad
        assert [n for n, p in model.named_parameters() if p.grad is not None] == ["blocks.1.attention.q.weight"]
    assert torch.equal(gradients["none"], gradients["full"]) and torch.equal(gradients["none"], gradients["selective"])


def test_an_unknown_policy_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="remat=half: no such policy. Choose one of: none, selective, full"):
        apply_remat(build_model(toy()), "half")


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_recomputes_selectively():
    model = build_model(toy("llama", "math", layers=1))
    apply_remat(model, "selective")
    loss, gradients = step(model)
    compiled_loss, compiled = step(torch.compile(model, backend="aot_eager"))
    torch.testing.assert_close(loss, compiled_loss)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(gradients, compiled))
