"""A rank turns what happens to it into an exit code, and into words in the right place. Training itself is stood in for."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dist_train.config import compose
from dist_train.config.compose import ConfigError
from dist_train.config.schema import Config
from dist_train.launcher import rank


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / "config.yaml").write_text(compose.dump(Config()))
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(rank.signal, "signal", lambda *_: None)  # the test session keeps its own handlers
    return tmp_path


def act(monkeypatch: pytest.MonkeyPatch, function: Callable[[Config, Path], Any]) -> None:
    monkeypatch.setitem(sys.modules, "dist_train.train.main", SimpleNamespace(run_rank=function))


@pytest.mark.parametrize("code", [0, 75])
def test_the_code_of_run_rank_is_the_code_of_the_rank(run_dir: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    act(monkeypatch, lambda config, folder: code if (config, folder) == (Config(), run_dir) else 1)
    assert rank.guarded(run_dir, started_here=True) == code


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("error", [ConfigError("train.steps=0: at least 1"), RuntimeError("a shard went missing")])
def test_F29_a_failure_is_told_to_the_log_and_to_the_launcher(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, error: Exception
) -> None:
    def fail(config: Config, folder: Path) -> int:
        raise error

    monkeypatch.setenv("RANK", str(number))
    act(monkeypatch, fail)
    user_error = isinstance(error, ConfigError)
    assert rank.guarded(run_dir, started_here=True) == (2 if user_error else 1)
    said = capsys.readouterr().err if number else (run_dir / "logs" / "rank_00000.log").read_text()
    assert str(error) in said
    assert ("Traceback" in said) != user_error
    told = json.loads((run_dir / "error.json").read_text())["message"]
    assert told["message"].endswith(str(error))
    assert told["extraInfo"]["py_callstack"].strip() == said.strip()


def test_rank_0_keeps_quiet_where_the_launcher_speaks_and_speaks_where_torchrun_started_it(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: Config, folder: Path) -> int:
        raise ConfigError("no such thing")

    act(monkeypatch, fail)
    monkeypatch.delenv("RANK", raising=False)
    rank.guarded(run_dir, started_here=True)
    assert capsys.readouterr().err == ""
    rank.guarded(run_dir, started_here=False)
    assert capsys.readouterr().err == "no such thing\n"
