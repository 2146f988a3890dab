"""nvcc compiles every kernel, and none keeps variables in memory for want of registers."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from tests.csrc.harness import CSRC

NVCC = shutil.which("nvcc", path="/usr/local/cuda/bin") or shutil.which("nvcc")
SOURCES = sorted(CSRC.glob("*/*_cuda.cu"))
KERNEL = re.compile(
    r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.S
)


@pytest.mark.skipif(NVCC is None, reason="there is no nvcc on this machine")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.parent.name)
def test_no_kernel_spills_registers(source, tmp_path):
    target = ["-arch=sm_90", "-cubin", "-o", str(tmp_path / "kernels.cubin")]
    command = [NVCC, "-std=c++17", "-O3", "-Xptxas", "-v", *target, str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = [(name, int(stores) + int(loads), int(registers)) for name, stores, loads, registers in KERNEL.findall(done.stderr)]
    assert kernels
    for name, spilled, registers in kernels:
        print(f"{registers:4} registers, {spilled} bytes spilled  {name}")
    assert not [name for name, spilled, _ in kernels if spilled]
