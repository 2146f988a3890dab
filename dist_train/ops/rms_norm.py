"""Root-mean-square normalisation (Zhang and Sennrich, arXiv:1910.07467)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_BTD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """`x · weight / sqrt(mean(x²) + eps)` over the last dim; statistics in fp32 (fp64 for fp64 input), result in x's dtype."""
    return F.rms_norm(x_BTD, weight_D.shape, weight_D, eps)
