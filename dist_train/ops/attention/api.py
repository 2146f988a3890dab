"""Attention for the model, and chunks of attention for context parallelism. Shapes and rules: see the package."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dist_train.ops.attention import cpu
from dist_train.ops.attention.documents import Documents, causal_mask
from dist_train.ops.attention.op import flash_attention, flash_attention_backward, flash_chunk
from dist_train.ops.attention.reference import math_attention, math_backward, math_forward, repeat_heads
from dist_train.ops.attention.select import backend_for
from dist_train.ops.native import is_native


def attention(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    mask: Tensor | Documents | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """out_BNTH in q's dtype; softmax in fp32.

    `mask`: None is plain causal; `Documents` causal within each document; a bool mask_B1TS replaces the causal rule.
    `dropout` drops attention probabilities and draws from torch's global generator. `backend`: a key of `select.WANTED`.
    Raises ConfigError where a named backend cannot serve this.
    """
    queries, keys, scale = q_BNTH.size(2), k_BKSH.size(2), q_BNTH.size(-1) ** -0.5
    if q_BNTH.numel() == 0 or keys == 0:  # no kernel takes these
        return math_attention(q_BNTH, k_BKSH, v_BKSH, causal_mask(queries, keys, q_BNTH.device), 0.0, scale)
    if mask is None and queries > keys:  # the first queries see nothing
        out_BNSH = attention(q_BNTH[:, :, queries - keys :], k_BKSH, v_BKSH, None, dropout, backend)
        return F.pad(out_BNSH, (0, 0, queries - keys, 0))
    kind = _kind(mask, True, queries, keys)
    chosen = backend_for((q_BNTH.dtype, q_BNTH.size(-1), kind, dropout, False), q_BNTH.device, backend)
    if chosen == "math":
        return math_attention(q_BNTH, k_BKSH, v_BKSH, _visible(mask, kind, q_BNTH, keys), dropout, scale)
    if chosen == "sdpa":
        return _sdpa(q_BNTH, k_BKSH, v_BKSH, mask, kind, dropout)
    if chosen == "cudnn":
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
            grouped = q_BNTH.size(1) != k_BKSH.size(1)
            return F.scaled_dot_product_attention(q_BNTH, k_BKSH, v_BKSH, is_causal=kind == "causal", enable_gqa=grouped)
    if chosen == "cpu_flash" and kind in ("tail", "mask"):
        return cpu.forward(q_BNTH, k_BKSH, v_BKSH, False, scale, _visible(mask, kind, q_BNTH, keys))[0]
    if chosen == "cpu_flash" and kind != "packed" and is_native(q_BNTH.dtype):
        return _sdpa(q_BNTH, k_BKSH, v_BKSH, None, kind, 0.0)  # the shortest way to this kernel
    documents, longest = _packed(mask, chosen, q_BNTH.device)
    return flash_attention(q_BNTH, k_BKSH, v_BKSH, documents, longest, kind != "full", scale, dropout, chosen)[0]


def _kind(mask: Tensor | Documents | None, causal: bool, queries: int, keys: int) -> str:
    if mask is not None:
        return "packed" if isinstance(mask, Documents) else "mask"
    if not causal or queries == 1:
        return "full"
    return "causal" if queries == keys else "tail"


def _visible(mask: Tensor | Documents | None, kind: str, q_BNTH: Tensor, keys: int) -> Tensor | None:
    """The mask that `kind` stands for; None where every key is seen."""
    if isinstance(mask, Documents):
        return mask.mask(q_BNTH.device)
    return causal_mask(q_BNTH.size(2), keys, q_BNTH.device) if kind in ("causal", "tail") else mask


def _packed(mask: Tensor | Documents | None, kernel: str, device: torch.device) -> tuple[Tensor | None, int]:
    if not isinstance(mask, Documents):
        return None, 0
    return (mask.numbers_BT, 0) if kernel == "cpu_flash" else mask.lengths(device)


def _sdpa(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | Documents | None, kind: str, dropout: float) -> Tensor:
    grouped, blind_B1T1 = q_BNTH.size(1) != k_BKSH.size(1), None
    seen = None if kind == "causal" else _visible(mask, kind, q_BNTH, k_BKSH.size(2))
    if seen is not None and q_BNTH.is_cuda:
        if grouped:  # torch's masked CUDA kernels know no groups; with enable_gqa they fall back to the formula spelled out
            k_BKSH, v_BKSH, grouped = *repeat_heads(q_BNTH, k_BKSH, v_BKSH), False
        if kind == "mask":  # nor do they all know rows without keys: these see everything, and then count for nothing
            blind_B1T1 = ~seen.any(-1, keepdim=True)
            seen = seen | blind_B1T1
    out_BNTH = F.scaled_dot_product_attention(
        q_BNTH, k_BKSH, v_BKSH, attn_mask=seen, dropout_p=dropout, is_causal=kind == "causal", enable_gqa=grouped
    )
    return out_BNTH if blind_B1T1 is None else out_BNTH.masked_fill(blind_B1T1, 0.0)


def attention_with_lse(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    mask: Tensor | Documents | None = None,
    causal: bool = True,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out_BNTH, lse_BNT): attention and the log-sum-exp of each query's scores (fp32 or wider, -inf where it sees no key).

    `causal` counts where there is no mask. `out` can be differentiated; `lse` is a constant.
    """
    scale = q_BNTH.size(-1) ** -0.5 if scale is None else scale
    if not isinstance(mask, Documents):
        return _Chunk.apply(q_BNTH, k_BKSH, v_BKSH, mask, causal, scale, backend)
    chosen = backend_for((q_BNTH.dtype, q_BNTH.size(-1), "packed", 0.0, True), q_BNTH.device, backend)
    if chosen == "math":
        return _Chunk.apply(q_BNTH, k_BKSH, v_BKSH, mask.mask(q_BNTH.device), True, scale, "math")
    documents, longest = _packed(mask, chosen, q_BNTH.device)
    return flash_attention(q_BNTH, k_BKSH, v_BKSH, documents, longest, True, scale, 0.0, chosen)[:2]


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, backend: str
    ) -> tuple[Tensor, Tensor]:
        out, lse = flash_forward(q, k, v, causal, scale, mask, backend)
        ctx.save_for_backward(q, k, v, out, lse, mask)
        ctx.causal, ctx.scale, ctx.backend = causal, scale, backend
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, mask = ctx.saved_tensors
        found = flash_backward(grad, q, k, v, out, lse, ctx.causal, ctx.scale, mask, ctx.backend)
        return *found, None, None, None, None


