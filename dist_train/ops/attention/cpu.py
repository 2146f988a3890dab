"""torch's flash attention for CPUs, document by document, with its log-sum-exp.

The kernel counts keys of a causal rectangle from the first query, knows no boundaries but a mask, reports a log-sum-exp of 0 for
a row without keys, and dies of an empty input; what lies here hides the first three, and callers must not hand it the last.

A mask costs what the whole square costs. So packed rows are cut at their documents and each piece is causal by itself;
neighbours too short to be worth a call share a piece with a small mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from dist_train.ops.attention.reference import repeat_heads
from dist_train.ops.native import is_native

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
# Whether it groups key/value heads itself: it does in 2.13; an older one read past the end of a smaller k without a word.
_GROUPS = torch.torch_version.TorchVersion(torch.__version__) >= "2.13"
_SHORT = 32  # tokens; shorter documents are computed together (0.3 of the time of a call for each, at 8 tokens)


class Piece(NamedTuple):
    rows: slice
    tokens: slice
    runs_t: Tensor | None  # document of each token, where the piece holds several


def cut(numbers_BT: Tensor) -> Iterator[Piece]:
    """Pieces that cover all tokens once and cut no document."""
    numbers = numbers_BT.cpu().numpy()
    changes = numbers[:, 1:] != numbers[:, :-1]
    rows, tokens = numbers.shape
    whole = 0  # rows before this one that are one document each, waiting for one call together
    for b in range(rows):
        bounds = [0, *(changes[b].nonzero()[0] + 1).tolist(), tokens]
        if len(bounds) == 2:
            whole += 1
            continue
        if whole:
            yield Piece(slice(b - whole, b), slice(0, tokens), None)
            whole = 0
        runs_T = torch.from_numpy(changes[b].cumsum())
        yield from _cut_row(slice(b, b + 1), bounds, torch.cat((runs_T.new_zeros(1), runs_T)))
    if whole:
        yield Piece(slice(rows - whole, rows), slice(0, tokens), None)


def _cut_row(row: slice, bounds: list[int], runs_T: Tensor) -> Iterator[Piece]:
    start, held = 0, 0  # where the documents begin that wait for company, and how many they are

    def piece(stop: int) -> Piece:
        return Piece(row, slice(start, stop), runs_T[start:stop] if held > 1 else None)

    for begin, end in pairwise(bounds):
        if end - begin >= _SHORT and held:
            yield piece(begin)
            start, held = begin, 0
        held += 1
        if end - start >= _SHORT:
            yield piece(end)
            start, held = end, 0
    if held:
        yield piece(bounds[-1])


def forward(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, causal: bool, scale: float, mask_B1TS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(out_BNTH, lse_BNT), lse in fp32 (fp64), -inf for a row without keys. `causal` needs T = S and no mask."""
    if not _GROUPS:
        k_BKSH, v_BKSH = repeat_heads(q_BNTH, k_BKSH, v_BKSH)
    q, k, v = (_computed(x) for x in (q_BNTH, k_BKSH, v_BKSH))
    bias = None if mask_B1TS is None else _bias(mask_B1TS, q.dtype)
    out, lse_BNT = _forward(q, k, v, 0.0, causal, attn_mask=bias, scale=scale)
    if mask_B1TS is not None:
        lse_BNT = lse_BNT.masked_fill(~mask_B1TS.any(-1), -torch.inf)
    return out.to(q_BNTH.dtype), lse_BNT


def backward(
    grad_BNTH: Tensor,
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    out_BNTH: Tensor,
    lse_BNT: Tensor,
    causal: bool,
    scale: float,
    mask_B1TS: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; `out` and `lse` may be those over more keys than these."""
    heads = k_BKSH.size(1)
    if not _GROUPS:
        k_BKSH, v_BKSH = repeat_heads(q_BNTH, k_BKSH, v_BKSH)
    grad, q, k, v, out = (_computed(x) for x in (grad_BNTH, q_BNTH, k_BKSH, v_BKSH, out_BNTH))
    bias = None if mask_B1TS is None else _bias(mask_B1TS, q.dtype)
    if mask_B1TS is not None:
        lse_BNT = lse_BNT.masked_fill(lse_BNT == -torch.inf, 0.0)  # its weights are exp(-inf - 0) = 0
    grad_q, *others = _backward(grad, q, k, v, out, lse_BNT, 0.0, causal, attn_mask=bias, scale=scale)
    grad_k, grad_v = (x if x.size(1) == heads else x.unflatten(1, (heads, -1)).sum(2) for x in others)
    return grad_q.to(q_BNTH.dtype), grad_k.to(q_BNTH.dtype), grad_v.to(q_BNTH.dtype)


def packed_forward(
    q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor, numbers_BT: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(out_BNTH, lse_BNT), causal within each document; `numbers_BT` None: one document a row."""
    if numbers_BT is None:
        return forward(q_BNTH, k_BKTH, v_BKTH, True, scale)
    out_BNTH = empty_as_made(q_BNTH)
    lse_BNT = q_BNTH.new_empty(q_BNTH.shape[:3], dtype=torch.promote_types(q_BNTH.dtype, torch.float32))
    for piece in cut(numbers_BT):
        q, k, v = (x[piece.rows, :, piece.tokens] for x in (q_BNTH, k_BKTH, v_BKTH))
        out, lse = forward(q, k, v, piece.runs_t is None, scale, _piece_mask(piece))
        out_BNTH[piece.rows, :, piece.tokens], lse_BNT[piece.rows, :, piece.tokens] = out, lse
    return out_BNTH, lse_BNT


def packed_backward(
    grad_BNTH: Tensor,
    q_BNTH: Tensor,
    k_BKTH: Tensor,
    v_BKTH: Tensor,
    out_BNTH: Tensor,
    lse_BNT: Tensor,
    numbers_BT: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v of `packed_forward`."""
    given = (grad_BNTH, q_BNTH, k_BKTH, v_BKTH, out_BNTH, lse_BNT)
    if numbers_BT is None:
        return backward(*given, True, scale)
    found = empty_as_made(q_BNTH), empty_as_made(k_BKTH), empty_as_made(v_BKTH)
    for piece in cut(numbers_BT):
        grad, q, k, v, out, lse = (x[piece.rows, :, piece.tokens] for x in given)
        gradients = backward(grad, q, k, v, out, lse, piece.runs_t is None, scale, _piece_mask(piece))
        for whole, part in zip(found, gradients, strict=True):
            whole[piece.rows, :, piece.tokens] = part
    return found


def empty_as_made(x_BNTH: Tensor) -> Tensor:
    """An empty tensor of this shape in the memory layout of the model's projections, (B, T, N, H)."""
    return torch.empty_like(x_BNTH.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)


def _computed(x: Tensor) -> Tensor:
    return x if is_native(x.dtype) else x.float()


def _bias(mask_B1TS: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask_B1TS.shape, dtype=dtype).masked_fill_(~mask_B1TS, -torch.inf)


def _piece_mask(piece: Piece) -> Tensor | None:
    if piece.runs_t is None:
        return None
    return (piece.runs_t[:, None] == piece.runs_t).tril_()[None, None]
