"""What holds for the CUDA kernels of every op: any order of warps, sanitizers, and that each barrier is needed.

An op takes part through `tests/csrc/test_<op>.py: quick_check(kernels)`; also with `WRONG_TAIL`, a file and a text in it whose
replacement makes a kernel write or read past its tensors.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.csrc.harness import CSRC, GUARDED, MISSING, QUICK, SANITISED, Kernels, build

FOLDERS = sorted(source.parent.name for source in CSRC.glob("*/*_cuda.cu"))
OPS = [op for op in FOLDERS if (Path(__file__).parent / f"test_{op}.py").exists()]
BARRIER = re.compile(r"__syncthreads\(\);")
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def module(op: str):
    return importlib.import_module(f"tests.csrc.test_{op}")


def barriers() -> list[tuple[str, int]]:
    """(file below csrc, which of its barriers)."""
    files = sorted(file for ending in ("cuh", "cu") for file in CSRC.rglob(f"*.{ending}"))
    return [(str(file.relative_to(CSRC)), i) for file in files for i in range(len(BARRIER.findall(file.read_text())))]


def changed_copy(tmp_path: Path, file: str, change) -> Path:
    folder = tmp_path / "csrc"
    shutil.copytree(CSRC, folder)
    text = (folder / file).read_text()
    changed = change(text)
    assert changed != text
    (folder / file).write_text(changed)
    return folder


def users(file: str) -> list[str]:
    """The ops that a file belongs to or, for one of common/, that include it."""
    folder, name = file.split("/")
    if folder != "common":
        return [folder]
    return [op for op in OPS if any(f"common/{name}" in source.read_text() for source in (CSRC / op).glob("*.cu*"))]


def test_every_op_takes_part():
    assert OPS == FOLDERS and all(hasattr(module(op), "quick_check") for op in OPS)


@pytest.mark.parametrize("op", OPS)
def test_any_order_of_warps(op):
    kernels = Kernels(build(only=op))
    for _ in kernels.orders():
        module(op).quick_check(kernels)


@pytest.mark.parametrize("file, which", barriers())
def test_every_barrier_is_needed(tmp_path, file, which):
    def without(text: str) -> str:
        found = list(BARRIER.finditer(text))[which]
        return text[: found.start()] + ";" + text[found.end() :]

    folder = changed_copy(tmp_path, file, without)
    for op in users(file):
        kernels = Kernels(build(QUICK, folder, op))
        for _ in kernels.orders():
            try:
                module(op).quick_check(kernels)
            except (AssertionError, RuntimeError):
                kernels.order(0)
                return
    raise AssertionError(f"nothing differs without barrier {which} of {file}: remove it, or let quick_check take its path")


def sanitised(library: Path, op: str) -> subprocess.CompletedProcess[str]:
    """quick_check of one op in a process of its own, into which the sanitizer is loaded first."""
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    environment = {**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"}
    code = f"from tests.csrc import test_{op} as t, harness; t.quick_check(harness.Kernels(harness.Path({str(library)!r})))"
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, cwd=CSRC.parent, capture_output=True, text=True, timeout=250)


@pytest.mark.parametrize("op", OPS)
def test_sanitizers_are_silent(op):
    done = sanitised(build(SANITISED, only=op), op)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("op", [op for op in OPS if hasattr(module(op), "WRONG_TAIL")])
def test_an_overrun_is_caught(tmp_path, op):
    file, right, wrong = module(op).WRONG_TAIL
    done = sanitised(build(GUARDED, changed_copy(tmp_path, file, lambda text: text.replace(right, wrong)), op), op)
    assert done.returncode != 0 and re.search("heap-buffer-overflow|global-buffer-overflow", done.stderr), done.stderr[-4000:]
