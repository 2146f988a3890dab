"""What a run proves about itself before its first step, on its own model and its own first batch."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dist_train.data.batch import MicroBatch
from dist_train.data.tokenizer import Tokenizer


class IsolationError(RuntimeError):
    """A document of a packed row can see another one."""


def prove_isolation(model: nn.Module, row_T: Tensor, vocab: int) -> None:
    """Cut a row in two documents, change the first, and require that the second's logits do not move by one bit.

    Raises IsolationError. Resetting positions alone does not isolate documents; attention must be kept apart too.
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
            before, after = (model(row[None], positions_BT, documents_BT)[0, cut:] for row in (row_T, changed_T))
    finally:
        model.train(training)
    if not torch.equal(before, after):
        moved = (before - after).abs().max().item()
        raise IsolationError(f"packed documents see each other: changing one moved the next one's logits by {moved:.3g}.")


def show_batch(micro: MicroBatch, tokenizer: Tokenizer, limit: int = 400) -> str:
    """The first row as text, document by document; what the loss does not count is in ⟦brackets⟧."""
    tokens, labels = micro.tokens_BT[0].tolist(), micro.labels_BT[0].tolist()
    documents = micro.documents_BT[0].tolist()
    parts, at = [], 0
    while at < len(tokens):
        end = at
        while end < len(tokens) and documents[end] == documents[at] and (labels[end] == -100) == (labels[at] == -100):
            end += 1
        text = tokenizer.decode(tokens[at:end])
        parts.append(text if labels[at] != -100 else f"⟦{text}⟧")
        at = end
    text = "".join(parts)
    return text if len(text) <= limit else text[:limit] + " …"
