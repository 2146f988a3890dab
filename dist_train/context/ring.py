"""Ring attention (Liu et al., arXiv:2310.01889), with the zig-zag of `split.py` for balance and packed documents.

Every rank keeps its queries. Keys and values go round the ring, key/value heads alone, and while one rank's are computed on, the
next ones are under way. The softmax over all keys is put together by the log-sum-exp of each part (arXiv:2205.14135), in fp32.
Backward goes round once more: gradients of keys and values follow them a step behind, each rank adding its own, and end
where they belong. Sums have a fixed order, so a rerun gives the same bits.

On each rank and layer forward sends (cp-1)/cp · 2·B·T·K·H elements; backward sends as many, and as many again in fp32.

Shapes: B rows, T tokens of a whole row with padding, L = T/cp those held here, N query heads, K key/value heads, H head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from dist_train.comm.collectives import Collectives, Handle
from dist_train.context.split import Split
from dist_train.context.visible import Rectangle, rectangles
from dist_train.mesh.mesh import Group
from dist_train.model.attention import AttentionCore
from dist_train.ops.attention import Documents, flash_backward, flash_forward, prepare_documents
from dist_train.ops.attention.documents import document_runs
from dist_train.ops.kept import kept

if TYPE_CHECKING:
    from dist_train.model.transformer import Context


class RingDocuments(NamedTuple):
    """Who sees whom, of one rank, for all layers of a forward pass."""

    split: Split
    own: Documents  # of the tokens held here
    others: tuple[tuple[Rectangle, ...], ...]  # queries held here and the keys that arrive, step by step from the second


def prepare_ring(
    group: Group, documents_BT: Tensor, dtype: torch.dtype, device: torch.device, width: int, dropout: float, backend: str
) -> RingDocuments:
    """What `RingCore` will ask for. `documents_BT`: whole rows with padding, of `split_micro_batch`; best on the host."""
    split = Split(documents_BT.size(1), group.size)
    split.require_padded()
    runs_BT = document_runs(documents_BT.cpu())
    # The chunks held here stand in order, and a document that reaches from one to the other has no token of these rows
    # between them that is not its own: among them, tokens see each other as those of any packed row do.
    own = prepare_documents(split.take(runs_BT, group.index), dtype, device, width, 0.0, backend)
    sources = ((group.index - step) % group.size for step in range(1, group.size))
    return RingDocuments(split, own, tuple(rectangles(runs_BT, split, group.index, source) for source in sources))


class RingCore(AttentionCore):
    """Attention over rows that lie on the ranks of a group. Without documents (generation) a row is whole on each rank."""

    def __init__(self, backend: str, group: Group, comm: Collectives) -> None:
        super().__init__(backend, 0.0)
        self.group, self.comm = group, comm

    def forward(self, q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, context: Context) -> Tensor:
        if context.documents is None:
            return super().forward(q_BNTH, k_BKSH, v_BKSH, context)
        documents = cast(RingDocuments, context.documents)
        documents.split.require_held(q_BNTH.size(2))
        return _Ring.apply(q_BNTH, k_BKSH, v_BKSH, documents, self)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_BNLH: Tensor, k_BKLH: Tensor, v_BKLH: Tensor, documents: RingDocuments, core: RingCore) -> Tensor:
        out, lse = kept(lambda: _forward(q_BNLH, k_BKLH, v_BKLH, documents, core))
        ctx.save_for_backward(q_BNLH, k_BKLH, v_BKLH, out, lse)
        ctx.documents, ctx.core = documents, core
        return out

    @staticmethod
    def backward(ctx: Any, grad_BNLH: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse = ctx.saved_tensors
        return *_backward(grad_BNLH, q, k, v, out, lse, ctx.documents, ctx.core), None, None


def _forward(q: Tensor, k: Tensor, v: Tensor, documents: RingDocuments, core: RingCore) -> list[Tensor]:
    """[out_BNLH in q's dtype, lse_BNL in fp32 or wider]."""
    scale, travels = q.size(-1) ** -0.5, _Circle(torch.stack((k, v)), core)
    part, lse = flash_forward(q, k, v, True, scale, documents.own, core.backend)
    out = part.to(lse.dtype)
    for seen in documents.others:
        k, v = travels.next()
        for rows, queries, keys in seen:
            place = rows, slice(None), queries
            part, part_lse = flash_forward(q[place], k[rows, :, keys], v[rows, :, keys], False, scale, None, core.backend)
            _merge_(out[place], lse[place], part, part_lse)
    return [out.to(q.dtype), lse]


def _merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Take in attention over more keys: outputs weigh as exp(lse). In place, in the precision of `out`."""
    out.lerp_(part.to(out.dtype), torch.sigmoid(part_lse - lse)[..., None])
    torch.logaddexp(lse, part_lse, out=lse)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: RingDocuments, core: RingCore
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v. `out` and `lse` are those over all keys, so each part's gradients are whole where it is computed."""
    scale, dtype, travels = q.size(-1) ** -0.5, k.dtype, _Circle(torch.stack((k, v)), core)
    found = flash_backward(grad, q, k, v, out, lse, True, scale, documents.own, core.backend)
    grad_q = found[0].to(lse.dtype, copy=True)
    own = torch.stack(found[1:]).to(lse.dtype)  # waits for what the others add to it
    sums, arriving, handle = torch.empty_like(own), torch.empty_like(own), Handle()
    for step, seen in enumerate(documents.others):
        k, v = travels.next()
        parts = []
        for rows, queries, keys in seen:
            place = rows, slice(None), queries
            given = grad[place], q[place], k[rows, :, keys], v[rows, :, keys], out[place], lse[place]
            part_q, *part = flash_backward(*given, False, scale, None, core.backend)
            grad_q[place] += part_q
            parts.append(part)
        handle.wait()  # the sum of those who had these keys before, and nobody's for the first of them
        sums, arriving = (arriving, sums) if step else (sums.zero_(), arriving)
        for (rows, _, keys), part in zip(seen, parts):
            for total, one in zip(sums, part):
                total[rows, :, keys] += one
        handle = core.comm.rotate(arriving, sums, core.group)
    handle.wait()
    grad_k, grad_v = own.add_(arriving).to(dtype)
    return grad_q.to(q.dtype), grad_k, grad_v


class _Circle:
    """Every rank's tensor in turn, as it comes round: `next` gives the one that arrives, while the one after it sets out."""

    def __init__(self, x: Tensor, core: RingCore) -> None:
        self._core, self._left = core, core.group.size - 1
        self._held, self._coming = x, torch.empty_like(x)
        self._handle = self._start()

    def _start(self) -> Handle:
        self._left -= 1
        return self._core.comm.rotate(self._coming, self._held, self._core.group)

    def next(self) -> Tensor:
        self._handle.wait()
        self._held, self._coming = self._coming, self._held
        if self._left:
            self._handle = self._start()
        return self._held
