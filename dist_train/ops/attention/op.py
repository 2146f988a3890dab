"""`dist_train::flash_attention`: one operator around every flash kernel, so that autograd, selective recompute, fake tensors and
torch.compile know one thing, and what the kernels want of layouts and head widths is done in one place.

The operators are defined by `torch.library.define`: the first call of a `torch.library.custom_op` imports torch's compiler, which
is a third of what a rank does until its first step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_train.ops.attention import cpu
from dist_train.ops.attention.cuda import HAS_STATE, Kernel, load

_WIDTHS = 8  # head widths on CUDA are padded to a multiple of this


torch.library.define(
    "dist_train::flash_attention",
    "(Tensor q, Tensor k, Tensor v, Tensor? documents, int longest, bool causal, float scale, float dropout, str kernel)"
    " -> (Tensor out, Tensor lse, Tensor state)",
    tags=torch.Tag.pt2_compliant_tag,
)
flash_attention = torch.ops.dist_train.flash_attention.default


def _forward(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    documents: Tensor | None,
    longest: int,
    causal: bool,
    scale: float,
    dropout: float,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out_BNTH, lse_BNT in fp32 or wider, what dropout must remember).

    `documents`: packed rows, causal within each document; numbers_BT for "cpu_flash", bounds (with `longest`) for the others.
    """
    if kernel == "cpu_flash":
        if documents is None:
            out_BNTH, lse_BNT = cpu.forward(q_BNTH, k_BKSH, v_BKSH, causal, scale)
        else:
            out_BNTH, lse_BNT = cpu.packed_forward(q_BNTH, k_BKSH, v_BKSH, documents, scale)
        return _as_made(out_BNTH, 1), _as_made(lse_BNT, 0), q_BNTH.new_empty(0, dtype=torch.int64)
    rows, heads, _, width = q_BNTH.shape
    q, k, v = (_to_kernel(x, documents) for x in (q_BNTH, k_BKSH, v_BKSH))
    out, lse, state = _loaded(kernel).forward(q, k, v, documents, longest, causal, scale, dropout)
    if documents is not None:
        lse = lse.view(heads, rows, -1).transpose(0, 1)
    if state is None or not dropout:
        state = q.new_zeros(2 if kernel in HAS_STATE else 0, dtype=torch.int64)
    return _from_kernel(out, documents, rows, width), lse, state


torch.library.impl("dist_train::flash_attention", "default", _forward)


@torch.library.register_fake("dist_train::flash_attention")
def _(q_BNTH, k_BKSH, v_BKSH, documents, longest, causal, scale, dropout, kernel):  # type: ignore[no-untyped-def]
    rows, heads, queries, _ = q_BNTH.shape
    wide = torch.promote_types(q_BNTH.dtype, torch.float32)
    if kernel == "cpu_flash" or documents is None:
        lse_BNT = q_BNTH.new_empty(rows, heads, queries, dtype=wide)
    else:
        lse_BNT = q_BNTH.new_empty(heads, rows, queries, dtype=wide).transpose(0, 1)
    state = q_BNTH.new_empty(2 if kernel in HAS_STATE else 0, dtype=torch.int64)
    return cpu.empty_as_made(q_BNTH), lse_BNT, state


