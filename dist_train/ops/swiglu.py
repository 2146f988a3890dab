"""The gated activation of the llama feed-forward block (Shazeer, arXiv:2002.05202)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def swiglu(gate_BTF: Tensor, up_BTF: Tensor) -> Tensor:
    """`silu(gate) · up`, same shape and dtype as the inputs."""
    return F.silu(gate_BTF) * up_BTF
