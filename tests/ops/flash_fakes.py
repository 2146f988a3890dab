"""Stand-ins for FlashAttention packages: their signatures and layouts, computed by the formula on the CPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from dist_train.ops.attention import cuda, op, select
from dist_train.ops.attention.documents import causal_mask
from dist_train.ops.attention.reference import math_backward, math_forward

NAMES = ("fa4", "fa3", "fa2", "torch_flash")
CAPABILITY = {"fa4": (10, 0), "fa3": (9, 0), "fa2": (8, 0), "torch_flash": (8, 0)}


def _checked(tensors, bounds_q, bounds_k, longest_q, longest_k):
    """What kernels demand of their arguments; returns a list of slices, one for each sequence."""
    q, k, v = tensors[:3]
    assert all(x.dtype in (torch.float16, torch.bfloat16) and x.stride(-1) == 1 for x in tensors)
    assert q.size(-1) % 8 == 0 and k.shape == v.shape and q.size(-2) % k.size(-2) == 0
    if bounds_q is None:
        assert bounds_k is None and q.dim() == k.dim() == 4 and q.size(0) == k.size(0)
        return None
    assert q.dim() == k.dim() == 3 and bounds_q.dtype == bounds_k.dtype == torch.int32 and bounds_q.is_contiguous()
    starts = bounds_q.tolist()
    assert starts[0] == 0 and starts[-1] == q.size(0) == k.size(0) and torch.equal(bounds_q, bounds_k)
    lengths = [stop - start for start, stop in zip(starts, starts[1:])]
    assert min(lengths) > 0 and max(lengths) == longest_q == longest_k
    return [slice(start, stop) for start, stop in zip(starts, starts[1:])]


def _swap(*tensors):
    return tuple(x.transpose(-3, -2) for x in tensors)


def _mask(q, k, causal):
    return causal_mask(q.size(-2), k.size(-2), q.device)[None] if causal else None


def run(q, k, v, bounds_q, bounds_k, longest_q, longest_k, causal, scale):
    pieces = _checked((q, k, v), bounds_q, bounds_k, longest_q, longest_k)
    assert not causal or pieces or q.size(1) <= k.size(1)  # releases differ on rows that see no key
    if pieces is None:
        swapped = _swap(q, k, v)
        out, lse = math_forward(*swapped, _mask(*swapped[:2], causal), scale)
        return out.transpose(1, 2).contiguous(), lse
    parts = []
    for piece in pieces:
        swapped = _swap(*(x[piece][None] for x in (q, k, v)))
        parts.append(math_forward(*swapped, _mask(*swapped[:2], causal), scale))
    return torch.cat([out[0].transpose(0, 1) for out, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)


def run_back(grad, q, k, v, out, lse, bounds_q, bounds_k, longest_q, longest_k, causal, scale):
    pieces = _checked((q, k, v, grad, out), bounds_q, bounds_k, longest_q, longest_k)
    assert not causal or pieces or q.size(1) <= k.size(1)
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    if pieces is None:
        assert lse.shape == (q.size(0), q.size(2), q.size(1))
        grad, q, k, v, out = _swap(grad, q, k, v, out)
        return tuple(x.transpose(1, 2).contiguous() for x in math_backward(grad, q, k, v, out, lse, _mask(q, k, causal), scale))
    assert lse.shape == (q.size(1), q.size(0))
    found = []
    for piece in pieces:
        given = _swap(*(x[piece][None] for x in (grad, q, k, v, out)))
        found.append(math_backward(*given, lse[None, :, piece], _mask(given[1], given[2], causal), scale))
    return tuple(torch.cat([each[i][0].transpose(0, 1) for each in found]) for i in range(3))


def _fa4_forward(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
    page_table=None, softmax_scale=None, causal=False, softcap=None, return_lse=False,
):  # fmt: skip
    assert return_lse
    return run(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale)


def _fa4_backward(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, cu_seqlens_q=None, cu_seqlens_k=None,
    seqused_q=None, seqused_k=None,
):  # fmt: skip
    longest = None if cu_seqlens_q is None else int(cu_seqlens_q.diff().max())  # this release finds it out itself
    return run_back(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, longest, longest, causal, softmax_scale)


def _fa3_forward(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
    seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, causal=False,
):  # fmt: skip
    return *run(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale), None, None


def _fa3_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, max_seqlen_q=None,
    max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, deterministic=False,
):  # fmt: skip
    limits = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    for into, value in zip((dq, dk, dv), run_back(dout, q, k, v, out, softmax_lse, *limits, is_causal, softmax_scale)):
        into.copy_(value)
    return softmax_lse


def _fa2_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax
):  # fmt: skip
    assert (window_size_left, window_size_right, softcap, alibi_slopes, return_softmax) == (-1, -1, 0.0, None, False)
    state = torch.tensor([7, 11]) if dropout_p else torch.empty(2, dtype=torch.int64)
    return *run(q, k, v, None, None, None, None, causal, softmax_scale), None, state


def _fa2_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left=-1,
    window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None,
    seqused_k=None, zero_tensors=False,
):  # fmt: skip
    limits = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return *run(q, k, v, *limits, causal, softmax_scale), None, torch.empty(2, dtype=torch.int64)


def _fa2_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
    alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    if dropout_p:
        assert rng_state.tolist() == [7, 11]
    for into, value in zip((dq, dk, dv), run_back(dout, q, k, v, out, softmax_lse, *[None] * 4, causal, softmax_scale)):
        into.copy_(value)
    return softmax_lse


def _fa2_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    limits = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    for into, value in zip((dq, dk, dv), run_back(dout, q, k, v, out, softmax_lse, *limits, causal, softmax_scale)):
        into.copy_(value)
    return softmax_lse


def _torch_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None
):  # fmt: skip
    assert return_debug_mask is False
    if cum_seq_q is None:
        assert (max_q, max_k) == (query.size(1), key.size(1))
    state = torch.tensor([7, 11]).view(torch.uint64)
    return *run(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale), state, None, None


def _torch_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state, unused,
    *, scale=None,
):  # fmt: skip
    assert rng_state.dtype == torch.uint64 and rng_state.shape == (2,) and isinstance(unused, torch.Tensor)
    if dropout_p:
        assert rng_state.view(torch.int64).tolist() == [7, 11]
    return run_back(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, is_causal, scale)


def module(name: str, **members: object) -> ModuleType:
    found = ModuleType(name)
    found.__dict__.update(members)
    return found


def modules_of(name: str) -> dict[str, ModuleType]:
    package = module("flash_attn", __path__=[])
    if name == "fa4":
        interface = module("flash_attn.cute.interface", _flash_attn_fwd=_fa4_forward, _flash_attn_bwd=_fa4_backward)
        cute = module("flash_attn.cute", __path__=[], interface=interface)
        return {"flash_attn": package, "flash_attn.cute": cute, "flash_attn.cute.interface": interface}
    if name == "fa3":
        members = {"_flash_attn_forward": _fa3_forward, "_flash_attn_backward": _fa3_backward}
        return {"flash_attn_interface": module("flash_attn_interface", **members)}
    members = {"_flash_attn_forward": _fa2_forward, "_flash_attn_backward": _fa2_backward}
    members |= {"_flash_attn_varlen_forward": _fa2_varlen_forward, "_flash_attn_varlen_backward": _fa2_varlen_backward}
    return {"flash_attn": package, "flash_attn.flash_attn_interface": module("flash_attn.flash_attn_interface", **members)}


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From here on CPU tensors are taken for those of a CUDA device that has this one FlashAttention."""
    if name == "torch_flash":
        aten = SimpleNamespace(_flash_attention_forward=_torch_forward, _flash_attention_backward=_torch_backward)
        with pytest.MonkeyPatch.context() as while_loading:
            while_loading.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
            while_loading.setattr(torch, "ops", SimpleNamespace(aten=aten))
            cuda.load.cache_clear()
            kernel = cuda.load(name)
    else:
        for path, fake in modules_of(name).items():
            monkeypatch.setitem(sys.modules, path, fake)
        cuda.load.cache_clear()
        kernel = cuda.load(name)
    cuda.load.cache_clear()
    assert not isinstance(kernel, str), kernel
    machine = select.Machine("cuda", CAPABILITY[name], tuple((other, "left out") for other in NAMES if other != name))
    monkeypatch.setattr(op, "load", lambda wanted: kernel if wanted == name else f"{wanted} left out")
    choose, ask = select.choose, select.Request
    monkeypatch.setattr(select, "backend_here", lambda request, _, wanted: choose(ask(*request), machine, wanted).backend)
