"""The library of fused kernels (csrc/): the one file that knows whether it is there and what it can do.

Every fused op has a reference in plain torch beside it. A public function takes the fused one when `usable` says so.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

PATH = Path(__file__).resolve().parents[1] / "_csrc.so"
ISAS = ("base", "avx2", "avx512")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _load() -> tuple[ctypes.CDLL | None, str]:
    if not PATH.exists():
        remedy = (
            "install torch and a C++ compiler, then this package again with pip install --no-build-isolation --force-reinstall"
        )
        return None, f"{PATH} was not built: {remedy}"
    try:
        torch.ops.load_library(str(PATH))
        return ctypes.CDLL(str(PATH)), ""
    except OSError as error:
        return None, f"{PATH} does not load into torch {torch.__version__} ({error}): build it again with `make setup`"


_library, missing = _load()  # `missing`: why there is no library and what to do; empty where there is one
loaded = _library is not None
has_cuda = _library is not None and bool(_library.dt_has_cuda())


def usable(*tensors: Tensor | None) -> bool:
    """Can the fused ops take these: fp32, bf16 or fp16, on a CPU, or on a CUDA device if the library was built for CUDA?"""
    if not loaded:
        return False
    devices = ("cpu", "cuda") if has_cuda else ("cpu",)
    return all(tensor is None or (tensor.dtype in DTYPES and tensor.device.type in devices) for tensor in tensors)


def cpu_isa(highest: str = ISAS[-1]) -> str:
    """The instruction set whose kernels run from now on: the best this processor has that is not above `highest`."""
    if _library is None:
        raise RuntimeError(missing)
    return ISAS[_library.dt_limit_isa(ISAS.index(highest))]


def contiguous_like(x: Tensor) -> Tensor:
    """The fake of an output that the kernels write: as x, but contiguous whatever x is."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
