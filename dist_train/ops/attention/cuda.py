"""FlashAttention on CUDA: thin adapters that give each package's forward and backward the same arguments.

Shapes: dense q (B, T, N, H), k and v (B, S, K, H), lse (B, N, T); packed q (tokens, N, H), k and v (tokens, K, H),
lse (N, tokens), with `bounds` (int32, documents + 1) and the length of the longest document. H is a multiple of 8.
All are causal from the bottom right, group key/value heads themselves, and report lse in fp32.

Gradients of q are summed in an order that varies from run to run, unless `torch.use_deterministic_algorithms` is on.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

HAS_STATE = ("fa2", "torch_flash")  # their dropout needs the generator's state again in backward: int64 (2,)


class Kernel(NamedTuple):
    """`forward(q, k, v, bounds, longest, causal, scale, dropout) -> (out, lse, state or None)` and
    `backward(grad, q, k, v, out, lse, state, bounds, longest, causal, scale, dropout) -> (grad q, grad k, grad v)`."""

    forward: Callable[..., tuple[Tensor, Tensor, Tensor | None]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


@lru_cache(maxsize=8)
def load(name: str) -> Kernel | str:
    """The kernel, or why it is not to be had."""
    try:
        return LOADERS[name]()
    except ModuleNotFoundError as error:
        return f"the package {error.name} is not installed"
    except TypeError as error:
        return f"another release of the package: {error}"
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return f"does not load: {error}"


def _fa4() -> Kernel:
    """FlashAttention-4, the package flash-attn-4."""
    module = importlib.import_module("flash_attn.cute.interface")
    run, run_back = module._flash_attn_fwd, module._flash_attn_bwd
    _accepts(run, 3, "cu_seqlens_q", "cu_seqlens_k", "softmax_scale", "causal", "return_lse")
    _accepts(run_back, 6, "cu_seqlens_q", "cu_seqlens_k", "softmax_scale", "causal")

    def forward(q, k, v, bounds, longest, causal, scale, dropout):  # type: ignore[no-untyped-def]
        lengths = _known(run, _lengths(bounds, longest))
        out, lse, *_ = run(q, k, v, **lengths, softmax_scale=scale, causal=causal, return_lse=True)
        return out, lse, None

    def backward(grad, q, k, v, out, lse, state, bounds, longest, causal, scale, dropout):  # type: ignore[no-untyped-def]
        more = _known(run_back, _lengths(bounds, longest) | {"deterministic": torch.are_deterministic_algorithms_enabled()})
        return run_back(q, k, v, out, grad, lse, softmax_scale=scale, causal=causal, **more)[:3]

    return Kernel(forward, backward)


def _fa3() -> Kernel:
    """FlashAttention-3, the package flash_attn_3 (the folder `hopper` of flash-attention)."""
    module = importlib.import_module("flash_attn_interface")
    run, run_back = module._flash_attn_forward, module._flash_attn_backward
    lengths = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    _accepts(run, 3, *lengths, "softmax_scale", "causal")
    _accepts(run_back, 6, *lengths, "dq", "dk", "dv", "softmax_scale", "is_causal", "deterministic")

    def forward(q, k, v, bounds, longest, causal, scale, dropout):  # type: ignore[no-untyped-def]
        out, lse, *_ = run(q, k, v, **_lengths(bounds, longest), softmax_scale=scale, causal=causal)
        return out, lse, None

    def backward(grad, q, k, v, out, lse, state, bounds, longest, causal, scale, dropout):  # type: ignore[no-untyped-def]
        found = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
        more = {"softmax_scale": scale, "is_causal": causal, "deterministic": torch.are_deterministic_algorithms_enabled()}
        run_back(grad, q, k, v, out, lse, **_lengths(bounds, longest), **found, **more)
        return tuple(found.values())

    return Kernel(forward, backward)


def _fa2() -> Kernel:
    """FlashAttention-2, the package flash-attn, from 2.7 on."""
    module = importlib.import_module("flash_attn.flash_attn_interface")
    plain = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None}
    runs = module._flash_attn_forward, module._flash_attn_varlen_forward
    runs_back = module._flash_attn_backward, module._flash_attn_varlen_backward
    for function, given in zip((*runs, *runs_back), (3, 3, 9, 9), strict=True):
        varlen = _lengths(torch.empty(0), 0) if function in (runs[1], runs_back[1]) else {}
        _accepts(function, given, *varlen, *plain, "dropout_p", "softmax_scale", "causal")

    def forward(q, k, v, bounds, longest, causal, scale, dropout):  # type: ignore[no-untyped-def]
        run, more = runs[bounds is not None], {"dropout_p": dropout, "softmax_scale": scale, "causal": causal}
        out, lse, _, state = run(q, k, v, **_lengths(bounds, longest), **more, **plain, return_softmax=False)
        return out, lse, state

    def backward(grad, q, k, v, out, lse, state, bounds, longest, causal, scale, dropout):  # type: ignore[no-untyped-def]
        found = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        more = {"dropout_p": dropout, "softmax_scale": scale, "causal": causal, "rng_state": state}
        more |= {"deterministic": torch.are_deterministic_algorithms_enabled()}
        run = runs_back[bounds is not None]
        run(grad, q, k, v, out, lse, *found, **_lengths(bounds, longest), **more, **plain)
        return found

    return Kernel(forward, backward)


def _torch_flash() -> Kernel:
    """The FlashAttention-2 that torch brings along, below `scaled_dot_product_attention`, which refuses rectangles."""
    if not torch.backends.cuda.is_flash_attention_available():
        raise ImportError("this torch was built without it")
    aten = torch.ops.aten

    def limits(q: Tensor, k: Tensor, bounds: Tensor | None, longest: int) -> tuple[Any, ...]:
        return (None, None, q.size(1), k.size(1)) if bounds is None else (bounds, bounds, longest, longest)

    def forward(q, k, v, bounds, longest, causal, scale, dropout):  # type: ignore[no-untyped-def]
        given = (q, k, v, *limits(q, k, bounds, longest), dropout, causal, False)
        out, lse, state, _, _ = aten._flash_attention_forward(*given, scale=scale)
        return out, lse, state.view(torch.int64) if dropout else None

    def backward(grad, q, k, v, out, lse, state, bounds, longest, causal, scale, dropout):  # type: ignore[no-untyped-def]
        state = state.view(torch.uint64) if dropout else torch.zeros(2, dtype=torch.uint64, device=q.device)
        given = (grad, q, k, v, out, lse, *limits(q, k, bounds, longest), dropout, causal, state, q.new_empty(0))
        return aten._flash_attention_backward(*given, scale=scale)

    return Kernel(forward, backward)


LOADERS: dict[str, Callable[[], Kernel]] = {"fa4": _fa4, "fa3": _fa3, "fa2": _fa2, "torch_flash": _torch_flash}


def _lengths(bounds: Tensor | None, longest: int) -> dict[str, Any]:
    if bounds is None:
        return {}
    return {"cu_seqlens_q": bounds, "cu_seqlens_k": bounds, "max_seqlen_q": longest, "max_seqlen_k": longest}


def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(getattr(function, "_init_fn", function))  # torch's custom operators keep theirs there


def _accepts(function: Any, positional: int, *keywords: str) -> None:
    """Raise TypeError where the function has not these arguments, whatever else it has."""
    _signature(function).bind_partial(*[None] * positional, **dict.fromkeys(keywords))


def _known(function: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    names = _signature(function).parameters
    return {name: value for name, value in keywords.items() if name in names}
