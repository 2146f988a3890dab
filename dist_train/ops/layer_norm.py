"""Layer normalisation (Ba, Kiros and Hinton, arXiv:1607.06450)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def layer_norm(x_BTD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
    """`(x - mean) · weight / sqrt(variance + eps) + bias` over the last dim; statistics in fp32, result in x's dtype."""
    return F.layer_norm(x_BTD, weight_D.shape, weight_D, bias_D, eps)
