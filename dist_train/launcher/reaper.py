"""Ends what a launcher that was killed leaves behind: the ranks' own children, which no signal to a rank reaches.

The launcher writes the process groups of its ranks to this process, one a line, and `done` when they have ended. When the
pipe closes before that, the launcher is dead and every group is killed. Locks of the launcher that this process inherited
are free when it ends, which is when the ranks are gone. Standard library only: `python -I -S reaper.py`
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

_GONE_SECONDS = 10.0  # a killed rank can stay this long in the kernel, which is giving its memory back


class Reaper:
    """The launcher's end of the pipe; a context whose exit says that all ranks have ended. `held`: descriptors to inherit."""

    def __init__(self, held: tuple[int, ...] = ()) -> None:
        self._held = held

    def __enter__(self) -> Reaper:
        command = [sys.executable, "-I", "-S", str(Path(__file__).resolve())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, pass_fds=self._held
        )
        return self

    def watch(self, groups: Iterable[int]) -> None:
        """From now on these are the groups to end; the ones named before have ended."""
        self._send(["forget", *map(str, groups)])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._send(["done"])
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass
        self._process.wait()

    def _send(self, lines: list[str]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write("".join(f"{line}\n" for line in lines).encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # somebody ended the reaper; the ranks themselves still die with the launcher


def main() -> int:
    groups: list[int] = []
    for line in sys.stdin:
        word = line.strip()
        if word == "done":
            return 0
        groups = [] if word == "forget" else [*groups, int(word)]
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
    until = time.monotonic() + _GONE_SECONDS
    while any(map(_runs, groups)) and time.monotonic() < until:
        time.sleep(0.05)
    return 0


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
