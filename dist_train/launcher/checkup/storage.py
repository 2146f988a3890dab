"""The disk of a run folder: room, speed of what reaches it, and whether every host sees the same folder."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

from dist_train.launcher.checkup.check import BAD, OK, WARN, Check, bytes_text

_BLOCK = 4 * 2**20
_MOST_BYTES, _MOST_SECONDS = 64 * 2**20, 1.0
_FILES = 20  # small ones: a checkpoint and its manifest are made of renames
_GIB = 2**30


def storage(run_dir: Path) -> list[Check]:
    """Room and speed of the file system that `run_dir` is or will be on. Writes up to 64 MiB there and removes it."""
    folder = run_dir.expanduser().absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    name = f"run folder {run_dir}"
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return [Check(name, BAD, f"{folder} cannot be written", "set run.dir to a folder that you may write")]
    facts = os.statvfs(folder)
    where = "" if folder == run_dir.absolute() else f"{folder}, "
    found = [room(name, where, filesystem(folder), facts.f_frsize * facts.f_bavail, facts.f_favail, facts.f_files)]
    try:
        speed, seconds = _speed(folder)
    except OSError as error:
        remedy = "see the disk's state, its quota and the system's log"
        return [*found, Check("writing", BAD, f"failed: {error.strerror}", remedy)]
    return [*found, writing(speed, seconds)]


def room(name: str, where: str, kind: str, free: float, free_inodes: int, inodes: int) -> Check:
    value = f"{where}{kind}, {bytes_text(free)} free"
    if inodes and free_inodes < 10_000:
        state = BAD if free_inodes < 100 else WARN
        return Check(name, state, f"{value}, {free_inodes} inodes left", "remove files, or set run.dir elsewhere")
    if free < 10 * _GIB:
        remedy = "a checkpoint takes up to 16 bytes per parameter: make room, set run.dir elsewhere, or checkpoint.keep=1"
        return Check(name, BAD if free < _GIB else WARN, value, remedy)
    if kind == "tmpfs":
        return Check(name, WARN, value, "it is memory, and gone after a reboot: set run.dir to a disk")
    return Check(name, OK, value)


def writing(speed: float, small_seconds: float) -> Check:
    """`speed`: bytes per second until they are on the disk; `small_seconds`: for a small file, flushed and renamed."""
    value = f"{bytes_text(speed)}/s, a small file in {small_seconds * 1e3:.1f} ms (both flushed to the disk)"
    if speed >= 50 * 2**20 and small_seconds < 0.1:
        return Check("writing", OK, value)
    return Check("writing", WARN, value, "checkpoints will take long: set run.dir to a faster disk, or checkpoint.every higher")


def filesystem(folder: Path, mounts: str | None = None) -> str:
    """The type of the file system that holds this folder: ext4, nfs4, lustre …"""
    text = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
    best, kind = -1, "unknown file system"
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        point = left.split()[4].replace("\\040", " ")
        if (folder == Path(point) or Path(point) in folder.parents) and len(point) >= best:
            best, kind = len(point), right.split()[0]
    return kind


def _speed(folder: Path) -> tuple[float, float]:
    with tempfile.TemporaryDirectory(prefix=".doctor_", dir=folder) as scratch:
        block = os.urandom(_BLOCK)  # what a file system could compress would flatter it
        written, begin = 0, time.perf_counter()
        with open(Path(scratch, "large"), "wb") as file:
            while written < _MOST_BYTES and time.perf_counter() - begin < _MOST_SECONDS:
                written += file.write(block)
                os.fsync(file.fileno())
        speed = written / (time.perf_counter() - begin)
        begin, count = time.perf_counter(), 0
        while count < _FILES and (count == 0 or time.perf_counter() - begin < _MOST_SECONDS):
            with open(Path(scratch, "aside"), "wb") as file:
                file.write(b"{}\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(Path(scratch, "aside"), Path(scratch, f"small_{count}"))
            count += 1
        return speed, (time.perf_counter() - begin) / count
