"""Cross entropy: on the CPU, and the CUDA kernels in the shim; whole, and as the parts of vocabulary-parallel ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dist_train.ops import cross_entropy, library
from dist_train.ops.cross_entropy import cross_entropy_sum, row_gradient, row_terms
from tests.csrc.harness import Kernels, build, error_check

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (5, 3), (7, 53), (3, 1000), (4, 4097), (2, 20011)]
WRONG_TAIL = ("cross_entropy/cross_entropy_kernels.cuh", "(columns - head) / N * N", "(columns - head + N - 1) / N * N")

needs_library = pytest.mark.skipif(not library.loaded, reason=library.missing)


def draw(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Logits, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(rows, columns, generator=generator)).to(dtype)
    labels = torch.randint(columns, (rows,), generator=generator)
    labels[1::3] = -100
    return logits, labels


def run(logits: Tensor, labels: Tensor, z_loss: float, **options) -> list[Tensor]:
    leaf = logits.detach().requires_grad_()
    objective, entropy = cross_entropy_sum(leaf, labels, z_loss, **options)
    return [objective.detach(), entropy, torch.autograd.grad(objective * 0.7, leaf)[0]]


def compare(ours: list[Tensor], logits: Tensor, labels: Tensor, z_loss: float) -> None:
    theirs = run(logits, labels, z_loss, fused=False)
    exact = run(logits.double(), labels, z_loss)
    for mine, their, true in zip(ours, theirs, exact, strict=True):
        error_check(mine, their, true)


def call_kernels(kernels: Kernels, logits: Tensor, labels: Tensor, z_loss: float, stride: int, in_place: bool) -> list[Tensor]:
    """`logits` may have more memory than its labels say: rows of `stride` elements."""
    rows, columns = labels.numel(), logits.size(-1)
    maximum, total, target, lse = (torch.empty(rows) for _ in range(4))
    objective, entropy, upstream = torch.empty(()), torch.empty(()), torch.tensor(0.7)
    flat = logits.as_strided((logits.untyped_storage().nbytes() // logits.element_size() - logits.storage_offset(),), (1,))
    kernels.dt_cross_entropy_terms(flat, labels, maximum, total, target, rows, columns, stride, 0, logits.dtype)
    kernels.dt_cross_entropy_finish(labels, maximum, total, target, lse, objective, entropy, rows, columns, z_loss)
    grad = flat if in_place else torch.empty(rows, columns, dtype=logits.dtype)
    gaps = (stride, stride if in_place else columns)
    kernels.dt_cross_entropy_backward(upstream, 0, flat, labels, lse, grad, rows, columns, *gaps, 0, logits.dtype, z_loss)
    return [objective, entropy, logits if in_place else grad]


def quick_check(kernels: Kernels) -> None:
    for rows, columns, dtype in (
        (3, 9001, torch.float32),
        (600, 5, torch.float32),
        (4, 5003, torch.bfloat16),
        (2, 40, torch.float16),
    ):
        logits, labels = draw(rows, columns, dtype)
        exact = run(logits.double(), labels, 1e-2)
        for mine, true in zip(call_kernels(kernels, logits, labels, 1e-2, columns, False), exact, strict=True):
            torch.testing.assert_close(mine.double(), true, rtol=max(torch.finfo(dtype).eps, 1e-5), atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
def test_shim(dtype, z_loss):
    kernels = Kernels(build(only="cross_entropy"))
    for rows, columns in SHAPES:
        logits, labels = draw(rows, columns, dtype)
        for offset, stride in ((0, columns), (1, columns), (3, columns + 5)):  # aligned or not, rows that lie apart
            memory = torch.full((offset + rows * stride,), torch.nan, dtype=dtype)
            view = memory[offset:].view(rows, stride)[:, :columns]
            view.copy_(logits)
            compare(call_kernels(kernels, view, labels, z_loss, stride, False), logits, labels, z_loss)
            compare(call_kernels(kernels, view, labels, z_loss, stride, True), logits, labels, z_loss)
            assert stride == columns or memory[offset:].view(rows, stride)[:, columns:].isnan().all()


def test_shim_a_wrong_label_is_told_by_nan():
    kernels = Kernels(build(only="cross_entropy"))
    logits, labels = draw(4, 53, torch.float32)
    labels[0] = 53
    objective, entropy, _ = call_kernels(kernels, logits, labels, 0.0, 53, False)
    assert objective.isnan() and entropy.isnan()


@needs_library
@pytest.mark.parametrize("isa", library.ISAS)
@pytest.mark.parametrize("reuse_logits", [False, True])
def test_cpu(isa, reuse_logits):
    try:
        if library.cpu_isa(isa) != isa:
            return  # this processor lacks it: the sets below are checked
        for dtype in DTYPES:
            for shape in SHAPES:
                for z_loss in (0.0, 1e-2):
                    logits, labels = draw(*shape, dtype)
                    compare(run(logits.clone(), labels, z_loss, reuse_logits=reuse_logits), logits, labels, z_loss)
    finally:
        library.cpu_isa()


@needs_library
def test_strided_unaligned_and_empty_input():
    for dtype in DTYPES:
        logits, labels = draw(6, 120, dtype)
        for view, names in (
            (logits[:, 3:56], labels),
            (logits[::2, :53], labels[::2]),
            (logits[:, ::2], labels),
            (logits[:0], labels[:0]),
        ):
            names = names.where(names == -100, names % view.size(-1))
            compare(run(view, names, 1e-2), view, names, 1e-2)
        assert run(logits.view(2, 3, 120), labels.view(2, 3), 0.0)[2].shape == (2, 3, 120)


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values(dtype):
    finfo = torch.finfo(dtype)
    rows = [
        [finfo.max, -finfo.max, 0.0, 1.0],
        [finfo.max, finfo.max, 0.0, 1.0],
        [finfo.smallest_normal / 4, -finfo.smallest_normal / 4, 0.0, -0.0],
        [-torch.inf, 0.0, 1.0, -1e4],
        [-1e4, -1e4, -1e4, -1e4],
    ]
    logits = torch.tensor(rows, dtype=dtype).repeat(1, 20)
    for label in (0, 1, 2):
        for row in logits.split(1):
            compare(run(row, torch.tensor([label]), 0.0), row, torch.tensor([label]), 0.0)
    for bad in (torch.nan, torch.inf):
        row = torch.tensor([[1.0, bad, 2.0]], dtype=dtype)
        objective, entropy, grad = run(row, torch.tensor([0]), 0.0)
        assert not objective.isfinite() and not entropy.isfinite() and not grad.isfinite().all()
        objective, _, grad = run(row, torch.tensor([-100]), 0.0)  # nothing comes of a token that is not counted
        assert objective == 0 and (grad == 0).all()


@needs_library
@pytest.mark.parametrize("reuse_logits", [False, True])
def test_the_reference_agrees_when_it_writes_over_the_logits(reuse_logits):
    logits, labels = draw(7, 53, torch.float64)
    memory = logits.clone().requires_grad_()
    objective, _ = cross_entropy_sum(memory * 1, labels, 1e-2, reuse_logits=reuse_logits)
    true = run(logits, labels, 1e-2)
    torch.testing.assert_close([objective.detach(), torch.autograd.grad(objective * 0.7, memory)[0]], [true[0], true[2]])


@needs_library
@pytest.mark.parametrize("fused", [False, True])
def test_reused_logits_are_the_gradient_and_autograd_knows(fused):
    logits, labels = draw(7, 53, torch.float32)
    leaf = logits.clone().requires_grad_()
    head = leaf * 2.0
    objective, _ = cross_entropy_sum(head, labels, fused=fused, reuse_logits=True)
    objective.backward(retain_graph=True)
    torch.testing.assert_close(leaf.grad, 2 * head.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        objective.backward()
    capped = leaf.tanh()  # needs its own result in backward
    objective, _ = cross_entropy_sum(capped, labels, fused=fused, reuse_logits=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        objective.backward()


@pytest.mark.parametrize("fused", [pytest.param(True, marks=needs_library), False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_with_parts_of_the_vocabulary_add_up(dtype, fused):
    logits, labels = draw(7, 53, dtype)
    logits[3, :20] = -torch.inf  # a rank that knows nothing of a row
    labels[3] = 40
    cuts = [(0, 20), (20, 21), (21, 53)]
    shards = [logits[:, a:b] for a, b in cuts]
    maxima, sums, targets = zip(*(row_terms(x, labels, a, fused) for x, (a, _) in zip(shards, cuts, strict=True)), strict=True)
    top = torch.stack(maxima).amax(0)
    lse = top + sum(s * (m - top).exp() for s, m in zip(sums, maxima, strict=True)).log()
    target, live = sum(targets), labels != -100
    upstream = torch.arange(7.0)
    exact = logits.double().requires_grad_()
    true = torch.nn.functional.cross_entropy(exact, labels, reduction="none")
    torch.testing.assert_close((lse - target).where(live, 0.0).double(), true.detach(), rtol=1e-5, atol=1e-5)
    ((true + 0.1 * exact.logsumexp(-1).square()).where(live, 0.0) * upstream).sum().backward()
    grads = [row_gradient(upstream, x, labels, lse, 0.1, a, fused) for x, (a, _) in zip(shards, cuts, strict=True)]
    torch.testing.assert_close(torch.cat(grads, -1).double(), exact.grad, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_shim_ranks_with_parts_of_the_vocabulary():
    kernels = Kernels(build(only="cross_entropy"))
    logits, labels = draw(7, 53, torch.float32)
    logits[0, :20] = -torch.inf
    for a, b in [(0, 20), (20, 21), (21, 53)]:
        part = logits[:, a:b].contiguous()
        got, lse = [torch.empty(7) for _ in range(3)], torch.linspace(9, 15, 7)
        kernels.dt_cross_entropy_terms(part, labels, *got, 7, b - a, b - a, a, part.dtype)
        torch.testing.assert_close(got, list(row_terms(part, labels, a, fused=False)), rtol=1e-6, atol=1e-6)
        grad, upstream = torch.empty_like(part), torch.arange(7.0)
        kernels.dt_cross_entropy_backward(upstream, 1, part, labels, lse, grad, 7, b - a, b - a, b - a, a, part.dtype, 0.1)
        torch.testing.assert_close(grad, row_gradient(upstream, part, labels, lse, 0.1, a, fused=False), rtol=1e-5, atol=1e-6)


@needs_library
def test_registration():
    logits, labels = draw(7, 53, torch.float32)
    ops, lse, one = torch.ops.dist_train, torch.ones(7), torch.tensor(1.0)
    torch.library.opcheck(ops.cross_entropy.default, (logits.clone().requires_grad_(), labels, 1e-2))
    torch.library.opcheck(ops.cross_entropy_terms.default, (logits, labels, 20))
    torch.library.opcheck(ops.cross_entropy_backward.default, (one, logits, labels, lse, 1e-2, 0))
    torch.library.opcheck(ops.cross_entropy_backward_.default, (one, logits.clone(), labels, lse, 1e-2, 0))
    compiled = torch.compile(cross_entropy_sum, fullgraph=True, backend="aot_eager")
    leaves = [logits.clone().requires_grad_() for _ in range(2)]
    results = [function(leaf, labels, 1e-2) for function, leaf in zip((compiled, cross_entropy_sum), leaves, strict=True)]
    for objective, _ in results:
        objective.backward()
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(leaves[0].grad, leaves[1].grad)


@needs_library
def test_wrong_arguments_are_told():
    logits, labels = draw(7, 53, torch.float32)
    for bad, message in (
        (labels.int(), "labels must be int64"),
        (labels[1:], "6 labels for 7 rows"),
        (labels + 60, "out of bounds"),
    ):
        with pytest.raises(RuntimeError, match=message):
            cross_entropy_sum(logits, bad)


@needs_library
def test_any_number_of_threads_gives_the_same_bits():
    logits, labels = draw(100, 3001, torch.bfloat16)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(logits, labels, 1e-2))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_gradients_by_finite_differences():
    logits, labels = draw(4, 15, torch.float64)
    assert torch.autograd.gradcheck(lambda x: cross_entropy.cross_entropy_sum(x, labels, 1e-2)[0] * 1.7, logits.requires_grad_())
