"""A decoder-only transformer, from token ids to logits.

Shapes:
    B  rows of the micro-batch         D  hidden width           N  query heads
    T  tokens of a row                 F  feed-forward width     K  key/value heads (K divides N)
    S  keys a query may look at        V  vocabulary             H  head width, D = N·H

Two families share every line here and differ in three parts:
    llama   RMSNorm, rotary positions (inside attention), gated feed-forward       (arXiv:2302.13971)
    gpt     LayerNorm, learned positions (added to the embedding), plain feed-forward       (GPT-2)
Both are pre-norm: a block adds attention(norm(x)), then mlp(norm(x)), to the residual stream x_BTD.

A rank may hold a part of the model only (`Cut`), with the names that it has in the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from dist_train.config.schema import ModelConfig
from dist_train.model.attention import Attention, LayerCache
from dist_train.model.mlp import make_mlp
from dist_train.model.norm import make_norm
from dist_train.ops.attention import Documents, prepare_documents
from dist_train.ops.cross_entropy import cross_entropy_sum
from dist_train.ops.linear_cross_entropy import linear_cross_entropy_sum
from dist_train.ops.rotary import rotary_table


class Cut(NamedTuple):
    """Consecutive blocks of a model, `first <= i < last`, with the embedding before block 0 and the head after the last one."""

    first: int
    last: int


class Inputs(Protocol):
    """What forward reads of rows of tokens, and the labels of a loss: `data.MicroBatch`, which this layer does not know."""

    @property
    def tokens_BT(self) -> Tensor: ...
    @property
    def labels_BT(self) -> Tensor: ...
    @property
    def positions_BT(self) -> Tensor: ...
    @property
    def documents_BT(self) -> Tensor: ...


class Context(NamedTuple):
    """What all blocks of one forward pass share, made once: where tokens stand, and who may see whom."""

    shape: tuple[int, int]  # rows, tokens of a row
    rotation: tuple[Tensor, Tensor] | None  # (cos_BT1H, sin_BT1H) in fp32; None: positions are in the embedding
    documents: Documents | None  # None: plain causal


def _table(rows: int, columns: int) -> nn.Embedding:
    """Without nn.Embedding's own initialisation, which on the meta device imports torch's compiler: 2 s of a rank's start."""
    return nn.Embedding.from_pretrained(torch.empty(rows, columns), freeze=False)


class Transformer(nn.Module):
    """The model, or of a model cut in several parts those that one rank holds, in the order of their blocks."""

    def __init__(
        self, config: ModelConfig, attention: str = "auto", fused: bool = True, cuts: Sequence[Cut] | None = None
    ) -> None:
        super().__init__()
        self.config, self.attention = config, attention
        self.cuts = tuple(cuts or [Cut(0, config.layers)])
        if self.begins:
            self.embed = _table(config.vocab, config.hidden)
            self.positions = _table(config.max_positions, config.hidden) if config.family == "gpt" else None
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList()
        for cut in self.cuts:
            for layer in range(*cut):
                self.blocks.add_module(str(layer), Block(config, attention, fused))
        if self.ends:
            self.norm = make_norm(config, fused)
            self.head = Head(config, fused)
        self.tie()
        self.prepare_documents = prepare_documents  # an attribute, since it is replaced where a row lies on several ranks

    @property
    def begins(self) -> bool:
        """Whether the embedding is here."""
        return any(cut.first == 0 for cut in self.cuts)

    @property
    def ends(self) -> bool:
        """Whether the head is here."""
        return any(cut.last == self.config.layers for cut in self.cuts)

    def tie(self) -> None:
        """Make the head the embedding's own Parameter where the config says so and both are here (arXiv:1608.05859)."""
        if self.config.tie_embeddings and self.begins and self.ends:
            self.head.weight = self.embed.weight

    def forward(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor | None = None,
        documents_BT: Tensor | None = None,
        caches: Sequence[LayerCache] | None = None,
        labels_BT: Tensor | None = None,
        z_loss: float = 0.0,
        cut: int = 0,
        x_BTD: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """logits_BTV in the parameters' dtype; with labels the objective and the cross entropy (`cross_entropy_sum`).

        `tokens_BT` int64. `positions_BT` int64 restarts at 0 with each document; None counts from 0 along the row.
        `documents_BT` (any integer dtype) numbers the documents of a row, and no token sees another document; None
        means one document a row. On the host they cost a CUDA device no wait. `caches`, one for each block of the whole
        model, hold what came before. `labels_BT` int64, -100 where a token does not count; the logits of a loss never exist
        all at once.

        Of a model in parts, part `cut` of those that are here runs: it takes the residual stream `x_BTD` of the part before it,
        where that is not the first, and gives its own, where it is not the last.
        """
        part = self.cuts[cut]
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.size(1), device=tokens_BT.device)[None]
        if part.first == 0:
            x_BTD = self.embed(tokens_BT)
            if self.positions is not None:
                x_BTD = x_BTD + self.positions(positions_BT.expand_as(tokens_BT))
            x_BTD = self.dropout(x_BTD)
        assert x_BTD is not None, "only the first part of a model begins with tokens"
        context = self.context(tokens_BT, positions_BT, documents_BT, x_BTD.dtype)
        for layer in range(*part):
            block = self.blocks.get_submodule(str(layer))
            x_BTD = block(x_BTD, context) if caches is None else block(x_BTD, context, caches[layer])
        if part.last < self.config.layers:
            return x_BTD
        return self.head(self.norm(x_BTD), context.shape, labels_BT, z_loss)

    def context(self, tokens_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor | None, dtype: torch.dtype) -> Context:
        """Shape, rotation table and documents for blocks that compute in `dtype`."""
        rotation, documents, width = None, None, self.config.hidden // self.config.heads
        if self.config.family == "llama":
            rotation = rotary_table(positions_BT, width, self.config.rope_theta)
        if documents_BT is not None:
            dropout = self.config.dropout if self.training else 0.0
            documents = self.prepare_documents(documents_BT, dtype, tokens_BT.device, width, dropout, self.attention)
        return Context((tokens_BT.size(0), tokens_BT.size(1)), rotation, documents)


class Head(nn.Linear):
    """From the residual stream to logits, or to the loss."""

    def __init__(self, config: ModelConfig, fused: bool) -> None:
        super().__init__(config.hidden, config.vocab, bias=False)
        self.fused = fused

    def forward(  # type: ignore[override]
        self, x_BTD: Tensor, shape: tuple[int, int], labels_BT: Tensor | None = None, z_loss: float = 0.0
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`shape`: rows and tokens of a row, for whoever gets `x_BTD` as tokens in a line."""
        if labels_BT is None:
            return super().forward(x_BTD)
        if self.fused:
            return linear_cross_entropy_sum(x_BTD, self.weight, labels_BT, z_loss)
        return cross_entropy_sum(super().forward(x_BTD), labels_BT, z_loss, fused=False)


class Block(nn.Module):
    """One layer: the unit of recompute and of sharding."""

    def __init__(self, config: ModelConfig, attention: str, fused: bool) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, fused)
        self.attention = Attention(config, attention, fused)
        self.mlp_norm = make_norm(config, fused)
        self.mlp = make_mlp(config, fused)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        seen_BTD = self.dropout(self.attention(self.attention_norm(x_BTD), context, cache))
        normed_BTD, x_BTD = self.mlp_norm(seen_BTD, x_BTD)
        return x_BTD + self.dropout(self.mlp(normed_BTD))
