"""Attention on every backend against the formula in fp64, written with loops."""

from __future__ import annotations

import math

import pytest
import torch

from dist_train.ops.attention import attention, causal_mask, document_mask

BACKENDS = ["flash", "sdpa", "math"]


def draw(queries: int, keys: int, width: int, heads: int = 4, kv_heads: int = 2, rows: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shapes = [(rows, heads, queries, width), (rows, kv_heads, keys, width), (rows, kv_heads, keys, width)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def exact_attention(q, k, v, mask, dtype=torch.float64) -> torch.Tensor:
    """Row by row; a query without keys gives zeros. `mask` (B, T, S)."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    out = []
    for b in range(q.size(0)):
        for n in range(q.size(1)):
            kv = n // (q.size(1) // k.size(1))
            for t in range(q.size(2)):
                seen = mask[b, t].nonzero().flatten()
                scores = k[b, kv, seen] @ q[b, n, t] / math.sqrt(q.size(3))
                weights = torch.exp(scores - scores.max()) if len(seen) else scores
                out.append((weights / weights.sum()) @ v[b, kv, seen] if len(seen) else q[b, n, t] * 0)
    return torch.stack(out).view(q.shape) if out else q * 1


def gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(8)).to(out.dtype)
    found = torch.autograd.grad(out, inputs, upstream, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs)]


def check(inputs, mask_BTS, backend, mask) -> None:
    out = attention(*inputs, mask, 0.0, backend)
    exact, plain = (exact_attention(*inputs, mask_BTS, dtype) for dtype in (torch.float64, torch.float32))
    pairs = zip([out, *gradients(out, inputs)], [plain, *gradients(plain, inputs)], [exact, *gradients(exact, inputs)])
    for ours, plain_value, exact_value in pairs:
        assert torch.isfinite(ours).all()
        if ours.numel():
            allowed = 2 * (plain_value - exact_value).abs().max() + 1e-6  # inputs are about 1
            assert (ours - exact_value).abs().max() <= allowed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [8, 12, 40, 96])
@pytest.mark.parametrize("queries, keys", [(5, 2), (1, 1), (0, 3), (3, 5), (1, 6), (7, 7), (2, 0)])
def test_F48_causal_lengths_and_widths(queries, keys, width, backend):
    inputs = draw(queries, keys, width)
    visible = torch.tensor([[s <= t + keys - queries for s in range(keys)] for t in range(queries)], dtype=torch.bool)
    check(inputs, visible.view(1, queries, keys).expand(2, queries, keys), backend, None)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [8, 12, 40, 96])
def test_F48_rows_without_keys_give_zero_and_zero_gradient(width, backend):
    inputs = draw(6, 6, width)
    mask = torch.ones(2, 6, 6, dtype=torch.bool).tril()
    mask[0, 2] = False  # one query sees nothing
    mask[1] = False  # a row of padding alone
    check(inputs, mask, backend, mask[:, None])
    out = attention(*inputs, mask[:, None], 0.0, backend)
    assert torch.all(out[0, :, 2] == 0) and torch.all(out[1] == 0) and out[0, :, 3].abs().min() > 0
    for gradient in gradients(out, inputs):
        assert torch.all(gradient[1] == 0)
    assert torch.all(gradients(out, inputs)[0][0, :, 2] == 0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_F25_documents_are_exactly_isolated(backend):
    documents = torch.tensor([[0] * 5 + [1] + [2] * 6, [3] * 12], dtype=torch.int32)
    mask = document_mask(documents)
    expected = [[[s <= t and documents[b, s] == documents[b, t] for s in range(12)] for t in range(12)] for b in range(2)]
    assert mask.shape == (2, 1, 12, 12) and torch.equal(mask[:, 0], torch.tensor(expected))
    inputs = draw(12, 12, 8)
    check(inputs, mask[:, 0], backend, mask)
    moved = [x.detach().clone() for x in inputs]
    for x in moved:
        x[0, :, :5] += 3.0
    before, after = attention(*inputs, mask, 0.0, backend), attention(*moved, mask, 0.0, backend)
    assert torch.equal(before[0, :, 5:], after[0, :, 5:]) and torch.equal(before[1], after[1])
    out = before[0, :, 6:]
    for gradient in gradients(out, inputs):
        assert torch.all(gradient[0, :, :6] == 0) and torch.all(gradient[1] == 0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [False, True])
def test_grouped_heads_equal_repeated_heads(masked, backend):
    q, k, v = draw(9, 9, 12, heads=6, kv_heads=2)
    mask = document_mask(torch.tensor([[0] * 4 + [1] * 5] * 2)) if masked else None
    grouped = attention(q, k, v, mask, 0.0, backend)
    repeated = [x.repeat_interleave(3, dim=1) for x in (k, v)]
    torch.testing.assert_close(grouped, attention(q, *repeated, mask, 0.0, backend), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "math"])
def test_dropout_of_probabilities_keeps_the_mean_and_isolation(backend):
    torch.manual_seed(0)
    q, k, _ = draw(6, 6, 8, heads=1, kv_heads=1, rows=1)
    mask = document_mask(torch.tensor([[0, 0, 0, 1, 1, 1]]))
    v = torch.ones_like(k)
    v[:, :, :3] = 1000.0
    samples = torch.stack([attention(q, k, v, mask, 0.25, backend).detach()[0, 0, 3:, 0] for _ in range(2000)])
    assert samples.std() > 0.1 and samples.max() < 10
    assert (samples.mean(0) - 1).abs().max() < 0.08


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_errs_at_most_twice_a_plain_bf16_writing(backend):
    inputs = [x.detach().bfloat16() for x in draw(16, 16, 40)]
    mask = torch.ones(2, 16, 16, dtype=torch.bool).tril()
    out = attention(*inputs, None, 0.0, backend)
    exact, plain = (exact_attention(*inputs, mask, dtype) for dtype in (torch.float64, torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert (out - exact).abs().max() <= 2 * (plain - exact).abs().max()


def test_the_last_query_sees_the_last_key():
    expected = torch.tensor([[True, True, False], [True, True, True]])
    assert torch.equal(causal_mask(2, 3, torch.device("cpu")), expected)


def test_auto_is_flash():
    inputs = draw(6, 6, 8)
    assert torch.equal(attention(*inputs), attention(*inputs, None, 0.0, "flash"))
