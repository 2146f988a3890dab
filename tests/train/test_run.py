from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from dist_train import checkpoint
from dist_train.config.compose import ConfigError, dump
from dist_train.train.main import train
from tests.parity.layouts import shape_of
from tests.ranks import RankFailure, mesh_of, run_ranks
from tests.toy import toy_config


def _train(mesh, comm, run_dir, overrides, stop_at=None):
    """One run in `run_dir`; `stop_at`: (rank, step) at which that rank gets SIGTERM."""
    run_dir = Path(run_dir)
    config = toy_config(*overrides)
    mesh = mesh_of(shape_of(config), mesh)
    run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if mesh.is_main:
        (run_dir / "config.yaml").write_text(dump(config))
    if stop_at is None:
        return train(config, run_dir, mesh)
    from dist_train.train import loop

    original = loop.train_step

    def step_then_signal(run):
        if stop_at == (mesh.rank, run.state.step):
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)  # an impatient scheduler
        return original(run)

    loop.train_step = step_then_signal
    try:
        return train(config, run_dir, mesh)
    finally:
        loop.train_step = original


def launch(ranks, run_dir, *overrides, stop_at=None):
    codes = run_ranks(ranks, _train, str(run_dir), [f"mesh.dp={ranks}", *overrides], stop_at)
    assert len(set(codes)) == 1
    return codes[0]


def metrics(run_dir):
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir):
    return torch.tensor([record["loss"] for record in metrics(run_dir)], dtype=torch.float64)


def saved(run_dir, step):
    path = Path(run_dir) / "checkpoints" / f"step_{step:08d}"
    assert checkpoint.verify(path) == []
    found = {}
    for name, (shape, dtype) in checkpoint.names(path).items():
        found[name] = torch.empty(shape, dtype=dtype)
    checkpoint.load(path, [checkpoint.Piece.whole(name, tensor) for name, tensor in found.items()])
    return found


BATCH = ("train.global_batch=8", "train.eval_every=0", "checkpoint.every=0")


def test_one_loss_curve_on_every_layout_and_accumulation(tmp_path):
    """One process and dp=2, dp=4, accumulation 1 and 4: the same losses within 1e-5 over 20 steps of SGD."""
    curves = {}
    for ranks in (1, 2, 4):
        for accumulation in (1, 4):
            micro = 8 // ranks // accumulation
            if micro:
                run_dir = tmp_path / f"dp{ranks}_acc{accumulation}"
                assert launch(ranks, run_dir, "train.steps=20", f"train.micro_batch={micro}", *BATCH) == 0
                curves[ranks, accumulation] = losses(run_dir)
    run_dir = tmp_path / "dp4_acc4"
    assert launch(4, run_dir, "train.steps=20", "train.micro_batch=1", "train.global_batch=16", *BATCH[1:]) == 0
    reference = tmp_path / "dp1_16"
    assert launch(1, reference, "train.steps=20", "train.micro_batch=16", "train.global_batch=16", *BATCH[1:]) == 0
    torch.testing.assert_close(losses(run_dir), losses(reference), rtol=1e-5, atol=0)
    base = curves[1, 1]
    assert len(base) == 20 and base[-1] < base[0] - 0.1
    for layout, curve in curves.items():
        torch.testing.assert_close(curve, base, rtol=1e-5, atol=0, msg=lambda text, layout=layout: f"{layout}: {text}")
    live = [record["live_tokens"] for record in metrics(tmp_path / "dp1_acc1")]
    assert len(set(live)) > 1, "rows must have unequal live tokens for this test to mean anything"


