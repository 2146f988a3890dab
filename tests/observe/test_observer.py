from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import stat
import sys
import types

import pytest
from rich.console import Console

from dist_train.config.compose import ConfigError, dump
from dist_train.config.schema import Config, ObserveConfig, PrecisionConfig, TrainConfig
from dist_train.observe import Observer, wandb
from dist_train.observe.progress import Progress, printable


def config(**options):
    return Config(train=TrainConfig(steps=20), observe=ObserveConfig(**options))


def record(step, **values):
    usual = {
        "loss": 5.0 + step, "grad_norm": 1.0, "lr": step / 1000, "loss_scale": 1.0, "skipped": False, "tokens": 100 * step,
        "live_tokens": 90, "step_seconds": 0.5, "tokens_per_second": 200.0, "model_flops_per_second": 1e9, "mfu": 0.25,
        "memory_peak_bytes": 1000 + step, "input_min": 3, "input_max": 50,
    }  # fmt: skip
    return {"step": step, **usual, **values}


def run(folder, first, last, resumed=0, **options):
    observer = Observer(config(**options), folder, is_main=True, resumed_step=resumed)
    for step in range(first, last + 1):
        observer.step(record(step, lr=first / 1000))
        if step % 5 == 0:
            observer.evaluation(step, 2.0, 1.5)
            observer.sample(step, "```\n# text")
    observer.close({"steps": last})


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    return found


def texts(folder, tag):
    """(step, text) as TensorBoard itself shows them: the other reader purges scalars alone."""
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0})
    found.Reload()
    return [(event.step, event.tensor_proto.string_val[0].decode()) for event in found.Tensors(f"{tag}/text_summary")]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_U09_a_resumed_run_has_each_step_once_in_every_file(tmp_path):
    run(tmp_path, 1, 15)
    run(tmp_path, 11, 20, resumed=10)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == list(range(1, 21))
    assert [line["step"] for line in lines(tmp_path / "evaluations.jsonl")] == [5, 10, 15, 20]
    found = events(tmp_path)
    rates = found.Scalars("train/lr")
    assert [event.step for event in rates] == list(range(1, 21))
    assert [round(event.value * 1000) for event in rates] == [1] * 10 + [11] * 10
    assert [event.step for event in found.Scalars("eval/loss")] == [5, 10, 15, 20]
    assert [step for step, _ in texts(tmp_path, "sample")] == [5, 10, 15, 20]


def test_U09_a_run_from_scratch_in_a_used_folder_hides_all_of_the_old_one(tmp_path):
    run(tmp_path, 1, 15)
    run(tmp_path, 1, 3)
    assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    found = events(tmp_path)
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2, 3] and len(texts(tmp_path, "config")) == 1


def test_U09_only_the_main_rank_writes(tmp_path, capfd):
    observer = Observer(config(), tmp_path / "run", is_main=False)
    observer.step(record(1, loss=math.nan))
    observer.evaluation(1, 2.0, 1.5)
    observer.sample(1, "text")
    observer.first_batch("text")
    observer.text("tag", "text")
    observer.warning("text")
    observer.close({"steps": 1})
    assert not (tmp_path / "run").exists() and capfd.readouterr() == ("", "")


def test_tensorboard_shows_scalars_the_config_and_samples(tmp_path):
    run(tmp_path, 1, 5)
    found = events(tmp_path)
    expected = {
        "train/loss": 10.0, "train/lr": 0.001, "train/grad_norm": 1.0, "train/loss_scale": 1.0, "speed/tokens_per_second": 200.0,
        "speed/mfu": 0.25, "memory/peak_bytes": 1005.0, "input/min_token": 3.0, "input/max_token": 50.0, "eval/loss": 2.0,
        "eval/bits_per_byte": 1.5,
    }  # fmt: skip
    assert {tag: round(found.Scalars(tag)[-1].value, 6) for tag in expected} == expected
    assert texts(tmp_path, "config") == [(0, f"```yaml\n{dump(config())}```")]
    assert texts(tmp_path, "sample") == [(5, "    ```\n    # text")]  # a block: marks in a sample stay letters


def test_unknown_values_are_null_and_have_no_curve(tmp_path):
    observer = Observer(config(), tmp_path, is_main=True)
    observer.step(record(1, mfu=None, loss=math.inf, grad_norm=math.nan))
    observer.close()
    line = lines(tmp_path / "metrics.jsonl")[0]
    assert line["mfu"] is None and line["loss"] == "Infinity" and line["grad_norm"] == "NaN"
    found = events(tmp_path)
    assert "speed/mfu" not in found.Tags()["scalars"] and math.isinf(found.Scalars("train/loss")[0].value)
    assert not (tmp_path / "summary.json").exists()


