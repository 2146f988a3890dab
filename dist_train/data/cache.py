"""The folder of prepared files: private, one writer per entry, complete or not there.

tokens/<key>/           a prepared corpus
tokens/<key>.partial/   the work of a prepare that goes on or was interrupted
tokenizers/<key>.json   a trained tokenizer
locks/<key>             held while an entry is made; gone afterwards
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from dist_train.config.compose import ConfigError


def default_folder() -> Path:
    """`dist_train` in the user's cache folder (XDG base directory specification)."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "dist_train"


def open_private(path: Path, mode: str) -> IO[Any]:
    """Open for writing a file that only the user can read."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600))


def write_private(path: Path, content: bytes) -> None:
    """Replace a file in one step; after a crash it is the old one or the new one."""
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with open_private(aside, "wb") as file:
        file.write(content)
        flush(file)
    os.replace(aside, path)


def flush(file: IO[Any]) -> None:
    """To the disk, not only to the system."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Make renames in this folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class Cache:
    """Paths and locks of a cache folder, which is made (0700) when something is written."""

    def __init__(self, folder: str | Path = "") -> None:
        self.folder = Path(folder).expanduser() if folder else default_folder()

    def entry(self, key: str) -> Path:
        return self.folder / "tokens" / key

    def partial(self, key: str) -> Path:
        return self.folder / "tokens" / f"{key}.partial"

    def tokenizer(self, key: str) -> Path:
        return self.folder / "tokenizers" / f"{key}.json"

    def make(self, folder: Path) -> None:
        """A folder within the cache, with those above it. Raises ConfigError where it cannot be made."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            for part in [*reversed(folder.relative_to(self.folder).parents), folder.relative_to(self.folder)]:
                (self.folder / part).mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(
                f"{error.filename}: cannot be made ({error.strerror}); set data.cache_dir to a folder you can write to."
            ) from error

    @contextlib.contextmanager
    def lock(self, key: str, progress: bool = False) -> Iterator[None]:
        """Held by one process at a time; the system lets go of it when its owner dies, however it dies."""
        path = self.folder / "locks" / key
        handle = self._acquire(path, progress)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # still held: whoever waits sees that its file is gone, and makes a new one
            os.close(handle)

    def _acquire(self, path: Path, progress: bool) -> int:
        while True:
            self.make(path.parent)
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            except FileNotFoundError:  # the folder was tidied away in between
                continue
            except OSError as error:
                raise ConfigError(
                    f"{path}: cannot be written ({error.strerror}); set data.cache_dir to a folder you can write to."
                ) from error
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if progress:
                    print("waiting for another process that prepares the same data", file=sys.stderr)
                fcntl.flock(handle, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError):
                if os.fstat(handle).st_ino == os.stat(path).st_ino:
                    return handle
            os.close(handle)

    @contextlib.contextmanager
    def undone_on_bad_input(self) -> Iterator[list[Path]]:
        """Yields a list: paths put there are removed when the block raises ConfigError, and folders left empty with them."""
        existed = self.folder.exists()
        made: list[Path] = []
        try:
            yield made
        except ConfigError:
            for path in made:
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            emptied = [self.folder / name for name in ("locks", "tokenizers", "tokens")]
            for folder in emptied if existed else [*emptied, self.folder]:
                with contextlib.suppress(OSError):  # absent, or somebody else's files are in it
                    folder.rmdir()
            raise
