"""`dist-train doctor`: what is installed, which devices there are, and which kernels will run on them, with the reason."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from dist_train.ops.attention.select import Machine

HELP = """usage: dist-train doctor

Versions, devices, the fused kernels of this installation, and which attention kernel serves what (attention=auto) and why.
"""
PIPED_WIDTH = 160  # columns when the output is no terminal
PACKAGES = ("hydra-core", "safetensors", "numpy", "triton", "flash-attn", "flash-attn-3", "flash-attn-4", "deepspeed", "wandb")
HEAD_WIDTH = 64  # of the attention that is asked about
CASES = (  # name, kind, dropout, whether the log-sum-exp is wanted
    ("training, one document a row", "causal", 0.0, False),
    ("training, packed documents", "packed", 0.0, False),
    ("the same with dropout", "packed", 0.1, False),
    ("decoding", "full", 0.0, False),
    ("context parallelism", "causal", 0.0, True),
)


def main(argv: list[str]) -> int:
    """Exit code 0. Raises ConfigError for an argument, of which there are none."""
    if any(word in ("-h", "--help") for word in argv):
        print(HELP, end="")
        return 0
    if argv:
        from dist_train.config.compose import ConfigError

        raise ConfigError(f"dist-train doctor {argv[0]}: it takes no argument.")
    import torch
    from rich.console import Console

    from dist_train.ops.attention.select import this_machine

    console = Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)
    console.print(_table("Versions", ("what", "version"), versions()))
    console.print(_table("Devices", ("device", "what it is"), devices()))
    console.print(_table("Fused kernels (csrc)", ("for", "state"), fused_kernels()))
    for kind in ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",):
        headers = ("case", "dtype", "runs", "why not those before it")
        title = f"Attention on {kind} (attention=auto, heads {HEAD_WIDTH} wide)"
        console.print(_table(title, headers, attention_rows(this_machine(torch.device(kind)))))
    return 0


def versions() -> Iterator[tuple[str, str]]:
    """Package and version of all that matters; "not installed" for optional ones."""
    import torch

    from dist_train import __version__

    yield "dist_train", __version__
    yield "python", platform.python_version()
    yield "torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"


def devices() -> Iterator[tuple[str, str]]:
    import torch

    threads = f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    yield "cpu", f"{platform.machine()}, {threads}"
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        yield (
            f"cuda:{index}",
            f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, compute capability {facts.major}.{facts.minor}",
        )


def fused_kernels() -> Iterator[tuple[str, str]]:
    """For each device: what will run there, or why nothing will."""
    from dist_train.ops import library

    if not library.loaded:
        yield "cpu, cuda", f"missing, so torch's own operations run: {library.missing}"
        return
    yield "cpu", library.cpu_isa()
    yield "cuda", "built" if library.has_cuda else "not built: there was no nvcc; torch's own operations run"


def attention_rows(machine: Machine) -> Iterator[tuple[str, str, str, str]]:
    """Case, dtypes, backend and reason on this machine."""
    import torch

    from dist_train.ops.attention.select import Request, choose
    from dist_train.ops.native import is_native

    for name, kind, dropout, lse in CASES:
        for dtypes, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
            choice = choose(Request(dtype, HEAD_WIDTH, kind, dropout, lse), machine)
            wide = choice.backend == "cpu_flash" and not is_native(dtype)
            yield name, dtypes, choice.backend + (" in fp32" if wide else ""), choice.reason


def _table(title: str, headers: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for header in headers:
        table.add_column(header)
    for row in rows:
        table.add_row(*row)
    return table
