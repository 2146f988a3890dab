"""In which dtypes a CPU multiplies matrices itself."""

from __future__ import annotations

import torch

MULTIPLIES_BF16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def is_native(dtype: torch.dtype) -> bool:
    """Whether products on this CPU are best made in `dtype`, rather than in fp32 between two casts.

    Where the processor has no instruction for it torch emulates 16 bits: attention takes 5 times as long as in fp32, and one
    of the products of a linear layer's backward 40 times.
    """
    return dtype in (torch.float32, torch.float64) or (dtype == torch.bfloat16 and MULTIPLIES_BF16)


def product_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """In which dtype numbers in `dtype` are multiplied on `device`: that one, or fp32 on a CPU for which it is not native."""
    return dtype if device.type != "cpu" or is_native(dtype) else torch.promote_types(dtype, torch.float32)
