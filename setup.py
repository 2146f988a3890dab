"""Builds the package, and with it the library of fused kernels from csrc/ (docs/csrc.md).

The library goes through torch's stable ABI, so it is compiled against the headers of one torch and runs on others (2.11 and
later) and on any Python. torch is looked up by path and never imported: inside pip's isolated builds it cannot be. Without
torch, or without a C++ compiler, the package installs without kernels and says so; it then computes in plain torch.

Environment: DIST_TRAIN_CUDA=1 demands the CUDA kernels and 0 leaves them out (default: built where nvcc is found);
CUDA_HOME, CXX and MAX_JOBS mean what they mean to torch's own extensions.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
ORDINARY = ["-O3", "-DNDEBUG", "-fno-math-errno", "-fno-trapping-math"]  # the last two: else sqrt is a call and loops stay scalar
WARNINGS = ["-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized"]  # gcc 12 suspects its own AVX-512 intrinsics
CXX_FLAGS = ["-std=c++20", "-fPIC", "-fvisibility=hidden", *WARNINGS, *ORDINARY]
ISA_FLAGS = {
    "base": [],
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": "-mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512".split(),
}
TORCH_ABI = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # the oldest torch that loads the library: 2.11
CUDA_ARCHITECTURES = (80, 90, 100)


class Missing(Exception):
    """What the build lacks, and the remedy."""


class BuildKernels(build_ext):
    """Compiles what changed, several files at a time, and links dist_train/_csrc.so."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split("."))) + ".so"  # no Python version in it: the library uses none of Python

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        try:
            torch, compiler = find_torch(), find_compiler()
        except Missing as missing:
            target.unlink(missing_ok=True)
            self.warn(f"\n\n  dist_train installs WITHOUT its fused kernels: {missing}\n")
            return
        try:
            build_library(target, torch, compiler, find_nvcc())
        except Missing as missing:
            raise SystemExit(f"error: {missing}") from None