torch.library.define(
    "dist_train::flash_attention_backward",
    "(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor state, Tensor? documents, int longest,"
    " bool causal, float scale, float dropout, str kernel) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
flash_attention_backward = torch.ops.dist_train.flash_attention_backward.default


def _backward(
    grad_BNTH: Tensor,
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    out_BNTH: Tensor,
    lse_BNT: Tensor,
    state: Tensor,
    documents: Tensor | None,
    longest: int,
    causal: bool,
    scale: float,
    dropout: float,
    kernel: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; `out` and `lse` may be those over more keys than these."""
    given = (grad_BNTH, q_BNTH, k_BKSH, v_BKSH, out_BNTH)
    if kernel == "cpu_flash":
        if documents is None:
            found = cpu.backward(*given, lse_BNT, causal, scale)
        else:
            found = cpu.packed_backward(*given, lse_BNT, documents, scale)
        return tuple(_as_made(x, 1) for x in found)  # type: ignore[return-value]
    rows, heads, _, width = q_BNTH.shape
    lse = lse_BNT.contiguous() if documents is None else lse_BNT.transpose(0, 1).reshape(heads, -1)
    grad, q, k, v, out = (_to_kernel(x, documents) for x in given)
    limits = (documents, longest, causal, scale, dropout)
    found = _loaded(kernel).backward(grad, q, k, v, out, lse, state, *limits)
    return tuple(_from_kernel(x, documents, rows, width) for x in found)  # type: ignore[return-value]


torch.library.impl("dist_train::flash_attention_backward", "default", _backward)


@torch.library.register_fake("dist_train::flash_attention_backward")
def _(grad_BNTH, q_BNTH, k_BKSH, v_BKSH, *rest):  # type: ignore[no-untyped-def]
    return tuple(cpu.empty_as_made(x) for x in (q_BNTH, k_BKSH, v_BKSH))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, documents, *ctx.numbers = inputs
    ctx.save_for_backward(q, k, v, *output, documents)
    ctx.mark_non_differentiable(output[1], output[2])


def _differentiate(ctx: Any, grad_BNTH: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    *saved, documents = ctx.saved_tensors
    return *flash_attention_backward(grad_BNTH, *saved, documents, *ctx.numbers), *[None] * 6


torch.library.register_autograd("dist_train::flash_attention", _differentiate, setup_context=_keep)


torch.library.define(
    "dist_train::flash_chunk",
    "(Tensor q, Tensor k, Tensor v, Tensor? documents, int longest, bool causal, float scale, str kernel)"
    " -> (Tensor out, Tensor lse)",
    tags=torch.Tag.pt2_compliant_tag,
)
flash_chunk = torch.ops.dist_train.flash_chunk.default


def _chunk(
    q_BNTH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    documents: Tensor | None,
    longest: int,
    causal: bool,
    scale: float,
    kernel: str,
) -> tuple[Tensor, Tensor]:
    """`flash_attention` of some of the keys, without an autograd of its own.

    An operator apart, so that selective recompute does not keep every part of what is put together from several.
    """
    return _forward(q_BNTH, k_BKSH, v_BKSH, documents, longest, causal, scale, 0.0, kernel)[:2]


torch.library.impl("dist_train::flash_chunk", "default", _chunk)


@torch.library.register_fake("dist_train::flash_chunk")
def _(q_BNTH, k_BKSH, v_BKSH, documents, longest, causal, scale, kernel):  # type: ignore[no-untyped-def]
    return flash_attention(q_BNTH, k_BKSH, v_BKSH, documents, longest, causal, scale, 0.0, kernel)[:2]


def _loaded(name: str) -> Kernel:
    kernel = load(name)
    if isinstance(kernel, str):
        raise RuntimeError(f"attention kernel {name}: {kernel}.")
    return kernel


def _to_kernel(x_BNTH: Tensor, documents: Tensor | None) -> Tensor:
    missing = -x_BNTH.size(-1) % _WIDTHS
    x_BTNH = (F.pad(x_BNTH, (0, missing)) if missing else x_BNTH).transpose(1, 2)
    x_BTNH = x_BTNH if x_BTNH.stride(-1) == 1 else x_BTNH.contiguous()
    return x_BTNH if documents is None else x_BTNH.flatten(0, 1)


def _from_kernel(x: Tensor, documents: Tensor | None, rows: int, width: int) -> Tensor:
    x_BTNH = x if documents is None else x.unflatten(0, (rows, -1))
    return _as_made(x_BTNH[..., :width].transpose(1, 2), 1)


def _as_made(x: Tensor, swapped: int) -> Tensor:
    """The memory layout that the fake versions promise: that of (B, T, N, H) if `swapped`, or the shape's own."""
    return x.transpose(1, 2).contiguous().transpose(1, 2) if swapped else x.contiguous()
