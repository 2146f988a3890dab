"""LAMB against its formulas parameter by parameter, at every stage."""

from __future__ import annotations

import pytest
import torch

import dist_train as dt
from tests.optim.test_cuts import Odd, advance, gathered
from tests.ranks import run_ranks

LR, DECAY = 0.02, 0.1


def _train(mesh, comm, stage, fused):
    recipe = dt.Lamb(LR, weight_decay=DECAY, fused=fused)
    policy = dt.zero.ShardPolicy.from_stage(stage)
    engine = dt.ZeroEngine(Odd(), recipe, mesh, comm, policy=policy, clip_norm=0.0, bucket_bytes=3000)
    advance(engine, mesh, 0, 5)
    return gathered(engine, mesh, comm)


def plainly():
    """The same steps on one rank, by the formulas of the paper in fp64 on each parameter; step 2 is skipped."""
    module, state = Odd(), {}
    for step in (0, 1, 3, 4):
        tokens_BT = torch.randint(0, 53, (6, 9), generator=torch.Generator().manual_seed(step))
        logits = module(tokens_BT[:, :-1], step % 2 == 0)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens_BT[:, 1:].flatten()).backward()
        for name, param in module.named_parameters():
            if param.grad is None:
                continue
            m, v, count = state.get(name, (0.0, 0.0, 0))
            grad, value = param.grad.double(), param.data.double()
            m, v, count = 0.9 * m + 0.1 * grad, 0.999 * v + 0.001 * grad.square(), count + 1
            state[name], param.grad = (m, v, count), None
            update = m / (1 - 0.9**count) / ((v / (1 - 0.999**count)).sqrt() + 1e-6)
            if param.ndim >= 2:
                update = update + DECAY * value
                sizes = value.norm(), update.norm()
                update = update * (sizes[0] / sizes[1] if min(sizes) > 0 else 1.0)
            param.data.copy_(value - LR * update)
    return module


@pytest.mark.filterwarnings("ignore:no gradient in this backward")
@pytest.mark.parametrize("fused", [True, False])
def test_every_stage_takes_the_steps_of_the_paper(fused):
    expected = dict(plainly().named_parameters())
    for stage in (0, 1, 2, 3):
        for found in run_ranks(2, _train, stage, fused):
            for name, value in expected.items():
                torch.testing.assert_close(found[f"model/{name}"], value.detach().double(), rtol=1e-4, atol=2e-6)
