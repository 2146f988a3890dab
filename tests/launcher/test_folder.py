"""The run folder: one per run whatever starts at once, private, never a stranger's."""

from __future__ import annotations

import dataclasses
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from dist_train.config import compose
from dist_train.config.compose import ConfigError
from dist_train.config.schema import Config
from dist_train.launcher.folder import make_run_folder, refuse_old_run

NOON = datetime(2024, 5, 17, 12, 0, 0)


def asking(run_dir: Path | None = None, resume: str = "auto") -> Config:
    config = Config()
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, dir=None if run_dir is None else str(run_dir)),
        checkpoint=dataclasses.replace(config.checkpoint, resume=resume),
    )


def test_U10_runs_that_start_in_one_second_have_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: make_run_folder(asking(), NOON), range(8)))
    assert len(set(folders)) == 8
    assert {folder.parent for folder in folders} == {tmp_path / "runs"}
    assert {folder.name for folder in folders} == {"2024-05-17_12-00-00", *(f"2024-05-17_12-00-00_{n}" for n in range(2, 9))}


def test_a_run_folder_is_private_and_holds_its_config(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        folder = make_run_folder(asking(tmp_path / "deep" / "run"))
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "logs").stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "config.yaml").stat().st_mode) == 0o600
    assert compose.load(folder / "config.yaml") == asking(tmp_path / "deep" / "run")
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "logs"]


def test_a_folder_that_holds_a_run_is_taken_to_resume_and_refused_by_name_to_start_anew(tmp_path: Path) -> None:
    folder = make_run_folder(asking(tmp_path / "run"))
    assert make_run_folder(asking(folder)) == folder
    with pytest.raises(ConfigError, match=f"run.dir={folder}.*checkpoint.resume=never"):
        refuse_old_run(asking(folder, resume="never"))
    with pytest.raises(ConfigError, match=f"run.dir={folder}"):
        make_run_folder(asking(folder, resume="never"))
    (tmp_path / "empty").mkdir()
    assert make_run_folder(asking(tmp_path / "empty", resume="never")) == tmp_path / "empty"


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="run.dir="):
            make_run_folder(asking(wrong))
    assert (tmp_path / "file").read_text() == "mine"
