"""Whole runs on layouts of pipeline, data, context and tensor ranks: evaluation, samples, checkpoints, resumes, the summary."""

from __future__ import annotations

import json

import pytest
import torch

from dist_train.comm.collectives import Handle
from tests.ranks import run_ranks
from tests.train.test_run import launch, losses, metrics, saved

RUN = (
    "model.layers=4",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.eval_every=4",
    "checkpoint.every=4",
    "train.steps=8",
)
LAYOUTS = {
    "pp2_tp2": ("mesh.pp=2", "mesh.tp=2", "mesh.dp=1", "shard.stage=1"),
    "pp2_dp2": ("mesh.pp=2", "mesh.dp=2", "pipeline=zero_bubble", "shard.stage=3"),
    "cp2_tp2": ("mesh.cp=2", "mesh.tp=2", "mesh.dp=1", "shard.stage=2"),
}


def summary(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("runs") / "alone"
    assert launch(1, run_dir, *RUN, "observe.sample_tokens=6") == 0
    return run_dir


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_evaluates_and_writes_text_as_one_process_does(layout, alone, tmp_path):
    run_dir = tmp_path / "run"
    assert launch(4, run_dir, *RUN, "observe.sample_tokens=6", *LAYOUTS[layout]) == 0
    assert torch.allclose(losses(run_dir), losses(alone), rtol=1e-5)
    found, expected = summary(run_dir), summary(alone)
    assert found["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    assert found["parameters"] == expected["parameters"] and found["live_tokens"] == expected["live_tokens"]
    assert 0 <= found["pipeline"]["bubble"] < 1
    assert (found["pipeline"]["bubble_by_formula"] > 0) == ("pp2" in layout)
    assert found["memory"]["predicted"] == found["memory"]["measured"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_resume_on_another_layout_goes_on_with_the_same_curve(layout, alone, tmp_path):
    run_dir = tmp_path / "run"
    assert launch(4, run_dir, *RUN, "train.steps=4", *LAYOUTS[layout]) == 0
    assert launch(2, run_dir, *RUN, "mesh.dp=2", "shard.stage=1") == 0
    assert torch.allclose(losses(run_dir), losses(alone), rtol=1e-5)
    weights, exact = saved(run_dir, 8), saved(alone, 8)
    assert all(torch.allclose(weights[n], v, rtol=1e-4, atol=1e-6) for n, v in exact.items() if n.startswith("model/"))


def _with_a_lost_reduction(mesh, comm, run_dir):
    from dist_train.tensor import linear
    from tests.train.test_run import _train

    sums = linear.SharedLayer.sum
    linear.SharedLayer.sum = lambda self, x_MD: (x_MD, Handle()) if isinstance(self, linear.RowLinear) else sums(self, x_MD)
    try:
        _train(mesh, comm, run_dir, [*RUN, "mesh.tp=2", "mesh.dp=1", "mesh.sequence=false", "observe.check_states=true"])
    except RuntimeError as error:
        return str(error)
    finally:
        linear.SharedLayer.sum = sums


def test_a_run_that_looks_at_states_names_the_layer_whose_reduction_is_lost(tmp_path):
    assert launch(2, tmp_path / "run", *RUN, "train.steps=1", "mesh.tp=2", "mesh.dp=1", "observe.check_states=true") == 0
    for told in run_ranks(2, _with_a_lost_reduction, str(tmp_path / "lost")):
        assert "output of blocks.0.attention.out is declared replicated" in told


def test_F20_random_streams_of_every_rank_go_on_where_they_were(tmp_path):
    """TP2 × PP2 with dropout: interrupted or not, the same bits."""
    layout = ("mesh.pp=2", "mesh.tp=2", "mesh.dp=1", "model.dropout=0.2", "remat=full")
    assert launch(4, tmp_path / "whole", *RUN, *layout) == 0
    for steps in (3, 5, 8):
        assert launch(4, tmp_path / "parts", *RUN, *layout, f"train.steps={steps}") == 0
    whole, parts = ([(r["loss"], r["grad_norm"]) for r in metrics(tmp_path / name)] for name in ("whole", "parts"))
    assert whole == parts
    first, second = saved(tmp_path / "whole", 8), saved(tmp_path / "parts", 8)
    assert {f"rng/{rank}/torch" for rank in range(4)} <= first.keys()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
