"""Rotary position embedding (Su et al., arXiv:2104.09864), halves rotated as in GPT-NeoX and Hugging Face's Llama.

Shapes: B rows (1 broadcasts), T tokens, N heads, H head width, R = H/2 rotated pairs.

The angles are made from the integer positions in every forward pass, in fp32, and kept in no buffer: casting a model to
bf16 can therefore never merge positions 256 and 257. One table serves all layers, so it costs next to nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(positions_BT: Tensor, head_width: int, theta: float) -> tuple[Tensor, Tensor]:
    """(cos_BT1R, sin_BT1R) in fp32 of the angles `position · theta^(-2r/H)`."""
    exponents_R = torch.arange(0, head_width, 2, dtype=torch.float64, device=positions_BT.device) / head_width
    frequencies_R = (theta**-exponents_R).float()  # rounded once: fp32 powers would lose digits at long positions
    angles_BT1R = positions_BT.float()[..., None, None] * frequencies_R
    return angles_BT1R.cos(), angles_BT1R.sin()


def rotary(x_BTNH: Tensor, cos_BT1R: Tensor, sin_BT1R: Tensor) -> Tensor:
    """x with each pair (r, r + H/2) turned by its angle; computed in fp32, returned in x's dtype."""
    a_BTNR, b_BTNR = x_BTNH.chunk(2, dim=-1)
    turned_BTNH = torch.cat((a_BTNR * cos_BT1R - b_BTNR * sin_BT1R, b_BTNR * cos_BT1R + a_BTNR * sin_BT1R), dim=-1)
    return turned_BTNH.to(x_BTNH.dtype)