def flash_forward(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | Documents | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """(out_BNTH, lse_BNT) of these keys alone, outside autograd: a chunk of ring attention (arXiv:2310.01889).

    Chunks over different keys merge by their lse. `mask` (a bool mask_B1TS, or documents of packed rows) replaces `causal`.
    Raises ConfigError as `attention`.
    """
    queries, keys = q_BNTH.size(2), k_BKSH.size(2)
    blind = _blind(mask, causal, queries, keys)
    if blind:
        out, lse = flash_forward(q_BNTH[:, :, blind:], k_BKSH, v_BKSH, causal, scale, None, backend)
        return F.pad(out, (0, 0, blind, 0)), F.pad(lse, (blind, 0), value=-torch.inf)
    with torch.no_grad():
        kernel, kind, seen = _chunk_kernel(q_BNTH, keys, causal, mask, backend)
        if kernel == "math":
            return math_forward(q_BNTH, k_BKSH, v_BKSH, seen, scale)
        if seen is not None:
            return cpu.forward(q_BNTH, k_BKSH, v_BKSH, False, scale, seen)
        documents, longest = _packed(mask, kernel, q_BNTH.device)
        return flash_chunk(q_BNTH, k_BKSH, v_BKSH, documents, longest, kind != "full", scale, kernel)


def flash_backward(
    grad_BNTH: Tensor,
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    out_BNTH: Tensor,
    lse_BNT: Tensor,
    causal: bool,
    scale: float,
    mask: Tensor | Documents | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through these keys, given `out` and `lse` over *all* keys of each query.

    The gradients of q of all chunks add up to the whole; those of k and v are whole at once.
    """
    queries, keys = q_BNTH.size(2), k_BKSH.size(2)
    blind = _blind(mask, causal, queries, keys)
    if blind:
        grad, q, out, lse = (x[:, :, blind:] for x in (grad_BNTH, q_BNTH, out_BNTH, lse_BNT))
        grad_q, grad_k, grad_v = flash_backward(grad, q, k_BKSH, v_BKSH, out, lse, causal, scale, None, backend)
        return F.pad(grad_q, (0, 0, blind, 0)), grad_k, grad_v
    given = (grad_BNTH, q_BNTH, k_BKSH, v_BKSH, out_BNTH, lse_BNT)
    with torch.no_grad():
        kernel, kind, seen = _chunk_kernel(q_BNTH, keys, causal, mask, backend)
        if kernel == "math":
            return math_backward(*given, seen, scale)
        if seen is not None:
            return cpu.backward(*given, False, scale, seen)
        none = q_BNTH.new_zeros(0, dtype=torch.int64)
        documents, longest = _packed(mask, kernel, q_BNTH.device)
        return flash_attention_backward(*given, none, documents, longest, kind != "full", scale, 0.0, kernel)


def _blind(mask: Tensor | Documents | None, causal: bool, queries: int, keys: int) -> int:
    """How many of the first queries see no key, where that is not all of them."""
    return queries - keys if causal and mask is None and queries > keys > 0 else 0


def _chunk_kernel(
    q_BNTH: Tensor, keys: int, causal: bool, mask: Tensor | Documents | None, backend: str
) -> tuple[str, str, Tensor | None]:
    """(kernel, kind, mask where the kernel needs one)."""
    queries = q_BNTH.size(2)
    kind = _kind(mask, causal, queries, keys)
    if q_BNTH.numel() == 0 or keys == 0:
        return "math", kind, causal_mask(queries, keys, q_BNTH.device)
    kernel = backend_for((q_BNTH.dtype, q_BNTH.size(-1), kind, 0.0, True), q_BNTH.device, backend)
    masked = kernel == "math" or (kernel == "cpu_flash" and kind in ("tail", "mask"))
    return kernel, kind, _visible(mask, kind, q_BNTH, keys) if masked else None
