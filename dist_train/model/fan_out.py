"""Linear layers that read the same input: one place for what ranks that share them do with it. Shapes: see transformer.py."""

from __future__ import annotations

from torch import Tensor, nn


class FanOut(nn.Module):
    """The outputs of linear layers for one input. A module without weights, so that it can be replaced."""

    def forward(self, x_BTD: Tensor, *linears: nn.Linear) -> tuple[Tensor, ...]:
        return tuple(linear(x_BTD) for linear in linears)
