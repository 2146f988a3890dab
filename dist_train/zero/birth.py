"""Modules that come on the meta device: their parameters get memory when a bucket takes them, not before.

Torch cannot give a meta parameter memory in place, so another parameter takes its place in the module: one of the right
shape on the right device whose storage has no bytes yet. The engine never reads it, but points it into a bucket.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


def leave_meta(module: nn.Module, device: torch.device, init: Callable[[str, Tensor], None] | None) -> set[nn.Parameter]:
    """Move a module's meta parameters, without values, and its meta buffers, filled by `init`, to `device`.

    Returns the new parameters. A parameter that is used in several places stays one. Raises ValueError without `init`.
    """
    moved: dict[Tensor, nn.Parameter] = {}
    for prefix, part in module.named_modules():
        for key, param in part.named_parameters(recurse=False, remove_duplicate=False):
            if param.is_meta:
                _require(init, prefix, key)
                if param not in moved:
                    memory = torch.empty(param.shape, dtype=param.dtype, device=device)
                    memory.untyped_storage().resize_(0)
                    moved[param] = nn.Parameter(memory, requires_grad=param.requires_grad)
                    moved[param].__dict__.update(param.__dict__)  # such as its geometry
                setattr(part, key, moved[param])
        for key, buffer in part.named_buffers(recurse=False):
            if buffer.is_meta:
                values = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
                _require(init, prefix, key)(f"{prefix}.{key}" if prefix else key, values)
                setattr(part, key, values)
    return set(moved.values())


def _require(init: Callable[[str, Tensor], None] | None, prefix: str, key: str) -> Callable[[str, Tensor], None]:
    if init is None:
        name = f"{prefix}.{key}" if prefix else key
        raise ValueError(f"{name} is on the meta device and has no values: give init=, which fills a tensor given its name.")
    return init
