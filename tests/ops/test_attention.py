"""What holds on every backend: documents apart, rows without keys zero, log-sum-exp right, small errors.

CUDA packages are stood in for by the formula behind their own signatures (`flash_fakes`), which shows layouts and lengths.
"""

from __future__ import annotations

import math

import pytest
import torch

from dist_train.model import build_model
from dist_train.ops.attention import api, attention, attention_with_lse, cpu, document_mask, flash_backward, flash_forward
from dist_train.ops.attention.documents import Documents, causal_mask, document_bounds, prepare_documents
from dist_train.remat import apply_remat
from tests.model.toy import token_rows, toy
from tests.ops import flash_fakes

HERE = ["cpu_flash", "sdpa", "math"]
ALL = [*HERE, *flash_fakes.NAMES]
WITH_LSE = [name for name in ALL if name != "sdpa"]
LENGTHS = [[5, 1, 6], [12, 0, 0], [1, 1, 10], [3, 4, 5]]


@pytest.fixture
def backend(request, monkeypatch) -> str:
    """The configured name that leads to the backend of this case."""
    if request.param in flash_fakes.NAMES:
        flash_fakes.install(monkeypatch, request.param)
    return "flash" if request.param not in ("sdpa", "math") else request.param


def every(names=ALL):
    return pytest.mark.parametrize("backend", names, indirect=True)


def dtype_of(name: str) -> torch.dtype:
    return torch.bfloat16 if name in flash_fakes.NAMES else torch.float32


def draw(queries, keys, width, dtype, heads=4, kv_heads=2, rows=2, seed=7):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, queries, heads, width), (rows, keys, kv_heads, width), (rows, keys, kv_heads, width)]
    return [torch.randn(shape, generator=generator).to(dtype).transpose(1, 2).requires_grad_() for shape in shapes]


def plain(q, k, v, mask, dtype):
    """The formula written down in one dtype; a row without keys gives zeros. Returns out and log-sum-exp."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))).masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1).masked_fill(~mask, 0.0)
    return weights.nan_to_num() @ v if scores.size(-1) else q * 0, scores.double().logsumexp(-1)


def upstream(out):
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(8)).to(out.dtype)


def gradients(out, inputs):
    found = torch.autograd.grad(out, inputs, upstream(out), retain_graph=True, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs)]


def check(out, inputs, mask, tiny=3e-6):
    """Output and gradients err at most twice as much as the formula in the inputs' own dtype."""
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    mask_filled = mask.clone()
    blind = ~mask.any(-1)
    mask_filled[blind] = True  # so that softmax has no nan to differentiate; those rows are multiplied by zero

    def values(given, dtype):
        found = plain(*given, mask_filled, dtype)[0].masked_fill(blind[..., None], 0.0) if mask.size(-1) else given[0] * 0
        return [found, *gradients(found, given)]

    for ours, own, exact in zip([out, *gradients(out, inputs)], values(inputs, out.dtype), values(exact_inputs, torch.float64)):
        assert torch.isfinite(ours).all()
        if ours.numel():
            assert (ours - exact).abs().max() <= 2 * (own - exact).abs().max() + tiny


def cases(names=ALL):
    return [(name, torch.bfloat16) for name in names] + [(name, torch.float32) for name in names if name in HERE]


def with_dtypes(names=ALL):
    return pytest.mark.parametrize("backend, dtype", cases(names), indirect=["backend"])


@with_dtypes()
@pytest.mark.parametrize("width", [8, 12, 40, 96])
@pytest.mark.parametrize("queries, keys", [(5, 2), (1, 1), (0, 3), (3, 5), (2, 0), (40, 40), (1, 9)])
def test_F48_causal_lengths_and_widths(queries, keys, width, backend, dtype):
    inputs = draw(queries, keys, width, dtype)
    mask = causal_mask(queries, keys, torch.device("cpu"))[None, None].expand(2, 1, -1, -1)
    out = attention(*inputs, None, 0.0, backend)
    assert out.dtype == dtype and out.shape == inputs[0].shape
    check(out, inputs, mask)
    assert torch.all(out[:, :, : max(0, queries - keys)] == 0)
    assert torch.all(gradients(out, inputs)[0][:, :, : max(0, queries - keys)] == 0)


