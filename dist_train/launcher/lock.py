"""Exclusive use of a run folder, by a lock of the kernel: it ends with the processes that hold it, however they die."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from pathlib import Path

from dist_train.config.compose import ConfigError

NAME = ".lock"


class FolderLock:
    """Held from construction to `release` (or the end of a `with`), at the latest until this process and every process that
    inherited one of `descriptors` have died. The file stays and says who held it last.

    Raises ConfigError naming the holder when another process has the folder, of which nothing is changed then, and OSError
    where the file cannot be made. A file system that has no locks is warned of and trusted.
    """

    def __init__(self, folder: Path) -> None:
        descriptor = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o600)
        self.descriptors: tuple[int, ...] = (descriptor,)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "another process"
            self._close()
            raise ConfigError(f"run.dir={folder}: in use by {holder}; wait for its end, or set another run.dir.") from None
        except OSError as error:
            self._close()
            what = f"no locks on this file system ({error.strerror}): see to it that no other run uses the folder"
            print(f"warning: {folder}: {what}", file=sys.stderr)
            return
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on host {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Give the folder back, also on behalf of the processes that inherited the lock. Again is harmless."""
        for descriptor in self.descriptors:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        self._close()

    def _close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = ()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
