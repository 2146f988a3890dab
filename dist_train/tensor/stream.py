"""The residual stream on the ranks of a tensor group: whole, or split along tokens.

Split (arXiv:2205.05198), the B·T tokens of a micro-batch stand in one line, padded to a multiple of the ranks, and each rank
has an equal run of them. Nothing that leaves the model shows the padding.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from dist_train.mesh.mesh import Group


def stream_shape(rows: int, tokens: int, hidden: int, group: Group, sequence: bool) -> tuple[int, ...]:
    """Shape of the residual stream on one rank: (rows, tokens, hidden), or (tokens of this rank, hidden)."""
    return (own_tokens(rows * tokens, group), hidden) if sequence and group.size > 1 else (rows, tokens, hidden)


def own_tokens(tokens: int, group: Group) -> int:
    """Tokens of a rank, padding among them."""
    return -(-tokens // group.size)


def pad_line(x: Tensor, group: Group, value: float = 0) -> Tensor:
    """Tokens in a line (first dim) with `value` behind them up to a multiple of the ranks."""
    missing = own_tokens(x.size(0), group) * group.size - x.size(0)
    return F.pad(x, (*[0] * (2 * (x.dim() - 1)), 0, missing), value=value) if missing else x


def own_run(x: Tensor, group: Group) -> Tensor:
    """This rank's run of a padded line."""
    count = x.size(0) // group.size
    return x[group.index * count : (group.index + 1) * count]
