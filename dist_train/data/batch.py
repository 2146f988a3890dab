"""What a forward pass reads. Shapes: B sequences of a micro-batch, T = seq_len tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dist_train.data.rows import IGNORED, RowBlock


@dataclass(frozen=True)
class MicroBatch:
    """Rows of packed documents, which neither attend to nor predict each other."""

    tokens_BT: Tensor  # int64
    labels_BT: Tensor  # int64: the token that position t must predict; -100: not counted (last of a document, padding)
    positions_BT: Tensor  # int64: from 0 in each document, and from 0 where a row goes on with a document cut before it
    documents_BT: Tensor  # int32: number of the document within its row; padding is a document of its own
    sample_ids: tuple[int, ...]  # row numbers in the split, the same in every epoch; -1: a row of padding
    _live: int | None = field(default=None, repr=False, compare=False)

    @property
    def live_tokens(self) -> int:
        """Labels that count. Known without touching a device where the batch was made from rows."""
        return int((self.labels_BT != IGNORED).sum()) if self._live is None else self._live

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same batch on `device`; documents stay on the host, where attention reads their lengths without a wait."""
        moved = {name: getattr(self, name).to(device) for name in ("tokens_BT", "labels_BT", "positions_BT")}
        return replace(self, **moved)

    @staticmethod
    def from_rows(block: RowBlock, sample_ids: tuple[int, ...]) -> MicroBatch:
        """Tensors that share the memory of the block's arrays."""
        return MicroBatch(
            tokens_BT=torch.from_numpy(block.tokens_BT),
            labels_BT=torch.from_numpy(block.labels_BT),
            positions_BT=torch.from_numpy(block.positions_BT),
            documents_BT=torch.from_numpy(block.documents_BT),
            sample_ids=sample_ids,
            _live=block.live_tokens,
        )