RESUMABLE = ("optim=adamw", "optim.lr=0.01", "lr=cosine", "lr.warmup_steps=4", "model.dropout=0.2", "train.clip_norm=0.5")


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (2, 0), (2, 1), (3, 2), (2, 3)])
def test_F18_F19_F22_resumes_are_bitwise_again_and_again(tmp_path, ranks, stage):
    batch = (f"train.global_batch={4 * ranks}", *BATCH[1:])
    overrides = ["train.steps=12", "train.micro_batch=2", *batch, *RESUMABLE, f"shard.stage={stage}"]
    overrides += [f"data.synthetic_documents={30 * ranks}"]
    assert launch(ranks, tmp_path / "whole", *overrides) == 0
    for stop_at in (2, 5, 6, 11):  # in a row, over about two epochs
        assert launch(ranks, tmp_path / "cut", *overrides, stop_at=(ranks - 1, stop_at - 1)) == 75
        assert metrics(tmp_path / "cut")[-1]["step"] == stop_at
        assert json.loads((tmp_path / "cut" / "summary.json").read_text())["status"] == "preempted"
    assert launch(ranks, tmp_path / "cut", *overrides) == 0
    whole, cut = metrics(tmp_path / "whole"), metrics(tmp_path / "cut")
    for key in ("step", "loss", "grad_norm", "lr", "live_tokens"):
        assert [record[key] for record in cut] == [record[key] for record in whole], key
    expected, found = saved(tmp_path / "whole", 12), saved(tmp_path / "cut", 12)
    assert expected.keys() == found.keys() and any("exp_avg" in name for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_F21_a_checkpoint_goes_on_with_other_ranks_and_at_another_stage(tmp_path):
    overrides = ["train.global_batch=12", "train.micro_batch=1", *BATCH[1:], *RESUMABLE[:4], "train.steps=12"]
    assert launch(1, tmp_path / "one", *overrides) == 0
    for ranks, stage, stop_at in [(4, 2, (2, 2)), (3, 3, (0, 4)), (2, 1, (1, 6)), (1, 3, (0, 8)), (4, 0, (3, 9))]:
        assert launch(ranks, tmp_path / "moved", *overrides, f"shard.stage={stage}", stop_at=stop_at) == 75
    assert launch(2, tmp_path / "moved", *overrides, "shard.stage=3") == 0
    torch.testing.assert_close(losses(tmp_path / "moved"), losses(tmp_path / "one"), rtol=1e-5, atol=0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_F33_F37_U07_a_signal_to_one_rank_stops_all_at_one_step_with_a_whole_checkpoint(tmp_path, seed):
    overrides = ["train.steps=8", "train.micro_batch=2", *BATCH]
    at = (seed % 2, 1 + 2 * seed)
    assert launch(2, tmp_path / "run", *overrides, stop_at=at) == 75
    step = at[1] + 1
    assert metrics(tmp_path / "run")[-1]["step"] == step
    assert checkpoint.find(tmp_path / "run" / "checkpoints", "auto").name == f"step_{step:08d}"
    assert checkpoint.read_state(tmp_path / "run" / "checkpoints" / f"step_{step:08d}")["train"]["samples"] == 8 * step


def test_F11_the_loss_scale_path_does_not_depend_on_restarts(tmp_path):
    overrides = [
        "precision=fp16", "precision.compute=fp32", "precision.loss_scale=1e38", "precision.loss_scale_growth_steps=3",
        "train.steps=12", "train.micro_batch=4", *BATCH,
    ]  # fmt: skip
    assert launch(1, tmp_path / "whole", *overrides) == 0
    for stop_at in (2, 5, 6, 11):
        assert launch(1, tmp_path / "cut", *overrides, stop_at=(0, stop_at - 1)) == 75
    assert launch(1, tmp_path / "cut", *overrides) == 0
    whole, cut = metrics(tmp_path / "whole"), metrics(tmp_path / "cut")
    for key in ("loss_scale", "skipped", "loss"):
        assert [record[key] for record in cut] == [record[key] for record in whole], key
    scales = [record["loss_scale"] for record in whole]
    assert any(record["skipped"] for record in whole) and not all(record["skipped"] for record in whole)
    moves = [b - a for a, b in zip(scales, scales[1:], strict=False)]
    assert max(moves) > 0 > min(moves)


def test_fp16_and_bf16_train_close_to_fp32(tmp_path):
    common = ["train.steps=8", "train.micro_batch=4", *BATCH]
    for precision in ("fp32", "bf16", "fp16"):
        assert launch(2, tmp_path / precision, *common, f"precision={precision}") == 0
    base = losses(tmp_path / "fp32")
    torch.testing.assert_close(losses(tmp_path / "bf16"), base, rtol=2e-2, atol=0)
    torch.testing.assert_close(losses(tmp_path / "fp16"), base, rtol=4e-3, atol=0)


@pytest.mark.parametrize("remat", ["selective", "full"])
def test_F41_recompute_changes_no_bit_of_a_run(tmp_path, remat):
    common = ["train.steps=4", "train.micro_batch=2", "model.dropout=0.3", *BATCH]
    for policy in ("none", remat):
        assert launch(2, tmp_path / policy, *common, f"remat={policy}") == 0
    assert torch.equal(losses(tmp_path / remat), losses(tmp_path / "none"))
    a, b = saved(tmp_path / remat, 4), saved(tmp_path / "none", 4)
    assert all(torch.equal(a[name], b[name]) for name in a)


def _masks(mesh, comm, seed):
    from dist_train.checkpoint import rng

    rng.reseed(seed, 0, mesh.rank, mesh.device)
    return torch.nn.functional.dropout(torch.ones(1, 64), 0.5)


def test_F50_dropout_differs_over_data_ranks_and_is_reproducible():
    first, again = run_ranks(4, _masks, 3), run_ranks(4, _masks, 3)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert len({tuple(mask.flatten().tolist()) for mask in first}) == 4


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_F24_F27_evaluation_counts_every_held_out_row_once_on_any_number_of_ranks(tmp_path, ranks):
    overrides = ["train.steps=1", "train.global_batch=12", "train.micro_batch=1", "optim.lr=0", "checkpoint.every=0"]
    overrides += ["data.eval_fraction=0.2", "data.synthetic_documents=33"]
    assert launch(ranks, tmp_path / "run", *overrides, "train.eval_batch=2") == 0
    assert launch(1, tmp_path / "one", *overrides, "train.eval_batch=1") == 0
    found, expected = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "one"))
    assert math.isclose(found["eval_loss"], expected["eval_loss"], rel_tol=1e-6)


