"""Embedding, positions and head on the ranks of a tensor group, with the vocabulary split over them.

Shapes: B rows, T tokens, N = B·T, n tokens of a rank in the padded line, D width, V vocabulary, U rows of it on this rank, C
tokens in a chunk. Rank i has rows i·⌈V/r⌉ and on; the last of the r ranks may have fewer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_train.comm.collectives import Collectives, Handle
from dist_train.comm.differentiable import gather_features, sum_to_copies, sum_to_tokens
from dist_train.mesh.mesh import Group
from dist_train.model.transformer import Head
from dist_train.ops.cross_entropy import IGNORED, row_gradient, row_terms
from dist_train.ops.linear_cross_entropy import add_weight_gradient_, check_labels, chunk_tokens
from dist_train.ops.native import product_dtype
from dist_train.tensor.linear import SharedLayer, fan_out
from dist_train.tensor.stream import own_run, pad_line

_NOWHERE = -1  # a token that no rank has


def vocabulary_parts(vocab: int, group: Group) -> list[slice]:
    """Which rows of the vocabulary each rank has. Raises ValueError where one would have none."""
    each = -(-vocab // group.size)
    if each * (group.size - 1) >= vocab:
        raise ValueError(
            f"model.vocab={vocab}: in {group.size} parts of {each} the last mesh.tp={group.size} ranks would have no token; "
            f"set model.vocab above {each * (group.size - 1)}, or mesh.tp lower."
        )
    return [slice(at, min(at + each, vocab)) for at in range(0, vocab, each)]


class VocabularyEmbedding(SharedLayer):
    """Rows of tokens, each from the rank that has it: a sum in which one addend is not zero."""

    def __init__(self, embed: nn.Embedding, vocab: int, group: Group, comm: Collectives, sequence: bool) -> None:
        super().__init__(group, comm, sequence)
        self.weight, self.vocab, self.part = embed.weight, vocab, vocabulary_parts(vocab, group)[group.index]

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """x_BTD, or x_nD of this rank's tokens."""
        over_ranks = sum_to_tokens if self.sequence else sum_to_copies
        return over_ranks(self.addend(tokens_BT), self.group, self.comm)

    def addend(self, tokens_BT: Tensor) -> Tensor:
        """What this rank adds to the sum, in the shape of the stream or for all tokens in a line."""
        fine = ((tokens_BT >= 0) & (tokens_BT < self.vocab)).all()
        torch._assert_async(fine, f"a token is out of bounds for a vocabulary of {self.vocab}")
        tokens = pad_line(tokens_BT.flatten(), self.group, _NOWHERE) if self.sequence else tokens_BT
        here = (tokens >= self.part.start) & (tokens < self.part.stop)
        # A row for a token that is not here is looked up too, and counts for nothing: the shapes do not depend on values.
        found = F.embedding((tokens - self.part.start).where(here, 0), self.weight)
        return found.where(here[..., None], 0.0)


class OwnPositions(nn.Module):
    """Learned positions of this rank's tokens, from a whole table."""

    def __init__(self, positions: nn.Embedding, group: Group) -> None:
        super().__init__()
        self.weight, self.group = positions.weight, group

    def forward(self, positions_BT: Tensor) -> Tensor:
        """x_nD."""
        return F.embedding(own_run(pad_line(positions_BT.flatten(), self.group), self.group), self.weight)


