"""What this machine is made of: versions, devices and their driver, the clock; and the whole of what a rank tells of itself."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dist_train.launcher.checkup.check import BAD, OK, WARN, Check, shown_environment
from dist_train.launcher.checkup.limits import limits
from dist_train.launcher.checkup.network import network
from dist_train.launcher.checkup.storage import storage

PACKAGES = ("hydra-core", "safetensors", "numpy", "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "deepspeed", "wandb")
ABSENT = "not installed"
_PACKAGE = Path(__file__).resolve().parents[2]
_ADJTIMEX_BYTES, _TIME_ERROR = 256, 5
_SPEED_SECONDS = 0.1  # for each device


@dataclass(frozen=True)
class Report:
    """What one rank found where it runs. Plain values, so that it travels as JSON."""

    host: str
    versions: dict[str, str]
    devices: list[str]
    environment: dict[str, str]
    checks: list[Check]
    gflops: dict[str, float] = field(default_factory=dict)  # by device: what a matrix product reaches
    sees_run_dir: bool = True  # the file that rank 0 put there

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Report:
        return cls(**{**plain, "checks": [Check(**each) for each in plain["checks"]]})


def examine(
    run_dir: Path | None, peer: str = "", world: int = 1, first: bool = True, env: Mapping[str, str] = os.environ
) -> Report:
    """Look at everything that one rank can see. `peer`: a host of the same job, "" for none; `run_dir` is written to.

    `first`: of the ranks on its host. The others leave disk and devices alone, whose speed they would only spoil.
    """
    import torch

    count = torch.cuda.device_count()
    nodes = [each.name for each in Path("/dev").glob("nvidia[0-9]*")] if os.path.isdir("/dev") else []
    checks = [
        accelerators(count, len(nodes), torch.version.cuda, env.get("CUDA_VISIBLE_DEVICES")),
        *limits(world, count),
        *network(peer, env),
        *(storage(run_dir) if run_dir is not None and first else []),
        clock(_clock_state()),
    ]
    speeds = _speeds() if first else {}
    return Report(socket.gethostname(), versions(), devices(), shown_environment(env), checks, speeds)


def versions() -> dict[str, str]:
    """Name and version of all that ranks must agree on, and of optional packages; checksums of our own code and kernels."""
    import torch

    from dist_train import __version__
    from dist_train.ops import library

    found = {
        "dist_train": __version__,
        "dist_train code": _checksum(sorted(_PACKAGE.rglob("*.py"))),
        "kernels": _checksum([library.PATH]) if library.loaded else "none",
        "python": platform.python_version(),
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})",
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.version.cuda else "none: torch is built without CUDA",
        "driver": driver(_read(Path("/proc/driver/nvidia/version"))),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = ABSENT
    return found


def devices() -> list[str]:
    import torch

    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    found = [f"cpu: {platform.machine()}, {threads}"]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        memory, kind = f"{facts.total_memory / 2**30:.0f} GiB", f"compute capability {facts.major}.{facts.minor}"
        found.append(f"cuda:{index}: {facts.name}, {memory}, {kind}")
    return found


def driver(text: str) -> str:
    """From /proc/driver/nvidia/version: `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue …`."""
    numbers = [word for word in text.partition("\n")[0].split() if word[:1].isdigit() and "." in word]
    return numbers[0] if numbers else "none"


def accelerators(seen: int, present: int, cuda: str | None, visible: str | None) -> Check:
    """`present`: device files of NVIDIA's driver; `seen`: what torch can use of them."""
    value = f"{seen} usable of {present}"
    if seen or not present:
        return Check("accelerators", OK, value if present else f"{seen} (CPU only)" if not seen else str(seen))
    if cuda is None:
        return Check("accelerators", WARN, value, "this torch is a CPU build: install one that is built for CUDA")
    if visible is not None:
        return Check("accelerators", WARN, value, f"CUDA_VISIBLE_DEVICES={visible!r} hides them: unset it")
    return Check("accelerators", BAD, value, f"the driver is older than CUDA {cuda} needs, or does not answer: see nvidia-smi")


def clock(state: int | None) -> Check:
    """`state` of adjtimex(2); None where it cannot be asked."""
    value = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    if state is None or state != _TIME_ERROR:
        return Check("clock", OK, value + ("" if state is None else ", kept by NTP"))
    remedy = "logs and file times of several hosts will disagree: start chrony or ntpd"
    return Check("clock", WARN, f"{value}, not kept by NTP", remedy)


def _clock_state() -> int | None:
    try:
        return int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_ADJTIMEX_BYTES)))  # zeroes: only asks
    except (OSError, AttributeError):
        return None


def _speeds() -> dict[str, float]:
    """GFLOP/s of a matrix product on the CPU (fp32) and on each device (bf16): one slow rank holds all others up."""
    import torch

    found = {"cpu": _speed(torch.ones(512, 512), lambda: None)}
    for index in range(torch.cuda.device_count()):
        square = torch.ones(4096, 4096, dtype=torch.bfloat16, device=f"cuda:{index}")
        found[f"cuda:{index}"] = _speed(square, partial(torch.cuda.synchronize, index))
    return found


def _speed(square: Any, finish: Callable[[], None]) -> float:
    square @ square  # the first one sets things up
    finish()
    best, end = float("inf"), time.perf_counter() + _SPEED_SECONDS
    while (begin := time.perf_counter()) < end:
        square @ square
        finish()
        best = min(best, time.perf_counter() - begin)
    return 2 * square.shape[0] ** 3 / best / 1e9


def _checksum(files: list[Path]) -> str:
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
