"""How the tokens of a row are divided over context-parallel ranks. Pure.

A row is padded and cut in 2·cp chunks of equal length; rank r has chunks r and 2·cp-1-r, an early and a late one, since a late
query sees more keys than an early one. With this zig-zag every rank has the same causal work. (Where keys travel, rank r sees
one of the two chunks of a rank before it with both of its own, and both chunks of a rank after it with the later of its own.)

Shapes: B rows, T tokens of a whole row, C = T rounded up to 2·cp, over 2·cp: tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_train.mesh.mesh import Group
from dist_train.model.transformer import Inputs
from dist_train.ops.cross_entropy import IGNORED


@dataclass(frozen=True)
class Split:
    """Rows of `tokens` tokens over `ranks` ranks."""

    tokens: int
    ranks: int

    @property
    def chunk(self) -> int:
        """Tokens of a chunk."""
        return -(-self.tokens // (2 * self.ranks))

    @property
    def padded(self) -> int:
        """Tokens of a row with its padding, which has fewer than 2·cp tokens and stands at the end."""
        return 2 * self.ranks * self.chunk

    def chunks(self, rank: int) -> tuple[int, int]:
        """The chunks of a rank, in the order in which it holds them."""
        return rank, 2 * self.ranks - 1 - rank

    def require_padded(self) -> None:
        """Raise ValueError where whole rows come without their padding."""
        if self.tokens != self.padded:
            raise ValueError(
                f"documents of {self.tokens} tokens over {self.ranks} context-parallel ranks: rows are padded to a multiple of "
                f"{2 * self.ranks}. Give the model what split_micro_batch gives."
            )

    def require_held(self, tokens: int) -> None:
        """Raise ValueError where a rank comes with another number of tokens of each row than its own."""
        if tokens != 2 * self.chunk:
            raise ValueError(
                f"{tokens} tokens of each row on one of {self.ranks} context-parallel ranks, with documents of {self.tokens}: "
                f"it has {2 * self.chunk}. Give the model what split_micro_batch gives."
            )

    def pad(self, x_BT: Tensor, value: int) -> Tensor:
        """Whole rows with their padding."""
        return F.pad(x_BT, (0, self.padded - self.tokens), value=value)

    def take(self, x_BT: Tensor, rank: int) -> Tensor:
        """The tokens of a rank, of whole rows with their padding: (B, 2·C)."""
        return torch.cat([x_BT[:, chunk * self.chunk : (chunk + 1) * self.chunk] for chunk in self.chunks(rank)], 1)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Whole rows without padding (B, T, ...), from every rank's tokens (B, 2·C, ...) in rank order."""
        halves = [part.split(self.chunk, 1) for part in parts]
        return torch.cat([early for early, _ in halves] + [late for _, late in reversed(halves)], 1)[:, : self.tokens]


class Rows(Inputs, Protocol):
    """Whole rows on the host, as a dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


Micro = TypeVar("Micro", bound=Rows)


def split_micro_batch(micro: Micro, group: Group) -> Micro:
    """The part of whole rows that this rank of `group` computes: 2·C tokens of each row, with their labels and positions.

    Documents stay whole and are padded, since each rank must know who sees whom. Padding is token 0 at position 0, counts for
    nothing, and is a document of its own. `live_tokens` counts this rank's labels; over the group they add up to the row's.
    """
    if group.size == 1:
        return micro
    split = Split(micro.tokens_BT.size(1), group.size)
    labels_BT = split.take(split.pad(micro.labels_BT, IGNORED), group.index)
    documents_BT = split.pad(micro.documents_BT, 0)
    documents_BT[:, split.tokens :] = micro.documents_BT[:, -1:] + 1
    return replace(
        micro,
        tokens_BT=split.take(split.pad(micro.tokens_BT, 0), group.index),
        labels_BT=labels_BT,
        positions_BT=split.take(split.pad(micro.positions_BT, 0), group.index),
        documents_BT=documents_BT,
        _live=int((labels_BT != IGNORED).sum()),
    )
