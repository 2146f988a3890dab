from __future__ import annotations

import json
import math
import os
import stat

import numpy as np
import pytest
import torch

from dist_train.observe import metrics
from dist_train.observe.metrics import JsonLines, dumps, write_json


def strictly(text):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_floats_read_back_bit_for_bit():
    values = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 1e16, float(np.float32(0.1))]
    found = strictly(dumps(values))
    assert [v.hex() for v in found] == [v.hex() for v in values]


@pytest.mark.parametrize(("value", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_non_finite_floats_are_strings_that_float_reads(value, text):
    found = strictly(dumps({"loss": value, "deep": [{"x": (value,)}], "numpy": np.float32(value), "torch": torch.tensor(value)}))
    assert found == {"loss": text, "deep": [{"x": [text]}], "numpy": text, "torch": text}
    assert repr(float(found["loss"])) == repr(value)


def test_unknown_stays_null_and_scalars_become_numbers():
    assert strictly(dumps({"mfu": None, "n": np.int64(3), "t": torch.tensor(2), "ok": True})) == {
        "mfu": None,
        "n": 3,
        "t": 2,
        "ok": True,
    }


def test_each_line_is_on_disk_when_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in (1, 2, 3):
        lines.write({"step": step, "text": "two\nlines"})
        assert steps(path)[-1] == step
    lines.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("resumed", [0, 1, 4, 5, 9])
def test_U09_a_resumed_file_has_each_step_once(tmp_path, resumed):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in range(1, 6):
        lines.write({"step": step, "run": 1})
    lines.close()
    with path.open("a") as file:
        file.write('{"step": 1, "ru')  # a kill in the middle of a line
    again = JsonLines(path, resumed)
    assert [record["step"] for record in again.recent] == list(range(1, min(resumed, 5) + 1))
    for step in range(resumed + 1, 8):
        again.write({"step": step, "run": 2})
    again.close()
    assert steps(path) == [*range(1, min(resumed, 5) + 1), *range(resumed + 1, 8)]
    assert os.listdir(tmp_path) == ["metrics.jsonl"] and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_U09_a_last_line_without_its_end_does_not_grow_into_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')  # killed between the record and its newline
    lines = JsonLines(path, 2)
    lines.write({"step": 3})
    lines.close()
    assert steps(path) == [1, 3]


def test_U09_resuming_twice_keeps_what_each_resume_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for resumed, end in ((0, 15), (10, 17), (12, 20)):
        lines = JsonLines(path, resumed)
        for step in range(resumed + 1, end + 1):
            lines.write({"step": step, "from": resumed})
        lines.close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [record["step"] for record in found] == list(range(1, 21))
    assert [record["from"] for record in found] == [0] * 10 + [10] * 2 + [12] * 8


def test_a_failed_rewrite_loses_nothing(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in (1, 2, 3):
        lines.write({"step": step})
    lines.close()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(metrics.os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        JsonLines(path, 1)
    assert steps(path) == [1, 2, 3] and os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_json_file_is_the_old_one_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json(path, {"final_loss": math.nan, "steps": 3})
    assert strictly(path.read_text()) == {"final_loss": "NaN", "steps": 3}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(metrics.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"steps": 4})
    assert strictly(path.read_text())["steps"] == 3 and os.listdir(tmp_path) == ["summary.json"]
