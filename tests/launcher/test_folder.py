"""The run folder: one per run whatever starts at once, private, never a stranger's."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from dist_train.config import compose
from dist_train.config.compose import ConfigError
from dist_train.config.schema import Config
from dist_train.launcher.folder import make_run_folder, refuse_early
from dist_train.launcher.lock import FolderLock
from dist_train.launcher.reaper import Reaper

NOON = datetime(2024, 5, 17, 12, 0, 0)


def asking(run_dir: Path | None = None, resume: str = "auto") -> Config:
    config = Config()
    return dataclasses.replace(
        config,
        run=dataclasses.replace(config.run, dir=None if run_dir is None else str(run_dir)),
        checkpoint=dataclasses.replace(config.checkpoint, resume=resume),
    )


def made(config: Config, now: datetime | None = None) -> Path:
    folder, lock = make_run_folder(config, now)
    lock.release()
    return folder


def test_U10_runs_that_start_in_one_second_have_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: made(asking(), NOON), range(8)))
    assert len(set(folders)) == 8
    assert {folder.parent for folder in folders} == {tmp_path / "runs"}
    assert {folder.name for folder in folders} == {"2024-05-17_12-00-00", *(f"2024-05-17_12-00-00_{n}" for n in range(2, 9))}


def test_a_run_folder_is_private_and_holds_its_config(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        folder = made(asking(tmp_path / "deep" / "run"))
    finally:
        os.umask(old)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "logs").stat().st_mode) == 0o700
    assert {stat.S_IMODE((folder / name).stat().st_mode) for name in ("config.yaml", ".lock")} == {0o600}
    assert compose.load(folder / "config.yaml") == asking(tmp_path / "deep" / "run")
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "config.yaml", "logs"]


def test_a_folder_that_holds_a_run_is_taken_to_resume_and_refused_by_name_to_start_anew(tmp_path: Path) -> None:
    folder = made(asking(tmp_path / "run"))
    assert made(asking(folder)) == folder
    with pytest.raises(ConfigError, match=f"run.dir={folder}.*checkpoint.resume=never"):
        refuse_early(asking(folder, resume="never"))
    with pytest.raises(ConfigError, match=f"run.dir={folder}"):
        made(asking(folder, resume="never"))
    (tmp_path / "empty").mkdir()
    assert made(asking(tmp_path / "empty", resume="never")) == tmp_path / "empty"


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for wrong in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="run.dir="):
            made(asking(wrong))
    assert (tmp_path / "file").read_text() == "mine"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_in_use_is_refused_by_the_name_of_its_user_and_left_as_it_is(tmp_path: Path) -> None:
    folder, lock = make_run_folder(asking(tmp_path / "run"))
    before = contents(folder)
    other = dataclasses.replace(asking(folder), remat="full")
    for refuses in (refuse_early, make_run_folder):
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()} on host {socket.gethostname()}; wait"):
            refuses(other)
    assert contents(folder) == before
    lock.release()
    refuse_early(other)
    assert compose.load(made(other) / "config.yaml").remat == "full"


def test_looking_whether_a_folder_is_in_use_makes_nothing(tmp_path: Path) -> None:
    refuse_early(asking(tmp_path))
    refuse_early(asking(tmp_path / "new"))
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    assert made(asking(tmp_path / "run")) == tmp_path / "run"
    assert "no locks on this file system (No locks available)" in capsys.readouterr().err


def test_the_folder_of_a_killed_launcher_is_free_when_its_ranks_are_gone(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    rank = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    reaper = Reaper(lock.descriptors).__enter__()
    reaper.watch([rank.pid])
    os.close(lock.descriptors[0])  # what the death of the launcher does first
    with pytest.raises(ConfigError, match="in use by process"):
        FolderLock(tmp_path)
    assert reaper._process.stdin is not None
    reaper._process.stdin.close()
    assert reaper._process.wait(10) == 0
    assert rank.wait(0.1) == -signal.SIGKILL
    FolderLock(tmp_path).release()
