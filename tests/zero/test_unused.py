"""Parameters that get no gradient: what torch's optimizers do with them, on every rank alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dist_train as dt
from dist_train import checkpoint
from tests.ranks import run_ranks
from tests.zero.helpers import gathered

RECIPES = {
    "adamw": (dt.AdamW(1e-2), lambda groups: torch.optim.AdamW(groups, 1e-2, (0.9, 0.95))),
    "momentum": (dt.SGD(0.1, 0.9, 0.1), lambda groups: torch.optim.SGD(groups, 0.1, 0.9)),
}


class Sometimes(nn.Module):
    """`b` is used on even steps, `never` is not; on three ranks and in small buckets `b` is cut in the middle."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def linear(n, m):
            layer = nn.Linear(n, m)
            for param in layer.parameters():
                param.data = torch.randn(param.shape, generator=generator) * 0.3
            return layer

        self.a, self.b, self.c, self.never = linear(7, 13), linear(13, 13), linear(13, 5), linear(3, 3)

    def forward(self, x, use_b):
        x = torch.tanh(self.a(x))
        return self.c(torch.tanh(self.b(x)) if use_b else x)


def batch(step):
    x_BD = torch.randn(12, 7, generator=torch.Generator().manual_seed(step))
    return x_BD, x_BD[:, :5].square()


def expected(name, steps=6):
    model = Sometimes()
    decayed, spared = ([p for p in model.parameters() if (p.ndim >= 2) == wide] for wide in (True, False))
    optimizer = RECIPES[name][1]([{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}])
    for step in range(steps):
        x, y = batch(step)
        (model(x, step % 2 == 0) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    names = {param: name for name, param in model.named_parameters()}
    counts = {names[param]: int(state["step"]) for param, state in optimizer.state.items() if "step" in state}
    return {name: param.detach() for name, param in model.named_parameters()}, counts


def _train(mesh, comm, name, stage, folder, stop, uses):
    model = Sometimes()
    engine = dt.shard(model, RECIPES[name][0], mesh, stage=stage, bucket_bytes=600)
    each = 12 // mesh.data.size
    mine = slice(mesh.data.index * each, (mesh.data.index + 1) * each)
    first = 0
    if stop and (folder / "step_00000003").exists():
        first = checkpoint.load(folder / "step_00000003", engine.pieces())["step"]
        engine.restored()
    for step in range(first, stop or 6):
        x, y = batch(step)
        use_b = step % 2 == 0 and mesh.data.index in uses
        engine.backward((model(x[mine], use_b) - y[mine]).square().mean())
        engine.step()
    if stop == 3:
        checkpoint.save(folder, 3, list(engine.pieces()), {"step": 3}, comm, mesh.world)
    return gathered(engine, mesh, comm)


def assert_as_torch(found, name):
    values, counts = expected(name)
    for param, value in values.items():
        torch.testing.assert_close(found[f"model/{param}"], value, rtol=2e-5, atol=1e-6, msg=param)
    for param, count in counts.items():
        assert int(found[f"optim/{param}/step"]) == count, param
    assert int(found["optim/never.weight/step"]) == 0
    start = Sometimes()
    assert torch.equal(found["model/never.weight"], start.never.weight)  # weight decay has not touched it either


@pytest.mark.filterwarnings("ignore:no gradient in this backward")
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 0), (3, 1), (2, 2), (3, 3)])
def test_F47_each_parameter_has_a_count_of_its_own_as_in_torch(tmp_path, ranks, stage, name):
    for found in run_ranks(ranks, _train, name, stage, tmp_path, 0, range(ranks)):
        assert_as_torch(found, name)


@pytest.mark.filterwarnings("ignore:no gradient in this backward")
def test_F47_counts_survive_a_checkpoint_on_another_layout(tmp_path):
    run_ranks(3, _train, "adamw", 2, tmp_path, 3, range(3))
    for found in run_ranks(2, _train, "adamw", 3, tmp_path, 6, range(2)):
        assert_as_torch(found, "adamw")


@pytest.mark.filterwarnings("ignore:no gradient in this backward")
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_F05_a_branch_that_one_rank_alone_takes_counts_as_zero_elsewhere(tmp_path, stage):
    (first, *_), (second, *_) = (run_ranks(2, _train, "momentum", at, tmp_path, 0, [0]) for at in (0, stage))
    assert all(torch.equal(first[name], value) for name, value in second.items())
    start = Sometimes()
    assert not torch.equal(second["model/b.weight"], start.b.weight)


def test_a_gradient_of_zeros_moves_a_parameter_where_skipping_is_off():
    engine = dt.shard(model := Sometimes(), dt.SGD(0.1, 0.0, 0.1), dt.ParallelMesh.single(), skip_unused=False)
    before = model.never.weight.clone()
    with pytest.warns(UserWarning, match="never"):
        engine.backward(model(batch(0)[0], True).sum())
    engine.step()
    torch.testing.assert_close(model.never.weight, before * 0.99)  # weight decay alone
