"""Rotary position embedding (Su et al., arXiv:2104.09864), halves rotated as in GPT-NeoX and Hugging Face's Llama.

Shapes: B rows (1 broadcasts), T tokens, N heads, H head width, R = H/2 rotated pairs.

The angles are made from the integer positions in every forward pass, in fp32, and kept in no buffer: casting a model to
bf16 can therefore never merge positions 256 and 257. One table serves all layers, so it costs next to nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary_table(positions_BT: Tensor, head_width: int, theta: float) -> tuple[Tensor, Tensor]:
    """(cos_BT1H, sin_BT1H) in fp32 of the angles `position · theta^(-2r/H)`, the sine negative in the first half."""
    exponents_R = torch.arange(0, head_width, 2, dtype=torch.float64, device=positions_BT.device) / head_width
    frequencies_R = (theta**-exponents_R).float()  # rounded once: fp32 powers would lose digits at long positions
    angles_BT1R = positions_BT.float()[..., None, None] * frequencies_R
    cos_BT1R, sin_BT1R = angles_BT1R.cos(), angles_BT1R.sin()
    return torch.cat((cos_BT1R, cos_BT1R), dim=-1), torch.cat((-sin_BT1R, sin_BT1R), dim=-1)


def rotary(x_BTNH: Tensor, cos_BT1H: Tensor, sin_BT1H: Tensor) -> Tensor:
    """x with each pair (r, r + H/2) turned by its angle; computed in fp32, returned in x's dtype.

    (a, b) becomes (a·cos - b·sin, b·cos + a·sin): rolling by half the width brings each partner into place, and the
    table holds the signs.
    """
    swapped_BTNH = x_BTNH.roll(x_BTNH.size(-1) // 2, dims=-1)
    return (x_BTNH * cos_BT1H + swapped_BTNH * sin_BT1H).to(x_BTNH.dtype)
