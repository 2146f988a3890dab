"""The CUDA kernels, compiled by g++ for the CPU (shim.h), and called with CPU tensors through their C interface.

`build(only="norm")` gives the library of `csrc/norm/*_cuda.cu`; other arguments give sanitised or deliberately broken ones.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
CACHE = HERE.parents[1] / "build" / "shim"
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # csrc/common/dtype.h
ORDERS = (0, 1, 2, 3)  # of the warps of a block: as numbered, backwards, two random ones
FLAGS = ("-std=c++20", "-fPIC", "-DDT_SHIM", "-fno-strict-aliasing", f"-I{HERE}", "-x", "c++")
OPTIMISED = ("-O1",)
QUICK = ("-O0",)
SANITISED = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
GUARDED = ("-O0", "-g1", "-fsanitize=address")
MISSING = "" if shutil.which("g++") and platform.machine() == "x86_64" else "the kernels run on the CPU with g++ on x86-64 only"


class Kernels:
    """A loaded library: `kernels.dt_norm_forward(x, None, weight, …, 1e-6, …)`.

    Tensors are passed as their addresses, None as a null pointer, int as int64_t, float as double and dtypes as their
    numbers. The stream, always the last argument of a launcher, is added. A launcher that fails raises RuntimeError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.library = ctypes.CDLL(str(path))

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(self.library, name)

        def call(*arguments: object) -> None:
            if status := function(*map(_argument, arguments), None):
                raise RuntimeError(f"{name}: status {status}")

        return call

    def value(self, name: str, *arguments: object) -> int:
        """What a C function that launches nothing returns, an int64_t."""
        function = getattr(self.library, name)
        function.restype = ctypes.c_int64
        return function(*map(_argument, arguments))

    def order(self, order: int) -> None:
        self.library.dt_shim_order(order)

    def orders(self) -> Iterator[int]:
        """Goes through the orders of warps; each holds until the next."""
        for order in ORDERS:
            self.order(order)
            yield order
        self.order(0)


def _argument(value: object) -> object:
    if value is None:
        return ctypes.c_void_p(None)
    if isinstance(value, Tensor):
        assert value.is_contiguous() and value.device.type == "cpu"
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, torch.dtype):
        return ctypes.c_int64(DTYPES[value])
    return ctypes.c_double(value) if isinstance(value, float) else ctypes.c_int64(int(value))  # type: ignore[call-overload]


def build(optimise: tuple[str, ...] = OPTIMISED, csrc: Path = CSRC, only: str = "*") -> Path:
    """The library of the kernels of one op (`only`) or all below `csrc`; built again only if a source or flag has changed."""
    sources = sorted(csrc.glob(f"{only}/*_cuda.cu"))
    assert sources, f"no kernels in {csrc}/{only}"
    objects = [_compile(source, csrc, optimise) for source in sources]
    library = _cached("\n".join(map(str, objects)), ".so")
    if not library.exists():
        _run(["g++", *optimise, "-shared", *map(str, objects)], library)
    return library


def _compile(source: Path, csrc: Path, optimise: tuple[str, ...]) -> Path:
    inputs = sorted({HERE / "shim.h", source, *(csrc / "common").glob("*h"), *source.parent.glob("*h")})
    key = "\n".join((*FLAGS, *optimise, str(source.relative_to(csrc)), *(file.read_text() for file in inputs)))
    target = _cached(key, ".o")
    if not target.exists():
        _run(["g++", *optimise, *FLAGS, "-c", str(source)], target)
    return target


def _cached(key: str, suffix: str) -> Path:
    CACHE.mkdir(parents=True, exist_ok=True)
    return CACHE / (hashlib.sha256(key.encode()).hexdigest()[:24] + suffix)


def _run(command: list[str], target: Path) -> None:
    fresh = target.with_suffix(f".{os.getpid()}{target.suffix}")
    done = subprocess.run([*command, "-o", str(fresh)], capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
    os.replace(fresh, target)


def error_check(ours: Tensor, reference: Tensor, exact: Tensor, floor: float = 1e-6) -> None:
    """Asserts that `ours` is at most twice as far from `exact` (computed in fp64) as torch's own result in the same dtype.

    Distances are the largest over the tensor. Where torch happens to be exact, half a unit in the last place of the largest
    value is allowed, which rounding takes in any case, or `floor` relative to that value if it is more. NaN and infinities
    must be where torch has them.
    """
    assert ours.shape == reference.shape == exact.shape and ours.dtype == reference.dtype
    if ours.numel() == 0:
        return
    finite = reference.isfinite()
    torch.testing.assert_close(ours[~finite].double(), reference[~finite].double(), rtol=0, atol=0, equal_nan=True)
    if not finite.any():
        return
    assert ours[finite].isfinite().all(), "not finite where torch is"
    exact = exact[finite].double()
    mine, theirs = ((each[finite].double() - exact).abs().max().item() for each in (ours, reference))
    limit = 2 * theirs + max(floor, torch.finfo(ours.dtype).eps / 2) * exact.abs().max().item()
    assert mine <= limit, f"error {mine:.3e}; torch's own is {theirs:.3e}, so at most {limit:.3e} is allowed"
