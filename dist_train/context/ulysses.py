"""All-to-all attention (DeepSpeed-Ulysses, arXiv:2309.14509): whole rows, a part of the heads.

One exchange takes queries, keys and values from "my tokens of all heads" to "all tokens of my heads", in their natural order;
between it and the exchange back runs the attention of one device, with everything that it can do. Its backward is the same
two exchanges the other way round. Dropout draws from the default generator, which differs over context-parallel ranks.

On each rank and layer forward sends (cp-1)/cp · B·L·(2·N + 2·K)·H elements; backward sends as many.

Shapes: B rows, T tokens of a whole row with padding, L = T/cp those held here, N query heads, K key/value heads, H head
width; M heads of any kind, m = M/cp those computed here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from dist_train.comm.collectives import Collectives
from dist_train.context.split import Split
from dist_train.mesh.mesh import Group
from dist_train.model.attention import AttentionCore
from dist_train.ops.attention import Documents, prepare_documents

if TYPE_CHECKING:
    from dist_train.model.transformer import Context


class WholeDocuments(NamedTuple):
    """Documents of whole rows with padding, whose tokens are split."""

    inner: Documents


def prepare_ulysses(
    group: Group, documents_BT: Tensor, dtype: torch.dtype, device: torch.device, width: int, dropout: float, backend: str
) -> WholeDocuments:
    """What `UlyssesCore` will ask for. `documents_BT`: whole rows with padding, of `split_micro_batch`."""
    Split(documents_BT.size(1), group.size).require_padded()
    return WholeDocuments(prepare_documents(documents_BT, dtype, device, width, dropout, backend))


def require_heads(heads: int, kv_heads: int, ranks: int) -> None:
    """Raise ValueError where heads do not come out equal on the ranks."""
    if heads % ranks or kv_heads % ranks:
        raise ValueError(
            f"all-to-all attention gives each of {ranks} context-parallel ranks whole heads: {ranks} must divide {heads} heads "
            f"and {kv_heads} key/value heads. Set mesh.cp to a common divisor, or context=ring, which splits no heads."
        )


class UlyssesCore(AttentionCore):
    """Attention over rows that lie on the ranks of a group. Without documents (generation) a row is whole on each rank."""

    def __init__(self, backend: str, dropout: float, group: Group, comm: Collectives) -> None:
        super().__init__(backend, dropout)
        self.group, self.comm = group, comm

    def forward(self, q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, context: Context) -> Tensor:
        if context.documents is None:
            return super().forward(q_BNLH, k_BKLH, v_BKLH, context)
        documents, ranks = cast(WholeDocuments, context.documents).inner, self.group.size
        heads, kv_heads = q_BNLH.size(1), k_BKLH.size(1)
        require_heads(heads, kv_heads, ranks)
        Split(documents.numbers_BT.size(1), ranks).require_held(q_BNLH.size(2))
        parts = [x.unflatten(1, (ranks, -1)) for x in (q_BNLH, k_BKLH, v_BKLH)]
        mixed = _ToHeads.apply(torch.cat(parts, 2).flatten(1, 2), self)  # for each rank its queries, keys and values
        q_BnTH, k_BkTH, v_BkTH = mixed.split([heads // ranks, kv_heads // ranks, kv_heads // ranks], 1)
        out_BnTH = super().forward(q_BnTH, k_BkTH, v_BkTH, context._replace(documents=documents))
        return _ToTokens.apply(out_BnTH, self)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BMLH: Tensor, core: UlyssesCore) -> Tensor:
        ctx.core = core
        return to_heads(x_BMLH, core)

    @staticmethod
    def backward(ctx: Any, grad_BmTH: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return to_tokens(grad_BmTH, ctx.core), None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BmTH: Tensor, core: UlyssesCore) -> Tensor:
        ctx.core = core
        return to_tokens(x_BmTH, core)

    @staticmethod
    def backward(ctx: Any, grad_BMLH: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return to_heads(grad_BMLH, ctx.core), None


def to_heads(x_BMLH: Tensor, core: UlyssesCore) -> Tensor:
    """x_BmTH: from this rank's tokens of all heads to all tokens of this rank's heads."""
    ranks = core.group.size
    sent = x_BMLH.unflatten(1, (ranks, -1)).movedim(1, 0).transpose(2, 3).contiguous()  # (cp, B, L, m, H)
    received = torch.empty_like(sent)
    core.comm.all_to_all(received, sent, core.group).wait()
    return Split(ranks * x_BMLH.size(2), ranks).join(received.unbind()).transpose(1, 2)


def to_tokens(x_BmTH: Tensor, core: UlyssesCore) -> Tensor:
    """x_BMLH: the way back, and the adjoint, of `to_heads`."""
    ranks = core.group.size
    split, x_BTmH = Split(x_BmTH.size(2), ranks), x_BmTH.transpose(1, 2)
    sent = torch.stack([split.take(x_BTmH, rank) for rank in range(ranks)])  # (cp, B, L, m, H)
    received = torch.empty_like(sent)
    core.comm.all_to_all(received, sent, core.group).wait()
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2)