def test_skipped_steps_consume_data_and_change_nothing(tmp_path):
    common = ["train.micro_batch=4", *BATCH, "checkpoint.every=1", "checkpoint.keep=0"]
    assert launch(2, tmp_path / "run", *common, "train.steps=4", 'train.skip_steps=["2-3"]') == 0
    assert [record["skipped"] for record in metrics(tmp_path / "run")] == [False, True, True, False]
    assert all(0 < record["grad_norm"] < 100 for record in metrics(tmp_path / "run"))
    one, three, four = (saved(tmp_path / "run", step) for step in (1, 3, 4))
    weights = [name for name in one if name.startswith("model/")]
    assert all(torch.equal(one[name], three[name]) for name in weights)
    assert not all(torch.equal(three[name], four[name]) for name in weights)
    assert len({record["loss"] for record in metrics(tmp_path / "run")}) == 4


def test_a_file_asks_for_a_checkpoint(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "save_now").touch()
    assert launch(2, tmp_path / "run", "train.steps=3", "train.micro_batch=4", "checkpoint.keep=0", *BATCH) == 0
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step_00000001", "step_00000003"]
    assert not (tmp_path / "run" / "save_now").exists()


def _check(run_dir, *overrides):
    from dist_train import data
    from dist_train.train.resume import check_start

    config = toy_config(*overrides)
    return check_start(config, data.prepare(config.data), Path(run_dir) / "checkpoints")


def test_what_a_run_cannot_go_on_with_is_refused_before_anything_is_touched(tmp_path):
    common = ["train.micro_batch=4", *BATCH]
    assert launch(1, tmp_path / "run", *common, "train.steps=2") == 0
    run = tmp_path / "run"
    assert _check(run, *common, "train.steps=3").step == 2
    for override, words in [
        ("data.synthetic_documents=100", "other data"),
        ("train.seed=5", "the order"),
        ("train.seq_len=16", "the order"),
        ("model.hidden=32", "model.hidden|has shape"),
        ("model.layers=3", "no such parameter"),
        ("optim=adamw", "set optim=sgd"),
        ("train.steps=1", "further already"),
        (f"checkpoint.resume={tmp_path / 'nowhere'}", "no checkpoint there"),
    ]:
        with pytest.raises(ConfigError, match=words):
            _check(run, *common, "train.steps=3", override)
    assert _check(run, *common, "train.steps=3", "train.seed=5", "checkpoint.same_data=false").step == 2
    assert _check(tmp_path / "new", *common, "train.steps=3") is None