class VocabularyHead(SharedLayer):
    """`Head` with the vocabulary split: the loss from a chunk of tokens at a time, or all logits on every rank."""

    def __init__(self, head: Head, vocab: int, group: Group, comm: Collectives, sequence: bool) -> None:
        super().__init__(group, comm, sequence)
        self.weight, self.fused, self.parts = head.weight, head.fused, vocabulary_parts(vocab, group)

    def forward(
        self, x_BTD: Tensor, shape: tuple[int, int], labels_BT: Tensor | None = None, z_loss: float = 0.0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As `Head`; every rank has the same logits, or the same loss."""
        if labels_BT is not None:
            options = z_loss, torch.is_grad_enabled()
            return _VocabularyLoss.apply(self, x_BTD, self.weight, labels_BT, *options)
        rows, tokens = shape
        (logits,) = fan_out(self, x_BTD, [self.weight], [None])
        sizes = [part.stop - part.start for part in self.parts]
        return gather_features(logits.flatten(0, -2)[: rows * tokens], sizes, self.group, self.comm).view(rows, tokens, -1)


class _Chunk(NamedTuple):
    run: slice  # among the tokens that this rank has of the stream
    hidden_CD: Tensor  # of all ranks, where these have different tokens
    labels_C: Tensor
    logits_CU: Tensor
    terms: Tensor  # (r, 3, C): what each rank knows of its logits
    arriving: Handle


class _Loss:
    """Sums over chunks. Of three chunks at a time, one is gathered, one multiplied, and the terms of one travel."""

    def __init__(self, layer: VocabularyHead, x_ND: Tensor, weight_UD: Tensor, labels_N: Tensor, z_loss: float) -> None:
        self.layer, self.x_ND, self.z_loss = layer, x_ND, z_loss
        self.wide = torch.promote_types(x_ND.dtype, torch.float32)
        self.dtype = product_dtype(x_ND.dtype, x_ND.device)
        self.weight_UD = weight_UD.to(x_ND.dtype).to(self.dtype)
        self.ranks = layer.group.size if layer.sequence else 1  # that have different tokens
        self.labels_RN = (pad_line(labels_N, layer.group, IGNORED) if layer.sequence else labels_N).view(self.ranks, -1)
        self.objective, self.entropy = (x_ND.new_zeros((), dtype=self.wide) for _ in range(2))
        self.dx_ND: Tensor | None = None
        self.dweight_UD: Tensor | None = None

    def run(self, wants_x: bool, wants_weight: bool) -> None:
        self.dx_ND = torch.empty_like(self.x_ND) if wants_x else None
        self.dweight_UD = torch.zeros_like(self.weight_UD, dtype=self.wide) if wants_weight else None
        count = self.x_ND.size(0)
        together = chunk_tokens(count * self.ranks, self.weight_UD.size(0), self.x_ND.device)
        step = max(1, together // self.ranks)
        runs = [slice(start, min(start + step, count)) for start in range(0, count, step)]
        memory = [self.weight_UD.new_empty(min(step, count) * self.ranks, self.weight_UD.size(0)) for _ in runs[:2]]
        arriving = self._gather(runs[0])
        waiting: _Chunk | None = None
        finish: Callable[[], None] | None = None
        for number, run in enumerate(runs):
            hidden_CD, handle = arriving
            handle.wait()
            if number + 1 < len(runs):
                arriving = self._gather(runs[number + 1])
            chunk = self._multiply(run, hidden_CD.to(self.dtype), memory[number % 2])
            if waiting is not None:
                finish = self._finish(waiting, finish)
            waiting = chunk
        if waiting is not None:
            finish = self._finish(waiting, finish)
        if finish is not None:
            finish()

    def _gather(self, run: slice) -> tuple[Tensor, Handle]:
        return self.layer.gather(self.x_ND[run])

    def _multiply(self, run: slice, hidden_CD: Tensor, memory_CU: Tensor) -> _Chunk:
        """The logits of a chunk, and what this rank knows of their loss on its way to the others."""
        layer, logits_CU = self.layer, memory_CU[: hidden_CD.size(0)]
        labels_C = self.labels_RN[:, run].flatten()
        torch.mm(hidden_CD, self.weight_UD.t(), out=logits_CU)
        own = torch.stack(row_terms(logits_CU, labels_C, layer.parts[layer.group.index].start, layer.fused))
        terms = own.new_empty(layer.group.size, *own.shape)
        return _Chunk(run, hidden_CD, labels_C, logits_CU, terms, layer.comm.all_gather(terms, own, layer.group))

    def _finish(self, chunk: _Chunk, before: Callable[[], None] | None) -> Callable[[], None] | None:
        """Loss and gradients of a chunk. The sum of its input's gradient still travels, until what this returns is called."""
        layer = self.layer
        chunk.arriving.wait()
        maximum, total, target = chunk.terms.unbind(1)
        top_C = maximum.amax(0)
        lse_C = top_C + (total * (maximum - top_C).exp()).sum(0).log()
        live_C = chunk.labels_C != IGNORED
        entropy = (lse_C - target.sum(0)).where(live_C, 0.0).sum()
        self.entropy += entropy
        self.objective += entropy + self.z_loss * lse_C.square().where(live_C, 0.0).sum() if self.z_loss else entropy
        if self.dx_ND is None and self.dweight_UD is None:
            return before
        first, one = layer.parts[layer.group.index].start, lse_C.new_ones(())
        slope_CU = row_gradient(one, chunk.logits_CU, chunk.labels_C, lse_C, self.z_loss, first, layer.fused, True)
        finish: Callable[[], None] | None = None
        if self.dx_ND is not None:
            finish = partial(_store, self.dx_ND[chunk.run], *layer.sum((slope_CU @ self.weight_UD).to(self.x_ND.dtype)))
        if self.dweight_UD is not None:
            add_weight_gradient_(self.dweight_UD, slope_CU, chunk.hidden_CD)
        if before is not None:
            before()
        return finish


def _store(place: Tensor, value: Tensor, arriving: Handle) -> None:
    arriving.wait()
    place.copy_(value)


class _VocabularyLoss(torch.autograd.Function):
    """Gradients are made beside the loss, from logits whose memory they take, and scaled in backward: all tokens count alike."""

    @staticmethod
    def forward(
        ctx: Any, layer: VocabularyHead, x_BTD: Tensor, weight_UD: Tensor, labels_BT: Tensor, z_loss: float, grad_enabled: bool
    ) -> tuple[Tensor, Tensor]:
        labels_N = labels_BT.flatten()
        check_labels(labels_N, layer.parts[-1].stop)
        loss = _Loss(layer, x_BTD.reshape(-1, x_BTD.size(-1)), weight_UD, labels_N, z_loss)
        loss.run(*(grad_enabled and wanted for wanted in ctx.needs_input_grad[1:3]))
        ctx.shape, ctx.dtype = x_BTD.shape, weight_UD.dtype
        ctx.save_for_backward(loss.dx_ND, loss.dweight_UD)
        ctx.mark_non_differentiable(loss.entropy)
        return loss.objective, loss.entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Any, ...]:
        dx_ND, dweight_UD = ctx.saved_tensors
        dx = None if dx_ND is None else (dx_ND * upstream).to(dx_ND.dtype).view(ctx.shape)
        dweight = None if dweight_UD is None else (dweight_UD * upstream).to(ctx.dtype)
        return None, dx, dweight, None, None, None
