"""Attention on this CPU beside torch's masked scaled_dot_product_attention, forward and backward, in interleaved rounds.

    python benchmarks/attention.py [--rounds 7] [--tokens 512]

Figures are CPU milliseconds of one thread; the ratio is the median over rounds of ours by torch's in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_train.ops.attention import attention, document_mask, prepare_documents

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--dtypes", default="fp32,bf16,fp16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'dtype':6} {'heads':6} {'case':24} {'torch ms':>9} {'ours ms':>9} {'ratio':>6}  quartiles")
    for dtype in options.dtypes.split(","):
        for kv_heads in (6, 2):
            for name, mean in (("causal", 0), ("documents of 16", 16), ("documents of 128", 128), ("documents of 400", 400)):
                ours, torchs = training(options.rows, options.tokens, kv_heads, mean, DTYPES[dtype])
                report(f"{dtype:6} 6/{kv_heads:<4} {name:24}", ours, torchs, options.rounds)
            report(
                f"{dtype:6} 6/{kv_heads:<4} {'decoding':24}", *decoding(options.tokens, kv_heads, DTYPES[dtype]), options.rounds
            )


def training(rows: int, tokens: int, kv_heads: int, mean: int, dtype: torch.dtype) -> tuple[Callable, Callable]:
    q, k, v = (torch.randn(rows, tokens, n, 64).to(dtype).transpose(1, 2).requires_grad_() for n in (6, kv_heads, kv_heads))
    grad = torch.randn(rows, tokens, 6, 64).to(dtype).transpose(1, 2)
    numbers = (torch.rand(rows, tokens) < 1 / mean).cumsum(1) if mean else None

    def ours() -> tuple[Tensor, ...]:
        made = None if numbers is None else prepare_documents(numbers, dtype, q.device, 64, 0.0, "auto")
        return torch.autograd.grad(attention(q, k, v, made), (q, k, v), grad)

    def torchs() -> tuple[Tensor, ...]:
        mask, grouped = None if numbers is None else document_mask(numbers), kv_heads != 6
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
        return torch.autograd.grad(out, (q, k, v), grad)

    return ours, torchs


def decoding(keys: int, kv_heads: int, dtype: torch.dtype) -> tuple[Callable, Callable]:
    q, k, v = torch.randn(1, 6, 1, 64).to(dtype), *torch.randn(2, 1, kv_heads, keys, 64).to(dtype)

    def repeat(call: Callable) -> Callable:
        def run() -> None:
            with torch.no_grad():
                for _ in range(100):
                    call()

        return run

    torchs = repeat(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=kv_heads != 6))
    return repeat(lambda: attention(q, k, v)), torchs


def report(name: str, ours: Callable, torchs: Callable, rounds: int) -> None:
    seconds: tuple[list[float], list[float]] = ([], [])
    for call in (ours, torchs):
        call()
    for _ in range(rounds):
        for call, spent in zip((ours, torchs), seconds, strict=True):
            start = time.process_time()
            call()
            spent.append(time.process_time() - start)
    ratios = [a / b for a, b in zip(*seconds, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
    mine, theirs = (statistics.median(spent) * 1e3 for spent in seconds)
    print(f"{name} {theirs:9.1f} {mine:9.1f} {middle:6.2f}  [{low:.2f}-{high:.2f}]", flush=True)


if __name__ == "__main__":
    main()
