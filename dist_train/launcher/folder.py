"""The run folder: one per run, private to the user, decided once and handed to every rank."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path

from dist_train.config.compose import ConfigError, dump
from dist_train.config.schema import Config
from dist_train.launcher import lock
from dist_train.launcher.lock import FolderLock


def make_run_folder(config: Config, now: datetime | None = None) -> tuple[Path, FolderLock]:
    """Make, or for a given `run.dir` that exists take, the run folder; lock it and write `config.yaml` into it.

    Returns its absolute path and the lock, which the caller releases when no rank is left.

    Without `run.dir` the name is `runs/<date>_<time>`, with `_2`, `_3` … for the jobs of the same second: `mkdir` decides
    between jobs that start at once. A folder that another process uses is refused, and with `checkpoint.resume=never` one
    that holds a run. Raises ConfigError.
    """
    try:
        folder = _given(config) if config.run.dir else fresh(now)
        held = FolderLock(folder)
        try:
            (folder / "logs").mkdir(mode=0o700, exist_ok=True)
            _write(folder / "config.yaml", dump(config))
        except BaseException:
            held.release()
            raise
    except OSError as error:
        raise ConfigError(
            f"run.dir={config.run.dir or 'runs/…'}: the folder cannot be written ({error.strerror}: {error.filename}); "
            "set run.dir to a folder that you may write."
        ) from error
    return folder.resolve(), held


def holds_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.yaml", "metrics.jsonl", "checkpoints"))


def refuse_early(config: Config) -> None:
    """Raise ConfigError for a folder that `make_run_folder` would refuse, before data are prepared in vain."""
    _refuse_old_run(config)
    if config.run.dir and os.access(path := Path(config.run.dir).expanduser() / lock.NAME, os.R_OK | os.W_OK):
        FolderLock(path.parent).release()


def _refuse_old_run(config: Config) -> None:
    """Where `checkpoint.resume=never` meets a folder that holds a run: nothing of it may be overwritten."""
    if config.run.dir and config.checkpoint.resume == "never" and holds_run(Path(config.run.dir).expanduser()):
        raise ConfigError(
            f"run.dir={config.run.dir}: the folder holds a run and checkpoint.resume=never would overwrite it; "
            "set checkpoint.resume=auto to go on with it, or another run.dir."
        )


def _given(config: Config) -> Path:
    _refuse_old_run(config)
    folder = Path(str(config.run.dir)).expanduser()
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"run.dir={config.run.dir}: is a file; set run.dir to a folder.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def fresh_name(now: datetime | None = None) -> Path:
    return Path("runs") / f"{now or datetime.now():%Y-%m-%d_%H-%M-%S}"


def fresh(now: datetime | None = None) -> Path:
    """Make a new run folder, named after the time."""
    parent, name = fresh_name(now).parent, fresh_name(now).name
    parent.mkdir(mode=0o700, exist_ok=True)
    count = 1
    while True:
        folder = parent / (name if count == 1 else f"{name}_{count}")
        try:
            folder.mkdir(mode=0o700)
            return folder
        except FileExistsError:
            count += 1


def _write(path: Path, text: str) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    aside.replace(path)


def appears(file: Path, seconds: float) -> bool:
    """Whether a file that another host makes on a shared file system is seen here in so many seconds."""
    until = time.monotonic() + seconds
    while not file.is_file():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
