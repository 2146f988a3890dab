"""The folders of a run's checkpoints: a checkpoint is under its final name, whole, or it is not seen.

    step_00000100                 a committed checkpoint
    step_00000100.tmp-1f3a…       being written, or left by a writer that died; its writer holds an advisory lock on it
    step_00000100.old-1f3a…       the earlier checkpoint of the same step, for the instant in which a new one takes its place

One process commits into one root at a time (index 0 of the group that saves). A new checkpoint of a step that exists
replaces it: a resumed run writes what it computed now. Two renames do that; a kill between them leaves the earlier one
under `.old-`, where `steps` finds it and the next `sweep` puts it back.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger("dist_train.checkpoint")
_STEP = re.compile(r"step_(\d+)")
_ASIDE = re.compile(r"step_(\d+)\.(tmp|old)-[0-9a-f]+")


def step_name(step: int) -> str:
    return f"step_{step:08d}"


def steps(root: Path) -> dict[int, Path]:
    """Committed checkpoints by step, in order of the number; whether they are whole is not looked at."""
    found: dict[int, Path] = {}
    for path in _folders(root):
        match, aside = _STEP.fullmatch(path.name), _ASIDE.fullmatch(path.name)
        if match and (int(match[1]) not in found or path.name == step_name(int(match[1]))):
            found[int(match[1])] = path
        elif aside and aside[2] == "old":
            found.setdefault(int(aside[1]), path)
    return dict(sorted(found.items()))


@dataclass(frozen=True)
class Staging:
    """A folder being filled. `close` gives up the lock that tells it from a dead writer's; the folder itself stays."""

    path: Path
    lock: int

    def close(self) -> None:
        # Unlocked by hand: a process forked in the meantime holds the descriptor too.
        with contextlib.suppress(OSError):
            fcntl.flock(self.lock, fcntl.LOCK_UN)
        os.close(self.lock)


def stage(root: Path, step: int) -> Staging:
    """Make the private (0700) folder into which all ranks write this step. Raises OSError."""
    os.makedirs(root, mode=0o700, exist_ok=True)
    path = root / f"{step_name(step)}.tmp-{secrets.token_hex(4)}"
    os.mkdir(path, mode=0o700)
    lock = os.open(path, os.O_RDONLY)
    _try_lock(lock)
    return Staging(path, lock)


def commit(staged: Path, step: int) -> Path:
    """Make a filled folder visible under its final name, durably. Raises OSError, and then everything is as before.

    A checkpoint that it replaces stays under `.old-` until the next `sweep`.
    """
    final = staged.parent / step_name(step)
    sync(staged)
    undo: list[tuple[Path, Path]] = []
    try:
        if final.exists():
            old = final.with_name(f"{final.name}.old-{secrets.token_hex(4)}")
            os.rename(final, old)
            undo.append((old, final))
        os.rename(staged, final)
        undo.append((final, staged))
        sync(final.parent)
    except OSError:
        for now, before in reversed(undo):
            os.rename(now, before)
        raise
    return final


def discard(path: Path) -> None:
    """Remove a checkpoint folder: first out of sight by rename, then its files, so that no half of it is ever found."""
    aside = _ASIDE.fullmatch(path.name)
    if not aside or aside[2] != "tmp":
        hidden = path.with_name(f"{path.name.partition('.')[0]}.tmp-{secrets.token_hex(4)}")
        os.rename(path, hidden)
        path = hidden
    shutil.rmtree(path)


def sweep(root: Path) -> None:
    """Clean up after writers that died: remove what they left unfinished, put back what they had set aside."""
    for path in _folders(root):
        aside = _ASIDE.fullmatch(path.name)
        if not aside:
            continue
        try:
            if aside[2] == "old" and steps(root).get(int(aside[1])) == path:
                os.rename(path, root / step_name(int(aside[1])))
            elif aside[2] == "old" or not _in_use(path):
                discard(path)
        except OSError as error:
            logger.warning("%s: left by an unfinished save and not removable (%s)", path, error)


def sync(folder: Path) -> None:
    """fsync a folder: its entries (names of files in it, renames) survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _folders(root: Path) -> list[Path]:
    try:
        return sorted(p for p in root.iterdir() if p.name.startswith("step_") and p.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _try_lock(descriptor: int) -> bool:
    # Some network file systems cannot lock folders: there every `.tmp-` folder counts as dead, which is right as long as
    # one process commits into one root at a time.
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _in_use(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return not _try_lock(descriptor)
    finally:
        os.close(descriptor)
