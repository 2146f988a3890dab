from __future__ import annotations

import contextlib
import math

import pytest
import torch
from torch import nn

import dist_train as dt
from dist_train.mesh.mesh import ParallelMesh
from dist_train.ops.cross_entropy import cross_entropy_sum
from dist_train.optim.muon import orthogonalize
from dist_train.zero import Precision
from tests.toy import toy_batch, toy_model

LR, DECAY, MOMENTUM = 0.02, 0.1, 0.95


def polynomial(singular):
    for _ in range(5):
        singular = 3.4445 * singular - 4.775 * singular**3 + 2.0315 * singular**5
    return singular


def by_svd(matrix):
    """What five rounds of Newton-Schulz are in exact arithmetic: the polynomial of the singular values, vectors as they were."""
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u * polynomial(s / s.square().sum().sqrt().clamp(min=1e-7)) @ vt


@pytest.mark.parametrize("shape", [(16, 16), (40, 8), (8, 40), (2, 3)])
def test_newton_schulz_brings_singular_values_near_one_and_keeps_the_vectors(shape):
    generator = torch.Generator().manual_seed(0)
    u, _, vt = torch.linalg.svd(torch.randn(shape, generator=generator), full_matrices=False)
    matrix = u * torch.logspace(-1.2, 0, min(shape)) @ vt * 1e3
    inner = u.T @ orthogonalize(matrix) @ vt.T
    assert 0.65 < inner.diagonal().min() and inner.diagonal().max() < 1.25
    torch.testing.assert_close(inner, inner.diagonal().diag(), rtol=0, atol=1e-4)
    torch.testing.assert_close(orthogonalize(matrix), by_svd(matrix).float(), rtol=0, atol=1e-4)


def test_newton_schulz_of_zeros_is_zeros():
    assert not orthogonalize(torch.zeros(3, 5)).any()


def test_hidden_matrices_alone_are_orthogonalised():
    groups = {name: dt.Muon().group(name, param) for name, param in toy_model("model.bias=true").named_parameters()}
    matrices = {"q", "k", "v", "out", "gate", "up", "down"}
    for name, group in groups.items():
        kind = name.split(".")[-2]
        expected = "decay" if kind in ("embed", "head") else "matrix" if kind in matrices and "weight" in name else "no_decay"
        assert group == expected, name
    gpt = toy_model("model.family=gpt", "model.activation=gelu", "model.kv_heads=4")
    assert {dt.Muon().group(name, p) for name, p in gpt.named_parameters() if "positions" in name or "embed" in name} == {"decay"}
    shapes = {(4, 1, 3, 3): "matrix", (4, 1): "decay", (1, 7): "decay", (0, 5): "decay", (): "no_decay", (3,): "no_decay"}
    assert {shape: dt.Muon().group("x.weight", torch.zeros(shape)) for shape in shapes} == shapes
    assert dt.Muon(adamw=("*gate*",)).group("mlp.gate.weight", torch.zeros(3, 3)) == "decay"


def _plain(model, skipped, steps, clip):
    """Muon and AdamW as the papers write them, over whole tensors."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name and "head" not in name]
    rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
    decayed = [{"params": [p for p in rest if p.ndim == 2]}, {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(decayed, LR, (0.9, 0.95), weight_decay=DECAY)
    momenta = [torch.zeros_like(p, dtype=torch.float64) for p in matrices]
    for step in range(steps):
        if step in skipped:
            continue
        tokens, labels = toy_batch([11, 3, 7], seed=step)
        model.zero_grad()
        (cross_entropy_sum(model(tokens), labels)[0] / 21).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        adamw.step()
        for param, momentum in zip(matrices, momenta, strict=True):
            momentum.mul_(MOMENTUM).add_(param.grad)
            update = by_svd(param.grad + MOMENTUM * momentum) * 0.2 * math.sqrt(max(param.shape))
            param.data = (param.data * (1 - LR * DECAY) - LR * update).float()


def test_muon_is_the_papers_step_with_clipping_and_skipped_steps():
    ours, theirs, skipped = toy_model("model.bias=true"), toy_model("model.bias=true"), {3}
    engine = dt.shard(ours, dt.Muon(LR, MOMENTUM, weight_decay=DECAY), ParallelMesh.single(), clip_norm=0.3)
    for step in range(7):
        tokens, labels = toy_batch([11, 3, 7], seed=step)
        loss = cross_entropy_sum(ours(tokens), labels)[0]
        before = {piece.name: piece.tensor.clone() for piece in engine.pieces()}
        engine.backward(loss * math.inf if step in skipped else loss)
        report = engine.step(weight=21.0)
        assert bool(report.skipped) == (step in skipped)
        if step in skipped:
            assert all(torch.equal(piece.tensor, before[piece.name]) for piece in engine.pieces())
        else:
            assert report.grad_norm > 0.3
    _plain(theirs, skipped, steps=7, clip=0.3)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * LR, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_torchs_up_to_its_bf16(nesterov):
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(shape, generator=generator) * 0.1 for shape in [(24, 40), (40, 24), (16, 16)]]
    ours, theirs = (nn.ParameterList(value.clone() for value in start) for _ in range(2))
    engine = dt.shard(ours, dt.Muon(LR, MOMENTUM, nesterov, weight_decay=DECAY), ParallelMesh.single())
    options = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "nesterov": nesterov}
    muon = torch.optim.Muon(theirs.parameters(), **options, adjust_lr_fn="match_rms_adamw")
    for _ in range(4):
        slopes = [torch.randn(value.shape, generator=generator) for value in start]
        engine.backward(sum((a * b).sum() for a, b in zip(ours, slopes, strict=True)))
        engine.step()
        for param, slope in zip(theirs, slopes, strict=True):
            param.grad = slope
        muon.step()
    for a, b, first in zip(ours, theirs, start, strict=True):
        assert (a - b).norm() < 0.03 * (b - first).norm()
        assert (b - first).norm() > 0.05 * first.norm()


def test_a_matrix_without_a_gradient_stays_with_its_momentum_and_count():
    model = nn.ModuleDict({"a": nn.Linear(6, 5), "b": nn.Linear(5, 5)})
    engine = dt.shard(model, dt.Muon(LR), ParallelMesh.single())
    x, seen = torch.randn(4, 6), []
    for used in (True, False, True):
        y = model["a"](x)
        with contextlib.nullcontext() if used else pytest.warns(UserWarning, match=r"b\.weight"):
            engine.backward((model["b"](y) if used else y).square().mean())
        engine.step()
        seen.append({piece.name: piece.tensor.clone() for piece in engine.pieces()})
    names = ("model/b.weight", "optim/b.weight/momentum_buffer", "optim/b.weight/step")
    assert all(torch.equal(seen[0][name], seen[1][name]) and not torch.equal(seen[1][name], seen[2][name]) for name in names)
    assert [float(state["optim/a.weight/step"]) for state in seen] == [1, 2, 3]
    assert [float(state["optim/b.weight/step"]) for state in seen] == [1, 1, 2]


@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
def test_low_precision_gradients_and_masters_train(master):
    model = toy_model()
    precision = Precision(compute=torch.bfloat16, grad=torch.bfloat16, master=master)
    engine = dt.shard(model, dt.Muon(LR), ParallelMesh.single(), precision=precision)
    tokens, labels = toy_batch([11, 3, 7])
    losses = []
    for _ in range(15):
        loss = cross_entropy_sum(model(tokens), labels)[0] / 21
        losses.append(float(loss.detach()))
        engine.backward(loss)
        engine.step()
    assert losses[-1] < 0.7 * losses[0]
