"""What a run proves about itself before its first step, on its own model and its own first batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class IsolationError(RuntimeError):
    """A document of a packed row can see another one."""


Logits = Callable[[Tensor, Tensor, Tensor], Tensor]  # of tokens, positions and documents


def prove_isolation(model: nn.Module, logits: Logits, row_T: Tensor, vocab: int) -> None:
    """Cut a row in two documents, change the first, and require that the second's logits do not move by one bit.

    `logits` runs the model. Raises IsolationError. Resetting positions alone does not isolate documents; attention must be kept
    apart too.
    """
    length, cut = row_T.numel(), row_T.numel() // 2
    documents_BT = (torch.arange(length, device=row_T.device) >= cut).to(torch.int32)[None]
    positions_BT = torch.cat([torch.arange(cut), torch.arange(length - cut)]).to(row_T.device)[None]
    changed_T = row_T.clone()
    changed_T[:cut] = (changed_T[:cut] + 1) % vocab
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            before, after = (logits(row[None], positions_BT, documents_BT)[0, cut:] for row in (row_T, changed_T))
    finally:
        model.train(training)
    if not torch.equal(before, after):
        moved = (before - after).abs().max().item()
        raise IsolationError(f"packed documents see each other: changing one moved the next one's logits by {moved:.3g}.")
