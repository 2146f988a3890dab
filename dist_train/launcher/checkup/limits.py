"""What the system grants this process: open files, locked memory, shared memory, memory and cores.

Every verdict is a pure function of what was read; `limits` reads and judges.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from dist_train.launcher.checkup.check import BAD, OK, WARN, Check, bytes_text

GIB = 2**30
GROUPS = 6  # a rank of a 3-axis mesh is in about as many groups, and has a socket to each other rank of each
OWN_FILES = 256  # Python, torch, data and logs, rounded up
UNLIMITED = math.inf


def limits(world: int, devices: int) -> list[Check]:
    """Everything of this file for a run of `world` ranks on a node with `devices` accelerators."""
    soft = {name: _soft(number) for name, number in _NUMBERS.items()}
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    rdma = os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband"))
    pattern = _read(Path("/proc/sys/kernel/core_pattern")).strip()
    return [
        shared_memory(shm.f_frsize * shm.f_blocks if shm else 0, shm.f_frsize * shm.f_bavail if shm else 0, devices),
        open_files(soft["nofile"], world),
        locked_memory(soft["memlock"], rdma),
        processes(soft["nproc"]),
        core_files(soft["core"], pattern.startswith("|")),
        memory(available_memory(), memory_limit()),
        cores(len(os.sched_getaffinity(0)), cpu_quota(), os.environ.get("OMP_NUM_THREADS", "")),
    ]


_NUMBERS = {
    "nofile": resource.RLIMIT_NOFILE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nproc": resource.RLIMIT_NPROC,
    "core": resource.RLIMIT_CORE,
}


def shared_memory(size: float, free: float, devices: int) -> Check:
    value = f"{bytes_text(free)} free of {bytes_text(size)}"
    remedy = (
        "NCCL and data workers of one node exchange through it, and a full one ends ranks with SIGBUS: start the container with "
        "--shm-size=8g or --ipc=host, or mount -o remount,size=8g /dev/shm"
    )
    if free >= GIB:
        return Check("shared memory /dev/shm", OK, value)
    return Check("shared memory /dev/shm", BAD if devices > 1 and free < GIB / 8 else WARN, value, remedy)


def open_files(soft: float, world: int) -> Check:
    needed = OWN_FILES + GROUPS * world
    value = f"{_count(soft)} (nofile); {world} ranks need about {needed}"
    remedy = f"ulimit -n {max(65536, needed)} (in Slurm: PropagateResourceLimitsExcept=NOFILE, or the limit of slurmd)"
    if soft >= max(4096, needed):
        return Check("open files", OK, value)
    return Check("open files", BAD if soft < needed else WARN, value, remedy)


def locked_memory(soft: float, rdma: bool) -> Check:
    value = f"{_size(soft)} (memlock){'' if rdma else '; no RDMA device needs it'}"
    if soft == UNLIMITED or not rdma:
        return Check("locked memory", OK, value)
    return Check("locked memory", BAD, value, "InfiniBand registers its buffers by locking them: ulimit -l unlimited")


def processes(soft: float) -> Check:
    value = f"{_count(soft)} (nproc)"
    if soft >= 4096:
        return Check("processes", OK, value)
    return Check("processes", WARN, value, "threads count, and each rank has tens of them: ulimit -u 65536")


def core_files(soft: float, piped: bool) -> Check:
    value = f"{'none' if soft == 0 else _size(soft)} (core){', to a program' if piped else ''}"
    if soft < 10 * GIB or piped:
        return Check("core files", OK, value)
    return Check("core files", WARN, value, "a rank that crashes writes its whole memory where it runs: ulimit -c 0")


def memory(available: float, limit: float) -> Check:
    """`limit`: of the cgroup, infinite without one."""
    value = f"{bytes_text(available)} available" + ("" if limit == UNLIMITED else f", cgroup limit {bytes_text(limit)}")
    if min(available, limit) >= 2 * GIB:
        return Check("memory", OK, value)
    return Check("memory", WARN, value, "a rank takes 0.5 GiB before any model: ask for more (--mem), or end what else runs here")


def cores(allowed: int, quota: float, threads: str) -> Check:
    value = f"{allowed} to run on" + ("" if quota == UNLIMITED else f", cgroup quota {quota:g}")
    if quota >= allowed or threads:
        return Check("cores", OK, value + (f", OMP_NUM_THREADS={threads}" if threads else ""))
    enough = max(1, math.floor(quota))
    return Check("cores", WARN, value, f"threads beyond the quota are stopped in turns: export OMP_NUM_THREADS={enough}")


def available_memory() -> float:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    return UNLIMITED


def memory_limit(root: Path = Path("/sys/fs/cgroup"), membership: str | None = None) -> float:
    """Bytes that the cgroups of this process allow, of version 2 or 1; infinite without a limit."""
    found = [_number(_read(folder / "memory.max")) for folder in _folders(root, "", membership)]
    found += [_number(_read(folder / "memory.limit_in_bytes")) for folder in _folders(root, "memory", membership)]
    least = min(found, default=UNLIMITED)
    return least if least < 2**60 else UNLIMITED  # version 1 writes "no limit" as the largest page count


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), membership: str | None = None) -> float:
    """Cores' worth of time that the cgroups of this process allow; infinite without a limit."""
    found = []
    for folder in _folders(root, "", membership):
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            found.append(_number(words[0]) / _number(words[1]))
    for folder in _folders(root, "cpu", membership):
        quota, period = _number(_read(folder / "cpu.cfs_quota_us")), _number(_read(folder / "cpu.cfs_period_us"))
        if 0 < quota < UNLIMITED and period < UNLIMITED:
            found.append(quota / period)
    return min(found, default=UNLIMITED)


def _folders(root: Path, controller: str, membership: str | None) -> Iterator[Path]:
    """The folders of this process's cgroup and all above it, which limit it too; in a container only the root may be there."""
    text = _read(Path("/proc/self/cgroup")) if membership is None else membership
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            base = root / controller
            inner = base / path.lstrip("/")
            yield from (folder for folder in (inner, *inner.parents) if folder == base or base in folder.parents)


def _soft(number: int) -> float:
    soft, _ = resource.getrlimit(number)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return UNLIMITED  # absent, or "max"


def _count(value: float) -> str:
    return "unlimited" if value == UNLIMITED else f"{value:.0f}"


def _size(value: float) -> str:
    return "unlimited" if value == UNLIMITED else bytes_text(value)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
