"""Random draws for what ranks of a tensor group hold different parts of.

Default generators are seeded alike on these ranks, so that what all of them hold is dropped alike. For what is split, one draw
from the default generator of the host names a seed, to which each rank adds its index. Recompute restores the default
generators, and with them that seed and all that follows from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dist_train.mesh.mesh import Group


@contextmanager
def own_draws(group: Group, device: torch.device) -> Iterator[None]:
    """Draws inside differ between ranks; the default generators are left one draw further on every rank alike."""
    seed = int(torch.randint(1 << 62, ())) + group.index
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda):
        torch.default_generator.manual_seed(seed)
        for each in cuda:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield


class OwnDraws(nn.Module):
    """A layer without weights, such as dropout or attention with dropout, that draws for what only this rank holds."""

    def __init__(self, layer: nn.Module, group: Group) -> None:
        super().__init__()
        self.layer, self.group = layer, group

    def forward(self, x: Tensor, *rest: Any) -> Any:
        if not self.training:
            return self.layer(x, *rest)
        with own_draws(self.group, x.device):
            return self.layer(x, *rest)
