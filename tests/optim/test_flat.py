"""Each recipe over flat segments against torch's own optimizer over parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dist_train as dt
from dist_train.mesh.mesh import ParallelMesh

CASES = {
    "sgd": (dt.SGD(0.1), torch.optim.SGD, {"lr": 0.1}),
    "momentum": (dt.SGD(0.1, 0.9, 0.01), torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adam": (dt.Adam(1e-2, weight_decay=0.01), torch.optim.Adam, {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.01}),
    "adamw": (dt.AdamW(1e-2), torch.optim.AdamW, {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}),
}


def model():
    module = nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.Tanh(), nn.Linear(13, 5))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator))
    return module


@pytest.mark.parametrize("name", CASES)
def test_a_recipe_is_torchs_optimizer_with_decay_that_spares_norms_and_biases(name):
    recipe, kind, options = CASES[name]
    ours, theirs = model(), model()
    engine = dt.shard(ours, recipe, ParallelMesh.single(), bucket_bytes=300)
    spared = [p for p in theirs.parameters() if p.ndim < 2]
    decayed = [p for p in theirs.parameters() if p.ndim >= 2]
    assert spared and decayed
    optimizer = kind([{"params": decayed, **options}, {"params": spared, **options, "weight_decay": 0.0}])
    for step in range(6):
        x, y = torch.randn(2, 11, 7, generator=torch.Generator().manual_seed(step)).split([1, 1])
        for module, backward in ((ours, engine.backward), (theirs, torch.Tensor.backward)):
            backward((module(x) - y[..., :5]).square().mean())
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-7, msg=lambda text, name=name: f"{name}: {text}")
    pieces = {piece.name: piece.tensor for piece in engine.pieces()}
    for state in optimizer.state.values():
        assert float(state.get("step", 6)) == 6
    assert {float(tensor) for name, tensor in pieces.items() if name.endswith("/step")} == {6.0}
