"""Which backend computes an attention, and why: a pure function of a request, a machine and the configured name.

fa4, fa3, fa2   FlashAttention packages (arXiv:2205.14135, 2307.08691, 2407.08608), where they are installed
torch_flash     torch's own FlashAttention-2 on CUDA
cudnn           cuDNN's kernel through torch
cpu_flash       torch's flash kernel for CPUs, document by document in packed rows
sdpa            torch.nn.functional.scaled_dot_product_attention with a mask: whatever kernel torch picks
math            the formula spelled out: the reference
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch

from dist_train.config.compose import ConfigError

KINDS = ("causal", "tail", "full", "packed", "mask")


@dataclass(frozen=True)
class Request:
    dtype: torch.dtype
    width: int  # of a head
    kind: str  # causal: T = S; tail: 1 < T < S, the last queries of a sequence; full: all keys; packed: documents; mask: any
    dropout: float = 0.0
    lse: bool = False  # whether the log-sum-exp of each row must come back


@dataclass(frozen=True)
class Machine:
    device: str  # torch's device type
    capability: tuple[int, int] | None = None  # of a CUDA device
    missing: tuple[tuple[str, str], ...] = ()  # backends that cannot be loaded here, and why


@dataclass(frozen=True)
class Choice:
    backend: str
    refused: tuple[tuple[str, str], ...]  # backends that were asked first, and the rule that each one has

    @property
    def reason(self) -> str:
        """One line: why not those before it."""
        return _told(self.refused) or "first choice"


@dataclass(frozen=True)
class _Rule:
    device: str = ""  # empty: any
    dtypes: tuple[torch.dtype, ...] = ()  # empty: any
    widest: int = 0  # head width; 0: any
    kinds: tuple[str, ...] = KINDS
    dropout: bool = True
    lse: bool = True
    capability: tuple[int, int] = (0, 99)  # first and last major compute capability


_HALF = (torch.float16, torch.bfloat16)
_UNMASKED = ("causal", "tail", "full", "packed")
_RULES = {  # in the order in which auto asks them
    "fa4": _Rule("cuda", _HALF, 128, _UNMASKED, dropout=False, capability=(9, 10)),
    "fa3": _Rule("cuda", _HALF, 256, _UNMASKED, dropout=False, capability=(9, 9)),
    "fa2": _Rule("cuda", _HALF, 256, _UNMASKED, capability=(8, 99)),
    "torch_flash": _Rule("cuda", _HALF, 256, _UNMASKED, capability=(8, 99)),
    "cudnn": _Rule("cuda", _HALF, 128, ("causal", "full"), dropout=False, lse=False, capability=(8, 99)),
    "cpu_flash": _Rule("cpu", (*_HALF, torch.float32, torch.float64), dropout=False),
    "sdpa": _Rule(lse=False),
    "math": _Rule(),
}
BACKENDS = tuple(_RULES)
WANTED = {  # what the configuration may say, and whom it asks
    "auto": BACKENDS,
    "flash": ("fa4", "fa3", "fa2", "torch_flash", "cpu_flash"),
    "sdpa": ("sdpa",),
    "math": ("math",),
}


def backend_for(request: tuple[torch.dtype, int, str, float, bool], device: torch.device, wanted: str) -> str:
    """The backend for the fields of a `Request` on this machine. A compiler takes it for a constant."""
    return backend_here(request, device, wanted)


# As torch.compiler.assume_constant_result does, without importing the compiler: 800 modules at the start of every rank.
backend_for._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=4096)
def backend_here(request: tuple[torch.dtype, int, str, float, bool], device: torch.device, wanted: str) -> str:
    return choose(Request(*request), this_machine(device), wanted).backend


@lru_cache(maxsize=4096)
def choose(request: Request, machine: Machine, wanted: str = "auto") -> Choice:
    """The first backend of `wanted` that may serve the request. Raises ConfigError where none may."""
    refused: list[tuple[str, str]] = []
    for name in WANTED[wanted]:
        why = _refusal(name, request, machine)
        if why is None:
            return Choice(name, tuple(refused))
        refused.append((name, why))
    what = f"{str(request.dtype).removeprefix('torch.')} attention ({request.kind}, head width {request.width})"
    extra = f" with dropout {request.dropout:g}" if request.dropout else " that returns the log-sum-exp" if request.lse else ""
    raise ConfigError(
        f"attention={wanted} cannot compute {what}{extra} on {machine.device} ({_told(tuple(refused))}). Set attention=auto."
    )


def _told(refused: tuple[tuple[str, str], ...]) -> str:
    """Neighbours with one reason together: "fa3, fa2: takes float16, bfloat16"."""
    groups = groupby(refused, key=lambda each: each[1])
    return "; ".join(f"{', '.join(name for name, _ in names)}: {why}" for why, names in groups)


def _refusal(name: str, request: Request, machine: Machine) -> str | None:
    rule, capability = _RULES[name], machine.capability or (0, 0)
    first, last = rule.capability
    if rule.device and rule.device != machine.device:
        return f"runs on {rule.device} only"
    if name in dict(machine.missing):
        return dict(machine.missing)[name]
    if rule.device == "cuda" and not first <= capability[0] <= last:
        ends = f"{first}.x" if first == last else f"{first}.0 or newer" if last == 99 else f"{first}.x to {last}.x"
        return f"needs compute capability {ends}, not {capability[0]}.{capability[1]}"
    if rule.dtypes and request.dtype not in rule.dtypes:
        return f"takes {', '.join(str(dtype).removeprefix('torch.') for dtype in rule.dtypes)}"
    if rule.widest and request.width > rule.widest:
        return f"takes heads up to {rule.widest} wide"
    if request.kind not in rule.kinds:
        return f"knows no {request.kind} attention"
    if request.dropout and not rule.dropout:
        return "has no dropout"
    if request.lse and not rule.lse:
        return "returns no log-sum-exp"
    return None


@lru_cache(maxsize=64)
def this_machine(device: torch.device) -> Machine:
    """What is there for tensors on `device`; CUDA packages are imported here for the first time, and only for CUDA tensors."""
    if device.type != "cuda":
        return Machine(device.type)
    from dist_train.ops.attention.cuda import LOADERS, load

    if not torch.cuda.is_available():  # tensors of a tracer
        return Machine("cuda", None, tuple((name, "there is no CUDA device") for name in (*LOADERS, "cudnn")))
    failures = ((name, kernel) for name in LOADERS if isinstance(kernel := load(name), str))
    cudnn = () if torch.backends.cudnn.is_available() else (("cudnn", "this torch has no cuDNN"),)
    return Machine("cuda", torch.cuda.get_device_capability(device), (*failures, *cudnn))