@with_dtypes(HERE)
@pytest.mark.parametrize("width", [8, 12, 40, 96])
def test_F48_a_row_of_padding_and_a_blind_query_give_zero(width, backend, dtype):
    inputs = draw(6, 6, width, dtype)
    mask = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    mask[0, :, 2] = False
    mask[1] = False
    out = attention(*inputs, mask, 0.0, backend)
    check(out, inputs, mask)
    found = gradients(out, inputs)
    assert torch.all(out[1] == 0) and torch.all(out[0, :, 2] == 0) and torch.all(found[0][0, :, 2] == 0)
    assert all(torch.all(gradient[1] == 0) for gradient in found)


def numbers_of(*rows: list[int]) -> torch.Tensor:
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]).int()


@with_dtypes()
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_packed_rows_against_fp64(kv_heads, backend, dtype):
    numbers = numbers_of(*LENGTHS)
    inputs = draw(12, 12, 16, dtype, kv_heads=kv_heads, rows=4)
    out = attention(*inputs, Documents(numbers), 0.0, backend)
    check(out, inputs, document_mask(numbers))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("groups", [True, False])
def test_the_pieces_of_the_cpu_kernel(groups, dtype, monkeypatch):
    """Long and short documents in every order, whole rows between cut ones; torch with and without grouped heads."""
    monkeypatch.setattr(cpu, "_GROUPS", groups)
    numbers = numbers_of([100], [100], [3, 40, 2, 5, 31, 1, 18], [100], [33, 34, 33], [1] * 100, [10, 90], [90, 10], [100])
    pieces = list(cpu.cut(numbers))
    seen = torch.zeros(9, 100, dtype=torch.int64)
    for piece in pieces:
        seen[piece.rows, piece.tokens] += 1
        assert (piece.runs_t is None) == all(len(set(row.tolist())) == 1 for row in numbers[piece.rows, piece.tokens])
    assert torch.all(seen == 1)
    assert [piece.rows for piece in pieces if piece.tokens == slice(0, 100)] == [slice(0, 2), slice(3, 4), slice(8, 9)]
    assert len(pieces) == 3 + 5 + 3 + 4 + 2 + 2 - 1
    inputs = draw(100, 100, 8, dtype, rows=9)
    check(
        attention(*inputs, Documents(numbers), 0.0, "flash"),
        inputs,
        document_mask(numbers),
        1e-12 if dtype == torch.float64 else 1e-6,
    )


@every()
def test_F25_packed_is_separate(backend, request):
    dtype = dtype_of(request.node.callspec.params["backend"])
    numbers = numbers_of([5, 1, 6])
    inputs = draw(12, 12, 8, dtype, rows=1)
    moved = [x.detach().clone() for x in inputs]
    for x in moved:
        x[:, :, :5] += 3.0
    before, after = (attention(*given, Documents(numbers), 0.0, backend) for given in (inputs, moved))
    assert torch.equal(before[:, :, 5:], after[:, :, 5:]) and not torch.equal(before[:, :, :5], after[:, :, :5])
    for gradient in gradients(before[:, :, 6:], inputs):
        assert torch.all(gradient[:, :, :6] == 0)
    packed = gradients(before, inputs)
    grad = upstream(before)
    for piece in (slice(0, 5), slice(5, 6), slice(6, 12)):
        alone = [x.detach()[:, :, piece].clone().requires_grad_() for x in inputs]
        out = attention(*alone, None, 0.0, backend)
        tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 1e-2}
        torch.testing.assert_close(out, before[:, :, piece], **tolerance)
        for ours, theirs in zip(packed, torch.autograd.grad(out, alone, grad[:, :, piece])):
            torch.testing.assert_close(ours[:, :, piece], theirs, **tolerance)


