"""How much memory a rank has needed so far."""

from __future__ import annotations

import resource
import sys

import torch


def peak_bytes(device: torch.device) -> int:
    """Peak bytes of this process: allocated tensors on a CUDA device, resident memory of the whole process on CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