def find_torch() -> Path:
    """The folder of the target environment's torch."""
    folders = [Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")]
    if environment := os.environ.get("VIRTUAL_ENV"):
        folders += Path(environment).glob("lib/python*/site-packages")
    if (spec := importlib.util.find_spec("torch")) and spec.origin:
        folders.insert(0, Path(spec.origin).parents[1])
    for folder in folders:
        if (folder / "torch" / "include" / "torch" / "csrc" / "stable" / "library.h").exists():
            return folder / "torch"
    looked = ", ".join(sorted({str(folder) for folder in folders}))
    raise Missing(
        f"no torch 2.11 or later in {looked}, and they need its headers. "
        "Install torch first, then: pip install --no-build-isolation --no-deps --force-reinstall (this package)"
    )


def find_compiler() -> str:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise Missing(
            f"CXX={compiler} is not a program on PATH. Install a C++20 compiler (Debian: apt-get install g++) and repeat"
        )
    return compiler


def find_nvcc() -> Path | None:
    """The CUDA compiler, or None where the library is to be built without CUDA."""
    wanted = os.environ.get("DIST_TRAIN_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise Missing(
            f"DIST_TRAIN_CUDA={wanted}: set 1 to demand CUDA kernels, 0 to leave them out; unset builds them if nvcc is there"
        )
    if wanted == "0":
        return None
    home = os.environ.get("CUDA_HOME")
    places = [f"{home}/bin"] if home else [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    nvcc = shutil.which("nvcc", path=os.pathsep.join(places))
    if nvcc is None and wanted == "1":
        raise Missing(
            f"DIST_TRAIN_CUDA=1 demands CUDA kernels, but there is no nvcc in {' or '.join(places)}. "
            "Install the CUDA toolkit or set CUDA_HOME to it; or set DIST_TRAIN_CUDA=0"
        )
    return Path(nvcc) if nvcc else None


def build_library(target: Path, torch: Path, compiler: str, nvcc: Path | None) -> None:
    headers = ["-isystem", str(torch / "include"), TORCH_ABI, *(["-DDT_CUDA"] if nvcc else [])]
    units = {}  # object → its command without -o
    for source in [CSRC / "bindings.cpp", *sorted(CSRC.glob("*/*_ops.cpp"))]:
        units[object_of(source)] = [compiler, *CXX_FLAGS, *headers, "-c", str(source)]
    for source in sorted(CSRC.glob("*/*_cpu.cpp")):
        for isa in ISA_FLAGS if os.uname().machine == "x86_64" else ["base"]:
            units[object_of(source, isa)] = [compiler, *CXX_FLAGS, *ISA_FLAGS[isa], f"-DDT_ISA={isa}", "-c", str(source)]
    if nvcc:
        for source in sorted(CSRC.glob("*/*_cuda.cu")):
            units[object_of(source)] = [*nvcc_command(nvcc, compiler), *architecture_flags(nvcc), "-c", str(source)]
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS", 0)) or os.cpu_count()) as jobs:
        for failed in [each for each in jobs.map(compile_unit, units, units.values()) if each]:
            raise Missing(failed)
    libraries = [f"-L{torch / 'lib'}", "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-Wl,--as-needed"]
    if nvcc:
        libraries += [*(f"-L{folder}" for folder in runtime_folders(nvcc)), "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(f".{os.getpid()}")
    # Without the table of local symbols: nvcc puts the name of a scratch file there, so no two builds would have the same bytes.
    command = [compiler, "-shared", "-Wl,--strip-all", "-o", str(fresh), *map(str, units), *libraries]
    if failed := run(command):
        raise Missing(failed)
    os.replace(fresh, target)  # at once: who has loaded the old library keeps it


def object_of(source: Path, isa: str = "") -> Path:
    return ROOT / "build" / "csrc" / f"{source.stem}{'-' * bool(isa)}{isa}.o"


def nvcc_command(nvcc: Path, compiler: str = "g++") -> list[str]:
    return [str(nvcc), "-std=c++17", "-O3", "-ccbin", compiler, "-Xcompiler", "-fPIC,-fvisibility=hidden"]


def architecture_flags(nvcc: Path) -> list[str]:
    """Machine code for the architectures that this nvcc knows, and PTX of the newest but one for those it does not."""
    listed = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    flags = []
    for number in (each for each in CUDA_ARCHITECTURES if f"sm_{each}" in listed):
        code = f"[sm_{number},compute_{number}]" if number == 90 else f"sm_{number}"
        flags += ["-gencode", f"arch=compute_{number},code={code}"]
    return flags


def runtime_folders(nvcc: Path) -> list[Path]:
    home = nvcc.resolve().parents[1]
    # lib: the layout of NVIDIA's wheels
    folders = (home / "lib64", home / "lib", *home.glob("targets/*/lib"), Path("/usr/local/cuda/lib64"))
    return [folder for folder in folders if folder.is_dir()]


def compile_unit(target: Path, command: list[str]) -> str | None:
    """Compiles unless the object is newer than all it was made of and its command is the same. Returns what went wrong."""
    target.parent.mkdir(parents=True, exist_ok=True)
    record, dependencies = target.with_suffix(".command"), target.with_suffix(".d")
    line = shlex.join(command)
    if target.exists() and record.exists() and record.read_text() == line and up_to_date(target, dependencies):
        return None
    record.unlink(missing_ok=True)
    fresh = target.with_suffix(f".{os.getpid()}.o")
    if failed := run([*command, "-MMD", "-MF", str(dependencies), "-o", str(fresh)]):
        return failed
    os.replace(fresh, target)
    record.write_text(line)
    return None


def up_to_date(target: Path, dependencies: Path) -> bool:
    if not dependencies.exists():
        return False
    files = dependencies.read_text().replace("\\\n", " ").partition(":")[2].split()
    made = target.stat().st_mtime
    return all(os.path.exists(file) and os.stat(file).st_mtime < made for file in files)


def run(command: list[str]) -> str | None:
    print(shlex.join(command), flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        if done.stderr:
            print(done.stderr, flush=True)
        return None
    return f"this command failed with status {done.returncode}:\n{shlex.join(command)}\n{done.stdout}{done.stderr}"


if __name__ == "__main__":
    setup(
        packages=[*find_packages(include=["dist_train", "dist_train.*"]), "dist_train.configs", "dist_train.launch.slurm"],
        package_dir={"dist_train.configs": "configs", "dist_train.launch.slurm": "launch/slurm"},
        package_data={"dist_train.configs": ["*.yaml", "*/*.yaml"], "dist_train.launch.slurm": ["*.sbatch"]},
        ext_modules=[Extension("dist_train._csrc", sources=[])],
        cmdclass={"build_ext": BuildKernels},
    )