@every()
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
def test_F25_documents_of_a_model_with_and_without_recompute(policy, backend, request):
    dtype = dtype_of(request.node.callspec.params["backend"])
    model = build_model(toy(attention=backend)).to(dtype)
    apply_remat(model, policy)
    tokens, numbers = token_rows(1), numbers_of([5, 1, 6])
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5]])
    changed = tokens.clone()
    changed[:, :5] = (changed[:, :5] + 1) % 53
    before, after = model(tokens, positions, numbers), model(changed, positions, numbers)
    assert torch.equal(before[:, 5:], after[:, 5:]) and not torch.equal(before[:, :5], after[:, :5])
    before.square().sum().backward()
    packed = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for piece in (slice(0, 5), slice(5, 6), slice(6, 12)):
        model(tokens[:, piece]).square().sum().backward()
    for ours, parameter in zip(packed, model.parameters()):
        scale = parameter.grad.abs().max()
        assert (ours - parameter.grad).abs().max() <= (1e-5 if dtype == torch.float32 else 5e-2) * scale


@with_dtypes(WITH_LSE)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("queries, keys", [(9, 9), (3, 8), (5, 2), (1, 4), (0, 3), (2, 0)])
def test_log_sum_exp_of_chunks(queries, keys, causal, backend, dtype):
    inputs = draw(queries, keys, 12, dtype)
    mask = causal_mask(queries, keys, torch.device("cpu")) if causal else torch.ones(queries, keys, dtype=torch.bool)
    mask = mask[None, None].expand(2, 1, -1, -1)
    out, lse = attention_with_lse(*inputs, causal=causal, backend=backend)
    check(out, inputs, mask)
    assert lse.dtype == torch.float32 and lse.shape == out.shape[:3] and not lse.requires_grad
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(lse.double(), plain(*inputs, mask, torch.float64)[1], rtol=tolerance, atol=tolerance)


@with_dtypes(WITH_LSE)
def test_log_sum_exp_of_packed_rows(backend, dtype):
    numbers, inputs = numbers_of(*LENGTHS), draw(12, 12, 16, dtype, rows=4)
    out, lse = attention_with_lse(*inputs, Documents(numbers), backend=backend)
    check(out, inputs, document_mask(numbers))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    exact = plain(*inputs, document_mask(numbers), torch.float64)[1]
    torch.testing.assert_close(lse.double(), exact, rtol=tolerance, atol=tolerance)


@with_dtypes(["cpu_flash", "math"])
def test_log_sum_exp_under_a_mask(backend, dtype):
    inputs = draw(6, 6, 8, dtype)
    mask = document_mask(numbers_of([2, 4], [3, 3])) & (torch.arange(6) != 4)[:, None]
    out, lse = attention_with_lse(*inputs, mask, backend=backend)
    check(out, inputs, mask)
    assert torch.all(lse[:, :, 4] == -torch.inf) and torch.isfinite(lse[:, :, :4]).all()


@with_dtypes(WITH_LSE)
def test_chunks_of_keys_merge_to_the_whole(backend, dtype):
    """Ring attention in one process: a causal chunk and a full one, merged by lse, then backward with the merged out and lse."""
    q, k, v = (x.detach() for x in draw(16, 16, 8, dtype))
    late, scale, chunks = q[:, :, 8:], 8**-0.5, [(slice(0, 8), False), (slice(8, 16), True)]
    parts = [flash_forward(late, k[:, :, keys], v[:, :, keys], causal, scale, None, backend) for keys, causal in chunks]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(part.float() * (part_lse - lse).exp()[..., None] for part, part_lse in parts).to(dtype)
    inputs = [x.clone().requires_grad_() for x in (late, k, v)]
    whole = attention(*inputs, None, 0.0, backend)
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 2e-2}
    torch.testing.assert_close(out, whole, **tolerance)
    grad = upstream(whole)
    expected = torch.autograd.grad(whole, inputs, grad)
    found = [flash_backward(grad, late, k[:, :, s], v[:, :, s], out, lse, causal, scale, None, backend) for s, causal in chunks]
    torch.testing.assert_close(found[0][0] + found[1][0], expected[0], **tolerance)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([found[0][i], found[1][i]], 2), expected[i], **tolerance)