def test_the_summary_joins_facts_and_results(tmp_path):
    observer = Observer(config(), tmp_path, is_main=True, summary_facts={"layout": "dp2", "steps": 0})
    observer.close({"steps": 3, "final_loss": 1.25})
    observer.close({"steps": 4})
    assert json.loads((tmp_path / "summary.json").read_text()) == {"layout": "dp2", "steps": 3, "final_loss": 1.25}


def test_files_of_a_run_are_private(tmp_path):
    run(tmp_path / "run", 1, 1)
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_tensorboard_and_progress_can_be_turned_off(tmp_path, capfd):
    run(tmp_path, 1, 5, tensorboard=False, progress=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["evaluations.jsonl", "metrics.jsonl", "summary.json"]
    assert capfd.readouterr() == ("", "")


def warned(folder, capsys, records, precision=None, resumed=0):
    chosen = config(progress=False)
    if precision is not None:
        chosen = dataclasses.replace(chosen, precision=precision)
    observer = Observer(chosen, folder, is_main=True, resumed_step=resumed)
    for one in records:
        observer.step(one)
    observer.close()
    return capsys.readouterr().err.splitlines()


def test_a_loss_that_is_not_finite_is_warned_of_once_a_row(tmp_path, capsys):
    bad = [record(step, loss=math.nan if 3 <= step <= 14 else 1.0) for step in range(1, 20)]
    found = warned(tmp_path, capsys, bad)
    assert [re.match(r"warning: step (\d+): loss is nan( \(10 steps in a row\))?\. Lower", line)[1] for line in found] == [
        "3",
        "12",
    ]
    assert [step for step, _ in texts(tmp_path, "warnings")] == [3, 12]


def test_a_gradient_norm_over_ten_times_its_mean_is_warned_of(tmp_path, capsys):
    found = warned(tmp_path, capsys, [record(step, grad_norm=25.0 if step == 8 else 2.0) for step in range(1, 12)])
    assert found == ["warning: step 8: gradient norm 25 is over ten times its running mean 2."]


def test_the_running_mean_goes_on_after_a_resume(tmp_path, capsys):
    warned(tmp_path, capsys, [record(step, grad_norm=2.0) for step in range(1, 12)])
    found = warned(tmp_path, capsys, [record(11, grad_norm=25.0)], resumed=10)
    assert len(found) == 1 and "step 11: gradient norm 25" in found[0]


def test_an_overflow_under_loss_scaling_is_no_warning_and_elsewhere_it_is(tmp_path, capsys):
    overflow = [record(step, grad_norm=math.inf if step in (2, 8) else 1.0, skipped=step in (2, 8)) for step in range(1, 10)]
    assert warned(tmp_path / "fp16", capsys, overflow, PrecisionConfig(compute="fp16", loss_scale=1024.0)) == []
    found = warned(tmp_path / "fp32", capsys, overflow)
    assert found == ["warning: step 2: gradient norm is inf.", "warning: step 8: gradient norm is inf."]


def shown(terminal, records, evaluations=(), seconds=1.0, steps=200):
    out, now = io.StringIO(), [0.0]
    console = Console(file=out, force_terminal=terminal, width=120, highlight=False, markup=False, soft_wrap=True)
    progress = Progress(steps, console, clock=lambda: now[0])
    for one in records:
        now[0] += seconds
        progress.step(one)
        if one["step"] in evaluations:
            progress.evaluation(one["step"], 3.25, 1.75)
    progress.close()
    return out.getvalue()


def test_without_a_terminal_plain_lines_come_now_and_then():
    text = shown(False, [record(step) for step in range(1, 201)], evaluations=[100])
    assert "\x1b" not in text
    found = text.splitlines()
    assert found[0] == "step 1/200  loss 6.0000  200 tokens/s  MFU 25.0%  ETA 0:01:40"
    assert found[-1].startswith("step 200/200  loss 205.0000") and found[-1].endswith("ETA 0:00:00")
    assert "step 100/200  eval loss 3.2500  1.7500 bits per byte" in found
    assert 20 < len(found) < 42  # not one a step
    assert 60 < len(shown(False, [record(s) for s in range(1, 10001)], steps=10000).splitlines()) < 260


def test_on_a_terminal_one_line_lives():
    text = shown(True, [record(1), record(2)], evaluations=[2], steps=4)
    assert "\x1b[" in text and "step 2/4  loss 7.0000  200 tokens/s  MFU 25.0%  ETA 0:00:02" in text
    assert "1.7500 bits per byte" in text and text.endswith("\x1b[?25h")  # the cursor is back


def test_the_eta_is_that_of_the_recent_pace():
    now = [0.0]
    progress = Progress(1000, Console(file=io.StringIO()), clock=lambda: now[0])
    assert progress.eta_seconds() is None
    for step in range(1, 301):
        now[0] += 100.0 if step < 200 else 2.0
        progress.step(record(step))
    assert progress.eta_seconds() == 1400.0


def test_unknown_values_are_left_out_of_the_line():
    progress = Progress(5, Console(file=io.StringIO()))
    assert progress.line({"step": 2, "loss": math.nan, "mfu": None, "skipped": True}) == "step 2/5  loss nan  update skipped"


def test_a_sample_cannot_steer_the_terminal():
    assert printable("a\x1b[31m\x07\tb\n\x9b", "utf-8") == "a\\x1b[31m\\x07\tb\n\\x9b"
    assert printable("é\u2028", "ascii") == "\\xe9\\u2028"
    text = printable("\ud800", "utf-8")
    assert text.encode("utf-8") and "d800" in text


def test_first_batch_and_samples_are_shown(tmp_path, capsys):
    observer = Observer(config(tensorboard=False), tmp_path, is_main=True)
    observer.first_batch("tokens [bold]é[/bold] \x1b[0m")
    observer.sample(3, "once :smile:")
    observer.close()
    assert capsys.readouterr().out == "first batch:\ntokens [bold]é[/bold] \\x1b[0m\nsample at step 3:\nonce :smile:\n"


class FakeRun:
    def __init__(self, options):
        self.options, self.logged, self.finished = options, [], False

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


@pytest.fixture
def fake_wandb(monkeypatch):
    module = types.ModuleType("wandb")
    module.runs = []

    def init(**options):
        module.runs.append(FakeRun(options))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_wandb_gets_the_config_and_the_scalars_and_goes_on_after_a_resume(tmp_path, fake_wandb):
    for resumed in (0, 5):
        run(tmp_path, resumed + 1, resumed + 5, resumed=resumed, wandb=True, tensorboard=False, progress=False)
    first, second = fake_wandb.runs
    assert first.options["config"]["train"]["steps"] == 20 and first.options["id"] == second.options["id"]
    assert first.options["resume"] == "allow" and first.finished and second.finished
    assert [step for step, values in second.logged if "loss" in values] == [6, 7, 8, 9, 10]
    assert (5, {"eval_loss": 2.0, "bits_per_byte": 1.5}) in first.logged and (5, {"sample": "```\n# text"}) in first.logged


def test_wandb_is_not_touched_unless_asked_for(tmp_path, fake_wandb):
    run(tmp_path, 1, 1, tensorboard=False, progress=False)
    Observer(config(wandb=True), tmp_path, is_main=False).close()
    assert fake_wandb.runs == []


@pytest.mark.parametrize("is_main", [True, False])
def test_an_absent_wandb_is_a_config_error_with_the_install_line_on_every_rank(tmp_path, monkeypatch, is_main):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"observe\.wandb=true needs wandb.*pip install wandb.*observe\.wandb=false"):
        Observer(config(wandb=True), tmp_path, is_main=is_main)
    assert wandb.__name__ == "dist_train.observe.wandb"


def test_an_absent_tensorboard_is_a_config_error_with_the_install_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"observe\.tensorboard=true needs tensorboard.*pip install tensorboard"):
        Observer(config(), tmp_path, is_main=True)


def test_a_note_is_a_plain_line_of_the_main_rank_with_progress_or_without(tmp_path, capsys):
    observer = Observer(config(tensorboard=False), tmp_path / "shown", is_main=True)
    observer.note("going on from step 3 \x1b[0m [bold]")
    observer.close()
    assert capsys.readouterr() == ("going on from step 3 \\x1b[0m [bold]\n", "")
    observer = Observer(config(tensorboard=False, progress=False), tmp_path / "quiet", is_main=True)
    observer.note("going on from step 3 \x1b[0m [bold]")
    observer.close()
    assert capsys.readouterr() == ("", "going on from step 3 \\x1b[0m [bold]\n")
    Observer(config(tensorboard=False), tmp_path, is_main=False).note("not here")
    assert capsys.readouterr() == ("", "")
