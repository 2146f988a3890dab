"""The summed loss against fp64, with and without live tokens, and its gradient under any upstream."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import dist_train.ops.cross_entropy as module
from dist_train.ops.cross_entropy import cross_entropy_sum


def draw(rows: int = 4, tokens: int = 10, vocab: int = 53, scale: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, tokens, vocab, generator=generator) * scale
    labels = torch.randint(0, vocab, (rows, tokens), generator=generator)
    labels[0, 0] = -100  # the first token is not counted
    labels[2] = -100
    labels[3, -1] = vocab - 1
    return logits, labels


def exact_sum(logits: torch.Tensor, labels: torch.Tensor, z_loss: float) -> tuple[torch.Tensor, torch.Tensor]:
    objective, entropy = logits.new_zeros(()), logits.new_zeros(())
    for row, label in zip(logits.flatten(0, 1), labels.flatten().tolist()):
        if label >= 0:
            lse = torch.log(torch.exp(row).sum())
            entropy = entropy + lse - row[label]
            objective = objective + lse - row[label] + z_loss * lse**2
    return objective, entropy


@pytest.mark.parametrize("slice_elements", [1, 53 * 3, 1 << 20])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_values_and_gradients_equal_fp64(z_loss, slice_elements, monkeypatch):
    monkeypatch.setattr(module, "_CPU_SLICE_ELEMENTS", slice_elements)
    logits, labels = draw()
    logits.requires_grad_()
    objective, entropy = cross_entropy_sum(logits, labels, z_loss)
    assert objective.shape == entropy.shape == () and objective.dtype == entropy.dtype == torch.float32
    assert objective.requires_grad and not entropy.requires_grad
    wide = logits.detach().double().requires_grad_()
    exact_objective, exact_entropy = exact_sum(wide, labels, z_loss)
    torch.testing.assert_close(objective.double(), exact_objective, rtol=1e-6, atol=0)
    torch.testing.assert_close(entropy.double(), exact_entropy.detach(), rtol=1e-6, atol=0)
    (objective * -2.5).backward()
    (exact_objective * -2.5).backward()
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=1e-5, atol=1e-6)
    assert torch.all(logits.grad[2] == 0) and torch.all(logits.grad[0, 0] == 0)


@pytest.mark.parametrize("z_loss", [0.0, 0.3])
def test_F46_gradcheck_with_an_ignored_first_token_and_strided_logits(z_loss):
    logits, labels = draw(4, 10, 15)
    strided = logits.double().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    assert not strided.is_contiguous()
    assert torch.autograd.gradcheck(lambda x: cross_entropy_sum(x, labels, z_loss)[0] * 1.7, strided)


def test_F46_the_weights_of_several_sums_stay_apart():
    logits, labels = draw()
    weights = torch.tensor([0.0, 2.0, -1.0, 0.5])
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    labels[2] = 7
    sum(w * cross_entropy_sum(ours[i], labels[i])[0] for i, w in enumerate(weights)).backward()
    sum(w * F.cross_entropy(theirs[i], labels[i], reduction="sum") for i, w in enumerate(weights)).backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_F12_no_live_token_gives_zero_and_zero_gradient(z_loss):
    logits, labels = draw()
    for case_logits, case_labels in ((logits, torch.full_like(labels, -100)), (logits[:0], labels[:0])):
        case_logits = case_logits.clone().requires_grad_()
        objective, entropy = cross_entropy_sum(case_logits, case_labels, z_loss)
        objective.backward()
        assert objective.item() == 0.0 and entropy.item() == 0.0
        assert case_logits.grad.shape == case_logits.shape and torch.all(case_logits.grad == 0)


def test_F12_a_batch_is_the_sum_of_its_parts():
    logits, labels = draw()
    whole = cross_entropy_sum(logits, labels)[0]
    parts = sum(cross_entropy_sum(logits[i : i + 1], labels[i : i + 1])[0] for i in range(4))
    torch.testing.assert_close(whole, parts, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_summed_in_fp32(dtype):
    logits, labels = draw(tokens=500)
    logits = logits.to(dtype).requires_grad_()
    objective, _ = cross_entropy_sum(logits, labels)
    exact = F.cross_entropy(logits.detach().double().flatten(0, 1), labels.flatten(), reduction="sum")
    assert objective.dtype == torch.float32
    torch.testing.assert_close(objective.double(), exact, rtol=1e-6, atol=0)
    objective.backward()
    wide = logits.detach().double().requires_grad_()
    F.cross_entropy(wide.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    assert logits.grad.dtype == dtype
    assert torch.all((logits.grad - wide.grad).abs() <= wide.grad.abs() * torch.finfo(dtype).eps + 1e-6)


def test_large_logits_neither_overflow_nor_lose_the_answer():
    logits = torch.tensor([[[1e4, 0.0, -1e4], [3e38, -3e38, 0.0]]], requires_grad=True)
    objective, _ = cross_entropy_sum(logits, torch.tensor([[1, 0]]))
    objective.backward()
    assert objective.item() == 1e4
    assert torch.equal(logits.grad, torch.tensor([[[1.0, -1.0, 0.0], [0.0, 0.0, 0.0]]]))


def test_a_label_outside_the_vocabulary_is_an_error():
    logits, labels = draw()
    for bad in (53, -1):
        labels[1, 1] = bad
        with pytest.raises(RuntimeError, match="out of bounds"):
            cross_entropy_sum(logits, labels)