def test_a_path_is_where_a_run_begins_and_its_own_progress_wins(tmp_path):
    common = ["train.micro_batch=4", *BATCH, "checkpoint.keep=0"]
    assert launch(1, tmp_path / "a", *common, "train.steps=2", "checkpoint.every=1") == 0
    fork = [*common, f"checkpoint.resume={tmp_path / 'a'}"]
    assert launch(1, tmp_path / "b", *fork, "train.steps=2") == 0  # nothing to train, but it has a checkpoint of its own
    assert (tmp_path / "b" / "checkpoints" / "step_00000002" / "manifest.json").exists()
    assert launch(1, tmp_path / "b", *fork, "train.steps=4") == 0
    assert launch(1, tmp_path / "b", *fork, "train.steps=6") == 0
    assert [record["step"] for record in metrics(tmp_path / "b")] == [3, 4, 5, 6]
    back = [*common, f"checkpoint.resume={tmp_path / 'b' / 'checkpoints' / 'step_00000004'}"]
    assert launch(1, tmp_path / "b", *back, "train.steps=5") == 0
    assert launch(1, tmp_path / "b", *back, "train.steps=7") == 0  # goes on from 5, not from 4 again
    names = sorted(path.name for path in (tmp_path / "b" / "checkpoints").iterdir())
    assert names == [f"step_0000000{n}" for n in (2, 4, 5)] + ["step_00000006.left_behind", "step_00000007"]
    assert [record["step"] for record in metrics(tmp_path / "b")] == [3, 4, 5, 6, 7]


def test_F13_weights_alone_begin_a_new_run(tmp_path):
    common = ["train.micro_batch=4", *BATCH, "precision=bf16"]
    assert launch(2, tmp_path / "a", *common, "train.steps=2") == 0
    begin = ["optim=adamw", "checkpoint.weights_only=true", f"checkpoint.resume={tmp_path / 'a'}", "train.seed=7"]
    assert launch(2, tmp_path / "b", *common, *begin, "optim.lr=0", "train.steps=1", "shard.stage=2") == 0
    a, b = saved(tmp_path / "a", 2), saved(tmp_path / "b", 1)
    assert all(torch.equal(a[name], b[name]) for name in a if name.startswith("model/"))
    assert float(b["optim/embed.weight/step"]) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_F15_a_flipped_byte_in_the_newest_checkpoint_falls_back_to_the_one_before(tmp_path, ranks):
    common = ["train.micro_batch=4", *BATCH[:2], "train.steps=4", "checkpoint.every=2", "checkpoint.keep=0"]
    assert launch(ranks, tmp_path / "run", *common) == 0
    before = metrics(tmp_path / "run")
    for step in (4, 2):
        path = tmp_path / "run" / "checkpoints" / f"step_{step:08d}" / f"rank_{ranks - 1:05d}.safetensors"
        damaged = bytearray(path.read_bytes())
        damaged[-40] ^= 1
        path.write_bytes(damaged)
        if step == 4:
            assert launch(ranks, tmp_path / "run", *common) == 0
            assert [record["loss"] for record in metrics(tmp_path / "run")] == [record["loss"] for record in before]
            path.write_bytes(damaged)
    with pytest.raises((ConfigError, RankFailure), match=r"safetensors"):
        launch(ranks, tmp_path / "run", *common)
    assert metrics(tmp_path / "run") != []


def test_other_data_is_accepted_when_asked_for(tmp_path):
    common = ["train.micro_batch=4", *BATCH]
    assert launch(1, tmp_path / "run", *common, "train.steps=2") == 0
    more = ["train.steps=3", "data.synthetic_documents=100", "checkpoint.same_data=false"]
    assert launch(1, tmp_path / "run", *common, *more) == 0
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3]


