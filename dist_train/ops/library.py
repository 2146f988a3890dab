"""The library of fused kernels (csrc/): the one file that knows whether it is there and what it can do.

Every fused op has a reference in plain torch beside it. A public function takes the fused one when `usable` says so.
"""

from __future__ import annotations

import ctypes
import warnings
from pathlib import Path

import torch
from torch import Tensor

PATH = Path(__file__).resolve().parents[1] / "_csrc.so"
ISAS = ("base", "avx2", "avx512")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPERATORS = {  # what this package calls, and with how many arguments: a library built from older sources shows itself by them
    "accumulate_": 2,
    "adam_": 15,
    "adamw8bit_": 15,
    "add_layer_norm": 5,
    "add_rms_norm": 4,
    "cross_entropy": 3,
    "cross_entropy_backward": 6,
    "cross_entropy_backward_": 6,
    "cross_entropy_terms": 3,
    "dropout_add": 4,
    "geglu": 2,
    "geglu_backward": 3,
    "gelu": 1,
    "gelu_backward": 2,
    "int8_decode_": 4,
    "int8_encode": 2,
    "lamb_": 15,
    "layer_norm": 4,
    "layer_norm_backward": 8,
    "rms_norm": 3,
    "rms_norm_backward": 6,
    "rotary": 4,
    "rotary_": 4,
    "rotary_pair": 5,
    "sgd_": 10,
    "sum_of_squares": 1,
    "swiglu": 2,
    "swiglu_backward": 3,
    "take_largest_": 2,
}


def _load() -> tuple[ctypes.CDLL | None, str]:
    if not PATH.exists():
        remedy = (
            "install torch and a C++ compiler, then this package again with pip install --no-build-isolation --force-reinstall"
        )
        return None, f"{PATH} was not built: {remedy}"
    try:
        torch.ops.load_library(str(PATH))
        library = ctypes.CDLL(str(PATH))
    except OSError as error:
        return None, _refuse(f"does not load into torch {torch.__version__} ({error})")
    if differing := [name for name, arguments in OPERATORS.items() if _arguments(name) != arguments]:
        return None, _refuse(f"was built from other sources than this package, with other operators ({', '.join(differing)})")
    return library, ""


def _arguments(name: str) -> int | None:
    """How many the loaded operator has; None where there is none."""
    try:
        return len(getattr(torch.ops.dist_train, name).default._schema.arguments)
    except AttributeError:
        return None


def _refuse(why: str) -> str:
    """A library that is there was meant to be used: whoever imports this is told, once."""
    reason = f"{PATH} {why}: build it again with `make setup`"
    warnings.warn(f"dist_train computes without its fused kernels. {reason}", RuntimeWarning, stacklevel=2)
    return reason


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