@with_dtypes(WITH_LSE)
def test_a_chunk_of_packed_rows_is_the_attention_of_packed_rows(backend, dtype):
    numbers, inputs = numbers_of(*LENGTHS), draw(12, 12, 16, dtype, rows=4)
    out, lse = attention_with_lse(*inputs, Documents(numbers), backend=backend)
    grad, scale = upstream(out), 16**-0.5
    with torch.no_grad():
        chunk, chunk_lse = flash_forward(*inputs, True, scale, Documents(numbers), backend)
        assert torch.equal(chunk, out) and torch.equal(chunk_lse, lse)
        found = flash_backward(grad, *inputs, out, lse, True, scale, Documents(numbers), backend)
    for ours, theirs in zip(found, torch.autograd.grad(out, inputs, grad)):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["fa2", "torch_flash"])
def test_dropout_takes_the_generators_state_to_backward(name, monkeypatch):
    flash_fakes.install(monkeypatch, name)
    inputs = draw(8, 8, 8, torch.bfloat16)
    out = attention(*inputs, None, 0.1, "flash")  # the stand-ins assert in backward that they get their state again
    assert len(gradients(out, inputs)) == 3


def test_documents_are_runs():
    again = torch.tensor([[0, 0, 1, 1, 0, 0]])
    assert torch.equal(document_mask(again), document_mask(torch.tensor([[0, 0, 1, 1, 2, 2]])))
    bounds, longest = document_bounds(torch.tensor([[4, 4, 4, 7], [7, 7, 1, 4]]), torch.device("cpu"))
    assert bounds.dtype == torch.int32 and bounds.tolist() == [0, 3, 4, 6, 7, 8] and longest == 3
    inputs = draw(6, 6, 8, torch.float32, rows=1)
    out = attention(*inputs, Documents(again), 0.0, "flash")
    torch.testing.assert_close(out, attention(*inputs, Documents(again), 0.0, "math"), rtol=1e-5, atol=1e-6)


@every()
def test_documents_are_made_once_and_in_the_form_that_is_used(backend, request, monkeypatch):
    name, cpu_device = request.node.callspec.params["backend"], torch.device("cpu")
    made = prepare_documents(numbers_of([5, 7]), dtype_of(name), cpu_device, 8, 0.0, backend)
    assert (made.mask_B1TT is not None) == (name in ("sdpa", "math"))
    assert (made.bounds is not None) == (name in flash_fakes.NAMES)
    monkeypatch.setattr("dist_train.ops.attention.documents.document_mask", None)
    monkeypatch.setattr("dist_train.ops.attention.documents.document_bounds", None)
    attention(*draw(12, 12, 8, dtype_of(name), rows=1), made, 0.0, backend)


def test_autocast_decides_the_form(monkeypatch):
    flash_fakes.install(monkeypatch, "fa2")
    with torch.autocast("cpu", torch.bfloat16):
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: True)
        made = prepare_documents(numbers_of([5, 7]), torch.float32, torch.device("cpu"), 8, 0.0, "auto")
    assert made.bounds is not None


def test_packed_attention_compiles_without_a_break_and_is_a_sound_operator():
    numbers, inputs = numbers_of(*LENGTHS), draw(12, 12, 8, torch.float32, rows=4)
    given = (*inputs, numbers, 0, True, 8**-0.5, 0.0, "cpu_flash")
    torch.library.opcheck(
        api.flash_attention, given, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    )
    compiled = torch.compile(lambda *x: attention(*x, Documents(numbers), 0.0, "flash"), fullgraph=True, backend="aot_eager")
    eager = attention(*inputs, Documents(numbers), 0.0, "flash")
    assert torch.equal(compiled(*inputs), eager)


@every(["cpu_flash", "math"])
def test_gradcheck_of_packed_and_chunked_attention(backend):
    numbers = numbers_of([2, 3])
    inputs = draw(5, 5, 4, torch.float64, heads=2, kv_heads=1, rows=1)
    assert torch.autograd.gradcheck(lambda *x: attention(*x, Documents(numbers), 0.0, backend), inputs)
    assert torch.autograd.gradcheck(lambda *x: attention_with_lse(*x, backend=backend)[0], inputs)