def test_U09_a_resumed_run_has_one_record_a_step(tmp_path):
    common = ["train.micro_batch=4", "train.steps=6", "train.global_batch=8", "train.eval_every=2", "checkpoint.every=2"]
    assert launch(2, tmp_path / "run", *common) == 0
    before = metrics(tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000006")
    assert launch(2, tmp_path / "run", *common) == 0
    after = metrics(tmp_path / "run")
    assert [record["step"] for record in after] == list(range(1, 7))
    assert [record["loss"] for record in after] == [record["loss"] for record in before]


def _leaky(mesh, comm, run_dir):
    from dist_train.model import transformer

    config = toy_config("train.steps=2", "train.micro_batch=4", *BATCH)
    original = transformer.prepare_documents
    transformer.prepare_documents = lambda documents_BT, *rest: original(documents_BT * 0, *rest)
    try:
        Path(run_dir).mkdir()
        return train(config, Path(run_dir), mesh)
    finally:
        transformer.prepare_documents = original


def test_F25_a_run_whose_documents_leak_does_not_start(tmp_path):
    from dist_train.train.start_checks import IsolationError

    with pytest.raises(IsolationError, match="see each other"):
        run_ranks(1, _leaky, str(tmp_path / "run"))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_summary_shows_traffic_and_state_bytes_of_each_stage(tmp_path, stage):
    overrides = ["train.steps=4", "train.micro_batch=2", "train.global_batch=8", "data.eval_fraction=0", f"shard.stage={stage}"]
    assert launch(2, tmp_path / "run", *overrides, "precision=bf16", "optim=adamw", "precision.grad=bf16") == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["memory"]["predicted"] == summary["memory"]["measured"]
    psi = summary["parameters"]
    law = {1: 4 * psi + 12 * psi / 2, 2: 2 * psi + 14 * psi / 2, 3: 16 * psi / 2}[stage]
    held, units = sum(summary["memory"]["measured"].values()), 60
    assert 0.98 * law <= held < law + 16 * 64 * units  # padding makes up the difference
    passes = {1: (4, 2), 2: (4 * 2, 2), 3: (4 * 2, 2 * 2 * 2)}[stage]  # bytes per parameter: fp32 sums, bf16 gathers
    for op, each in zip(("reduce_scatter/dp", "all_gather/dp"), passes, strict=True):
        assert each * psi / 2 <= summary["comm"][op]["bytes"] < each * (psi + 64 * units) / 2


def test_summary_and_metrics_hold_what_the_design_promises(tmp_path):
    assert launch(2, tmp_path / "run", "train.steps=3", "train.micro_batch=2", "train.global_batch=8", "train.eval_every=1") == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for key in ("final_loss", "eval_loss", "steps", "layout", "parameters", "tokens", "comm", "memory", "seconds"):
        assert key in summary, key
    assert summary["memory"]["predicted"] == summary["memory"]["measured"]
    assert summary["final_loss"] == metrics(tmp_path / "run")[-1]["loss"]
    reduced = summary["comm"]["all_reduce/dp"]["bytes"]
    assert reduced >= 4 * summary["parameters"]  # 2Ψ(N-1)/N elements of 4 bytes at N = 2, and the padding
    assert reduced < 4 * (summary["parameters"] + 64 * 30) + 200
    keys = (
        "step", "loss", "grad_norm", "lr", "loss_scale", "skipped", "tokens", "live_tokens", "step_seconds", "tokens_per_second",
        "model_flops_per_second", "mfu", "memory_peak_bytes",
    )  # fmt: skip
    for record in metrics(tmp_path / "run"):
        assert all(key in record for key in keys)
        assert record["mfu"] is None and record["tokens"] == 8 * 12
    for path in (tmp_path / "run").rglob("*"):
        if path.name != "config.yaml":  # written by this test, not by a launcher
            assert path.stat().st_mode & 0o077 == 0, path
