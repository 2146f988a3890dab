"""Where the output of ranks goes: files by global rank, shown on the terminal line by line under the rank's number."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from dist_train.launcher import guard

SHOWN_LINES = 20
_TAIL_BYTES = 64 * 1024
_POLL_SECONDS = 0.05


class RankLogs(LogsSpecs):
    """The files of this node's ranks, written by the ranks themselves (append: a restart goes on in the same file).

    `tee`: every rank writes `rank_00003.out` and `rank_00003.err`. Otherwise rank 0 keeps the terminal and the others
    write `rank_00003.log`. `scratch` takes the error files; `env` is added to the environment of every rank.
    """

    def __init__(self, folder: Path, scratch: Path, env: Mapping[str, str], tee: bool) -> None:
        super().__init__(str(folder))
        self.folder, self.scratch, self.env, self.tee = folder, scratch, dict(env), tee
        self.files: dict[int, tuple[str, str]] = {}  # global rank -> (out, err), "" for the terminal
        self._started_at: dict[str, int] = {}

    @property
    def root_log_dir(self) -> str:
        return str(self.folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Elastic's hook before it starts the ranks of an attempt: `envs` (local rank -> environment) is completed in place."""
        errors = {}
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            out, err = self.files[rank] = self._files_of(rank)
            for name in {out, err} - {""}:
                self._started_at.setdefault(name, os.path.getsize(name) if os.path.exists(name) else 0)
            errors[local_rank] = str(self.scratch / f"error_{rank:05d}_{env['TORCHELASTIC_RESTART_COUNT']}.json")
            env.update(self.env)
            env[guard.LAUNCHER] = str(os.getpid())
            env[guard.OUT], env[guard.ERR] = out, err
            env["TORCHELASTIC_ERROR_FILE"] = errors[local_rank]
        terminal = dict.fromkeys(envs, "")
        return LogsDest(stdouts=terminal, stderrs=dict(terminal), error_files=errors)

    def start_of(self, name: str) -> int:
        """Bytes that the file held before this job."""
        return self._started_at.get(name, 0)

    def last_lines(self, rank: int) -> tuple[list[str], str]:
        """The last lines that this rank wrote in this job and the file that holds them: of standard error, else of output."""
        for name in reversed(self.files.get(rank, ("", ""))):
            if name and (lines := last_lines(name, self.start_of(name))):
                return lines, name
        return [], ""

    def _files_of(self, rank: int) -> tuple[str, str]:
        stem = self.folder / f"rank_{rank:05d}"
        if self.tee:
            return f"{stem}.out", f"{stem}.err"
        return ("", "") if rank == 0 else (f"{stem}.log", f"{stem}.log")


class Tee(threading.Thread):
    """Copies what ranks write to the terminal in whole lines, each under `[rank 3]`. A context; leaving it copies the rest."""

    def __init__(self, logs: RankLogs, out: BinaryIO, err: BinaryIO) -> None:
        super().__init__(name="tee", daemon=True)
        self._logs, self._streams = logs, (out, err)
        self._read: dict[str, int] = {}
        self._rest: dict[str, bytes] = {}
        self._ended = threading.Event()

    def __enter__(self) -> Tee:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        while not self._ended.wait(_POLL_SECONDS):
            self._copy(last=False)
        self._copy(last=True)

    def _copy(self, last: bool) -> None:
        for rank, names in sorted(self._logs.files.items()):
            for name, stream in zip(names, self._streams, strict=True):
                if name and os.path.exists(name):
                    self._copy_file(f"[rank {rank}] ".encode(), name, stream, last)

    def _copy_file(self, prefix: bytes, name: str, stream: BinaryIO, last: bool) -> None:
        with open(name, "rb") as file:
            file.seek(self._read.get(name, self._logs.start_of(name)))
            data = file.read()
            self._read[name] = file.tell()
        lines = (self._rest.get(name, b"") + data).split(b"\n")
        self._rest[name] = lines.pop()
        if last and self._rest[name]:
            lines.append(self._rest[name])
        if lines:
            try:
                stream.write(b"".join(prefix + line + b"\n" for line in lines))
                stream.flush()
            except OSError:
                pass  # the terminal or the pipe is gone: the files go on


def last_lines(name: str, start: int = 0) -> list[str]:
    """The last lines of a file that are not empty, from byte `start` on; none where it cannot be read."""
    try:
        with open(name, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(start, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-SHOWN_LINES:]
