"""Stage 3 where ranks do not do alike: no hang, no gather that mixes parameters, an error that names them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dist_train as dt
from tests.ranks import COLLECTIVE_TIMEOUT_SECONDS, RankFailure, run_ranks
from tests.zero.helpers import gathered
from tests.zero.test_unused import Sometimes, batch


class Routed(nn.Module):
    """Blocks of equal size, taken in the order that a call names: mixed up, they would fit each other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4))

    def forward(self, x, route):
        for index in route:
            x = self.blocks[index](x)
        return x


def _route(mesh, comm, stage, routes):
    """`routes[step][rank]`: the blocks that a rank takes in a step."""
    engine = dt.shard(Routed(), dt.SGD(0.1), mesh, stage=stage)
    for step, route in enumerate(routes):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + mesh.rank))
        engine.backward(engine.module(x, route[mesh.rank]).square().mean())
        engine.step()
    return gathered(engine, mesh, comm)


ALL = (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("steps_alike", "second"),
    [
        pytest.param(0, (0, 1, 3), id="one left out from the start"),
        pytest.param(2, (0, 2, 1, 3), id="another order later"),
        pytest.param(2, (0, 1, 2), id="the last left out later"),
        pytest.param(2, (0, 1, 2, 3, 1), id="one more later"),
    ],
)
def test_F05_a_rank_that_uses_other_units_than_the_rest_stops_with_their_names(steps_alike, second):
    routes = [(ALL, ALL)] * steps_alike + [(ALL, second)]
    with pytest.raises(RankFailure, match=r"(?s)gathers blocks\.\d\.0\.weight and 1 more where.*set stage 2"):
        run_ranks(2, _route, 3, routes, timeout=3 * COLLECTIVE_TIMEOUT_SECONDS)


@pytest.mark.filterwarnings("ignore:no gradient in this backward")
def test_a_turn_that_all_ranks_take_is_followed():
    routes = [(r, r) for r in (ALL, ALL, (0, 2, 3), (3, 2, 1, 0), ALL, (0, 1, 1, 2), (0, 1, 1, 2), ALL)]
    (expected, *_), (found, *_) = run_ranks(2, _route, 0, routes), run_ranks(2, _route, 3, routes)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.filterwarnings("ignore:no gradient in this backward")
@pytest.mark.parametrize("stage", [1, 2])
def test_F05_below_stage_3_every_rank_may_take_its_own_way(stage):
    routes = [(ALL, (0, 2, 1, 3)), ((3, 1), ALL), ((0,), (1, 2))]
    (expected, *_), (found, *_) = run_ranks(2, _route, 0, routes), run_ranks(2, _route, stage, routes)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def _published(mesh, comm, stage, ahead):
    engine = dt.shard(model := Sometimes(), dt.AdamW(1e-2), mesh, stage=stage, bucket_bytes=300, publish_ahead=ahead)
    states = []
    for step in range(4):
        x, y = batch(step)
        engine.backward((model(x, True) - y).square().mean())
        engine.step()
        if step == 2:
            states.append({name: value.clone() for name, value in model.state_dict().items()})
    engine.wait()
    states.append({name: value.clone() for name, value in model.state_dict().items()})
    return states


@pytest.mark.filterwarnings("ignore:no gradient in this backward")
@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_arrive_during_the_next_forward_are_the_same(stage):
    for expected, found in zip(run_ranks(3, _published, stage, False), run_ranks(3, _published, stage, True), strict=True):
        for a, b in zip(expected, found, strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)
