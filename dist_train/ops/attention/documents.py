"""The documents of packed rows: who may see whom, as a mask and as lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dist_train.ops.attention.select import backend_for


class Documents(NamedTuple):
    """Packed rows in the forms that backends want. A document is a run of equal numbers within a row.

    `prepare_documents` makes the form that one forward pass will need; a missing one is made where it is asked for.
    """

    numbers_BT: Tensor  # any integer dtype, on the host if it came from there
    mask_B1TT: Tensor | None = None
    bounds: Tensor | None = None  # int32: where documents begin in the line of all B·T tokens, and B·T
    longest: int = 0  # tokens, with `bounds`

    def mask(self, device: torch.device) -> Tensor:
        return document_mask(self.numbers_BT.to(device)) if self.mask_B1TT is None else self.mask_B1TT

    def lengths(self, device: torch.device) -> tuple[Tensor, int]:
        if self.bounds is None:
            return document_bounds(self.numbers_BT, device)
        return self.bounds, self.longest


def prepare_documents(
    documents_BT: Tensor, dtype: torch.dtype, device: torch.device, width: int, dropout: float, backend: str
) -> Documents:
    """What attention in `dtype` on `device` with heads `width` wide will ask for, made once for all layers.

    Numbers that lie on the host cost a CUDA device no wait; lengths of numbers on the device must be fetched.
    """
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    chosen = backend_for((dtype, width, "packed", dropout, False), device, backend)
    if chosen in ("sdpa", "math"):
        return Documents(documents_BT, document_mask(documents_BT.to(device)))
    if chosen == "cpu_flash":
        return Documents(documents_BT)
    return Documents(documents_BT, None, *document_bounds(documents_BT, device))


def document_mask(documents_BT: Tensor) -> Tensor:
    """mask_B1TT (bool, true = may look): keys at or before the query and in its document."""
    runs_BT = document_runs(documents_BT)
    same_BTT = runs_BT[:, :, None] == runs_BT[:, None, :]
    return same_BTT.tril_()[:, None]


def document_runs(documents_BT: Tensor) -> Tensor:
    """Documents numbered from 0 in each row (int32), so that a number that comes back later is another document."""
    runs_BT = torch.zeros_like(documents_BT, dtype=torch.int32)
    torch.cumsum(documents_BT[:, 1:] != documents_BT[:, :-1], 1, dtype=torch.int32, out=runs_BT[:, 1:])
    return runs_BT


def document_bounds(documents_BT: Tensor, device: torch.device) -> tuple[Tensor, int]:
    """(bounds, longest): int32 on `device`, see `Documents`; computed on the host."""
    documents_BT = documents_BT.cpu()
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    torch.ne(documents_BT[:, 1:], documents_BT[:, :-1], out=begins_BT[:, 1:])
    total = torch.tensor([documents_BT.numel()])
    bounds = torch.cat((begins_BT.flatten().nonzero().flatten(), total)).to(torch.int32)
    longest = int(bounds.diff().max()) if documents_BT.numel() else 0
    return bounds.to(device, non_blocking=True), longest


def causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """mask_TS (bool): the last query sees all keys, each one before it a key less."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
