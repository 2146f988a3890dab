"""Start `dist-train` as a user would, watch it from outside, and never leave a process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

MARK = "DIST_TRAIN_TEST_JOB"
CLI = [sys.executable, "-m", "dist_train.cli.main"]


@dataclass
class Job:
    process: subprocess.Popen[bytes]
    output: Path
    mark: str
    started: float = field(default_factory=time.monotonic)

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait(self, seconds: float = 120.0) -> int:
        return self.process.wait(seconds)

    def wait_for(self, words: str, count: int = 1, seconds: float = 100.0) -> None:
        until = time.monotonic() + seconds
        while self.text().count(words) < count:
            assert time.monotonic() < until, f"no {count} × {words!r} in {seconds} s:\n{self.text()}"
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {words!r}:\n{self.text()}"
            time.sleep(0.02)

    def alive(self) -> list[int]:
        """Every living process that inherited this job's mark: launcher, ranks, their children."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
                zombie = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if marked and not zombie:
                found.append(int(folder.name))
        return found

    def wait_until_gone(self, seconds: float = 10.0) -> None:
        until = time.monotonic() + seconds
        while left := self.alive():
            assert time.monotonic() < until, f"still alive {seconds} s later: {left}\n{self.text()}"
            time.sleep(0.05)


def _as_from_a_terminal() -> None:
    """nohup and background shells hand ignored signals down to the tests, which are not what a launcher should inherit here."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


@contextmanager
def job(folder: Path, *arguments: str, env: dict[str, str | None] | None = None) -> Iterator[Job]:
    """`dist-train ARGUMENTS…` in this folder; None in `env` takes a variable away. Whatever is left of it is killed."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"):
        environment.pop(name, None)
    for name, value in (env or {}).items():
        environment.pop(name, None)
        if value is not None:
            environment[name] = value
    output = folder / f"output_{mark}.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            [*CLI, *arguments], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            preexec_fn=_as_from_a_terminal,
        )  # fmt: skip
    running = Job(process, output, mark)
    try:
        yield running
    finally:
        for pid in running.alive():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.wait(10)


def run(folder: Path, *arguments: str, env: dict[str, str | None] | None = None, seconds: float = 120.0) -> tuple[int, str]:
    """Exit code and everything said, standard error included."""
    with job(folder, *arguments, env=env) as running:
        code = running.wait(seconds)
        running.wait_until_gone()
        return code, running.text()


def script(folder: Path, text: str, name: str = "script.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)
