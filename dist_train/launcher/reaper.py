"""Ends what a launcher that was killed leaves behind: the ranks' own children, which no signal to a rank reaches.

The launcher writes the process groups of its ranks to this process, one a line, and `done` when they have ended. When the
pipe closes before that, the launcher is dead and every group is killed. Standard library only: `python -I -S reaper.py`
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType


class Reaper:
    """The launcher's end of the pipe; a context whose exit says that all ranks have ended."""

    def __enter__(self) -> Reaper:
        command = [sys.executable, "-I", "-S", str(Path(__file__).resolve())]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
