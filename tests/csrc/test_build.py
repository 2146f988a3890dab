"""setup.py: what it looks for, what it says where something is missing, what it builds again; and the library it made."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dist_train.ops
import dist_train.optim  # registers the fake of a kernel too
from dist_train.ops import library
from tests.csrc.harness import CSRC

ROOT = CSRC.parent
GXX = shutil.which("g++")
needs_gxx = pytest.mark.skipif(GXX is None, reason="there is no g++ on this machine")


@pytest.fixture
def setup_py():
    spec = importlib.util.spec_from_file_location("setup_py", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_torch_is_found_by_path(setup_py):
    assert setup_py.find_torch() == Path(torch.__file__).parent


def test_without_torch_the_package_builds_without_kernels(tmp_path):
    """In an environment that has no torch: a warning that says what is missing and the remedy, and no library."""
    code = (
        "import importlib.util, runpy, sys\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest)\n"
        "import sysconfig\n"
        f"sysconfig.get_path = lambda *_: {str(tmp_path)!r}\n"
        f"sys.argv = ['setup.py', 'build_ext', '--build-lib', {str(tmp_path / 'lib')!r}]\n"
        "runpy.run_path('setup.py', run_name='__main__')\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "installs WITHOUT its fused kernels: no torch 2.11 or later in" in done.stdout + done.stderr
    assert "pip install --no-build-isolation" in done.stdout + done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_a_missing_compiler_is_named(setup_py, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(setup_py.Missing, match="CXX=no-such-compiler is not a program on PATH. Install"):
        setup_py.find_compiler()


def test_cuda_is_forced_and_left_out(setup_py, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("DIST_TRAIN_CUDA", raising=False)
    assert setup_py.find_nvcc() is None
    monkeypatch.setenv("DIST_TRAIN_CUDA", "1")
    with pytest.raises(setup_py.Missing, match="DIST_TRAIN_CUDA=1 demands CUDA kernels, but there is no nvcc in .*set CUDA_HOME"):
        setup_py.find_nvcc()
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    assert setup_py.find_nvcc() == nvcc
    monkeypatch.setenv("DIST_TRAIN_CUDA", "0")
    assert setup_py.find_nvcc() is None
    monkeypatch.setenv("DIST_TRAIN_CUDA", "yes")
    with pytest.raises(setup_py.Missing, match="DIST_TRAIN_CUDA=yes: set 1 to demand"):
        setup_py.find_nvcc()


@needs_gxx
def test_only_what_changed_is_compiled(setup_py, tmp_path, monkeypatch):
    header, source, target = tmp_path / "a.h", tmp_path / "a.cpp", tmp_path / "a.o"
    header.write_text("int f();\n")
    source.write_text('#include "a.h"\nint f() { return 1; }\n')
    commands = []
    run = setup_py.run
    monkeypatch.setattr(setup_py, "run", lambda command: commands.append(command) or run(command))
    compile_ = lambda *flags: setup_py.compile_unit(target, [GXX, *flags, "-c", str(source)])
    assert compile_() is None and compile_() is None and len(commands) == 1
    os.utime(header, (target.stat().st_mtime + 1,) * 2)
    assert compile_() is None and len(commands) == 2
    os.utime(header, (0, 0))
    assert compile_("-O1") is None and len(commands) == 3
    source.write_text("int f() { return }\n")
    os.utime(source, (target.stat().st_mtime + 1,) * 2)
    assert "this command failed with status 1" in compile_("-O1") and "a.cpp" in compile_("-O1")


@needs_gxx
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="one instruction set")
@pytest.mark.parametrize("source", sorted(CSRC.glob("*/*_cpu.cpp")), ids=lambda source: source.parent.name)
def test_instruction_sets_share_no_code(setup_py, tmp_path, source):
    """All that a unit for AVX-512 defines lies in its own namespace: the linker can give it to no other unit."""
    target = tmp_path / "unit.o"
    flags = [*setup_py.CXX_FLAGS, *setup_py.ISA_FLAGS["avx512"], "-O0", "-DDT_ISA=avx512"]
    subprocess.run([GXX, *flags, "-c", str(source), "-o", str(target)], check=True)
    listed = subprocess.run(["nm", "-C", "--defined-only", str(target)], capture_output=True, text=True, check=True).stdout
    shared = [
        line
        for line in listed.splitlines()
        if line.split(maxsplit=2)[1] in "WVuT" and "dt::avx512::" not in line and "DW.ref." not in line
    ]
    assert "dt::avx512::" in listed and not shared, shared


@pytest.mark.skipif(not library.loaded, reason=library.missing)
def test_every_schema_has_a_cpu_kernel_and_a_fake():
    names = re.findall(r'm\.def\("(\w+)\(', (CSRC / "bindings.cpp").read_text())
    assert "rms_norm" in names
    for found in pkgutil.walk_packages(dist_train.ops.__path__, "dist_train.ops."):
        importlib.import_module(found.name)
    for name in names:
        for key in ("CPU", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dist_train::{name}", key), (name, key)


@pytest.mark.skipif(not library.loaded, reason=library.missing)
def test_the_library_needs_no_newer_torch_and_no_cuda():
    """Only the C functions of the stable ABI are taken from torch; what torch without CUDA lacks is weak."""
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", str(library.PATH)], capture_output=True, text=True, check=True
    ).stdout
    names = [line.split() for line in listed.splitlines()]
    from_torch = {name for kind, name in names if name.startswith(("aoti_torch", "torch_"))}
    assert from_torch and not [name for _, name in names if name.startswith(("_ZN2at", "_ZN3c10", "_ZNK2at", "_ZNK3c10"))]
    strong = {name for kind, name in names if kind not in "wv" and "cuda" in name.lower()}
    assert strong <= {"aoti_torch_device_type_cuda"}  # a number, which every torch has


def test_usable_says_no_for_what_the_kernels_do_not_take():
    x = torch.ones(2)
    assert library.usable(x, None, x.bfloat16(), x.half()) is library.loaded
    assert not library.usable(x, x.double()) and not library.usable(x.to("meta"))
