"""Rotary positions: on the CPU, and the CUDA kernel in the shim."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dist_train.ops import library
from dist_train.ops.rotary import reference, rotary, rotary_, rotary_pair, rotary_table
from tests.csrc.harness import Kernels, build, error_check

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [
    (1, 1, 1, 2),
    (2, 3, 5, 6),
    (1, 7, 4, 64),
    (2, 5, 3, 106),
    (2, 3, 17, 128),
    (1, 2, 1, 4098),
    (0, 3, 2, 8),
    (2, 0, 2, 8),
    (1, 2, 0, 8),
]
WRONG_TAIL = ("rotary/rotary_kernels.cuh", "i < a.half;", "i <= a.half;")

needs_library = pytest.mark.skipif(not library.loaded, reason=library.missing)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table(batches: int, tokens: int, width: int) -> tuple[Tensor, Tensor]:
    """Of two documents packed in a row, which begin elsewhere in each row."""
    positions = torch.stack([(torch.arange(tokens) + 300 * row) % 1000 for row in range(max(batches, 1))])
    return rotary_table(positions, width, 1e4)


def run(function, inputs: list[Tensor], cos: Tensor, sin: Tensor, dys: list[Tensor]) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    results = function(*leaves, cos, sin)
    results = list(results) if isinstance(results, tuple) else [results]
    return [
        *(each.detach() for each in results),
        *torch.autograd.grad(results, leaves, [dy.to(y.dtype) for dy, y in zip(dys, results, strict=True)]),
    ]


def both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return reference(q, cos, sin), reference(k, cos, sin)


def compare(ours: list[Tensor], function, inputs: list[Tensor], cos: Tensor, sin: Tensor, dys: list[Tensor]) -> None:
    theirs = run(function, inputs, cos, sin, dys)
    exact = run(function, [each.double() for each in inputs], cos.double(), sin.double(), dys)
    for mine, their, true in zip(ours, theirs, exact, strict=True):
        error_check(mine, their, true)


def strides(x: Tensor) -> list[int]:
    return list(x.stride())[:3]


def call_kernel(
    kernels: Kernels, inputs: list[Tensor], outs: list[Tensor], cos: Tensor, sin: Tensor, inverse: bool
) -> list[Tensor]:
    batches, tokens, _, width = inputs[0].shape
    gaps = torch.tensor([gap for x, y in zip(inputs, outs, strict=True) for gap in (*strides(x), *strides(y))])
    arguments: list[object] = []
    for x, y in zip(inputs, outs, strict=True):
        arguments += [*(each.as_strided((min(1, each.numel()),), (1,)) for each in (x, y)), x.size(2)]
    arguments += [None, None, 0] * (2 - len(inputs))
    apart = 0 if cos.size(0) == 1 else tokens * width
    kernels.dt_rotary(*arguments, gaps, cos, sin, batches, tokens, width // 2, apart, inverse, inputs[0].dtype)
    return outs


def quick_check(kernels: Kernels) -> None:
    for shape, dtype in (((2, 3, 5, 64), torch.bfloat16), ((1, 2, 3, 8), torch.float32), ((1, 3, 2, 6), torch.float16)):
        q, k = draw(*shape, dtype=dtype), draw(*shape[:2], 2, shape[3], dtype=dtype, seed=1)
        cos, sin = table(shape[0], shape[1], shape[3])
        got = call_kernel(kernels, [q, k], [torch.empty_like(q), torch.empty_like(k)], cos, sin, False)
        torch.testing.assert_close(got, list(both(q, k, cos, sin)), rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_shim(dtype):
    kernels = Kernels(build(only="rotary"))
    for shape in SHAPES:
        batches, tokens, heads, width = shape
        q, k = draw(*shape, dtype=dtype), draw(batches, tokens, 2, width, dtype=dtype, seed=1)
        for cos, sin in (table(batches, tokens, width), table(1, tokens, width)):
            if cos.size(0) not in (1, batches):
                continue
            dys = [draw(*q.shape, seed=2).to(dtype), draw(*k.shape, seed=3).to(dtype)]
            for count in (1, 2):
                inputs, grads = [q, k][:count], dys[:count]
                results = call_kernel(kernels, inputs, [torch.empty_like(x) for x in inputs], cos, sin, False)
                results = results + call_kernel(kernels, grads, [torch.empty_like(x) for x in inputs], cos, sin, True)
                compare(results, both if count == 2 else reference, inputs, cos, sin, grads)


@pytest.mark.parametrize("width", [64, 10])
def test_shim_in_place_on_slices(width):
    kernels = Kernels(build(only="rotary"))
    for dtype in DTYPES:
        for offset in (0, 1):
            memory = draw(offset + 2 * 3 * 8 * width, dtype=dtype)
            before = memory.clone()
            qkv, old = memory[offset:].view(2, 3, 8, width), before[offset:].view(2, 3, 8, width)
            cos, sin = table(2, 3, width)
            views, olds = [[x[:, :, :4], x[:, :, 4:6]] for x in (qkv, old)]
            call_kernel(kernels, views, views, cos, sin, False)
            for mine, x in zip(views, olds, strict=True):
                error_check(mine, reference(x, cos, sin), reference(x.double(), cos.double(), sin.double()))
            assert torch.equal(qkv[:, :, 6:], old[:, :, 6:]) and torch.equal(memory[:offset], before[:offset])


@needs_library
@pytest.mark.parametrize("isa", library.ISAS)
def test_cpu(isa):
    try:
        if library.cpu_isa(isa) != isa:
            return  # this processor lacks it: the sets below are checked
        for dtype in DTYPES:
            for batches, tokens, heads, width in SHAPES:
                q, k = draw(batches, tokens, heads, width, dtype=dtype), draw(batches, tokens, 2, width, dtype=dtype, seed=1)
                dys = [draw(*q.shape, dtype=dtype, seed=2), draw(*k.shape, dtype=dtype, seed=3)]
                cos, sin = table(batches, tokens, width) if batches else table(1, tokens, width)
                compare(run(rotary, [q], cos, sin, dys[:1]), reference, [q], cos, sin, dys[:1])
                compare(run(rotary_pair, [q, k], cos, sin, dys), both, [q, k], cos, sin, dys)
                compare(run(lambda x, c, s: rotary_(x * 1, c, s), [q], cos, sin, dys[:1]), reference, [q], cos, sin, dys[:1])
    finally:
        library.cpu_isa()


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_input(dtype):
    qkv = draw(2, 5, 8 * 10 + 1, dtype=dtype)[..., 1:].unflatten(-1, (8, 10))  # not aligned, tokens apart
    dy = draw(2, 4, 5, 10, dtype=dtype, seed=1).transpose(1, 2)
    cos, sin = table(1, 5, 10)
    for x in (
        qkv[:, :, :4],
        qkv[:, :, 1::2],
        qkv.transpose(1, 2).contiguous().transpose(1, 2)[:, :, 4:],
        draw(2, 5, 10, 4, dtype=dtype).mT,
    ):
        compare(run(rotary, [x], cos, sin, [dy]), reference, [x], cos, sin, [dy])
        compare(
            run(rotary_pair, [x, x[:, :, :1]], cos, sin, [dy, dy[:, :, :1]]), both, [x, x[:, :, :1]], cos, sin, [dy, dy[:, :, :1]]
        )
    one, two = torch.ones(2, 5, 4, 10, dtype=dtype), dy.new_ones(()).expand(2, 5, 4, 10)
    assert torch.equal(rotary(one, cos, sin), rotary(two, cos, sin))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
def test_extreme_values(dtype):
    finfo = torch.finfo(dtype)
    values = [
        finfo.max / 4,
        -finfo.max / 4,
        finfo.smallest_normal / 4,
        -0.0,
        torch.inf,
        1.0,
        torch.nan,
        1.0,
        -torch.inf,
        torch.inf,
    ]
    x = torch.tensor(values, dtype=dtype).view(1, 1, 5, 2)
    cos, sin = table(1, 1, 2)
    cos, sin = cos * 0.5, sin + 0.5
    compare(run(rotary, [x], cos, sin, [x]), reference, [x], cos, sin, [x])


@needs_library
def test_in_place():
    cos, sin = table(2, 5, 10)
    leaf = draw(2, 5, 8 * 10).requires_grad_()
    projected = leaf * 1.0
    view = projected.view(2, 5, 8, 10)[:, :, 2:6]
    turned = rotary_(view, cos, sin)
    assert turned.data_ptr() == view.data_ptr()
    dy = draw(2, 5, 80, seed=1)
    projected.backward(dy)  # the whole projection now holds the turned heads
    other = leaf.detach().clone().requires_grad_()
    heads = other.view(2, 5, 8, 10)
    torch.cat((heads[:, :, :2], reference(heads[:, :, 2:6], cos, sin), heads[:, :, 6:]), 2).flatten(2).backward(dy)
    torch.testing.assert_close(leaf.grad, other.grad)
    wanted = draw(2, 5, 4, 10).requires_grad_()
    before = wanted.detach().clone()
    rotary_(wanted, cos, sin).sum().backward()
    assert torch.equal(wanted.detach(), before) and wanted.grad is not None
    needed = draw(2, 5, 4, 10).requires_grad_().exp()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        rotary_(needed, cos, sin).sum().backward()


@needs_library
def test_registration():
    cos, sin = table(2, 5, 10)
    q, k = draw(2, 5, 4, 10), draw(2, 5, 2, 10, seed=1)
    ops = torch.ops.dist_train
    for inverse in (False, True):
        torch.library.opcheck(ops.rotary.default, (q.clone().requires_grad_(), cos, sin, inverse))
        torch.library.opcheck(
            ops.rotary_pair.default, (q.clone().requires_grad_(), k.clone().requires_grad_(), cos, sin, inverse)
        )
        torch.library.opcheck(ops.rotary_.default, (q.clone(), cos, sin, inverse))
    for function, inputs in ((rotary, [q]), (rotary_pair, [q, k]), (lambda x, c, s: rotary_(x * 1, c, s), [q])):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        got, wanted = (run(each, inputs, cos, sin, inputs) for each in (compiled, function))
        assert all(torch.equal(mine, true) for mine, true in zip(got, wanted, strict=True))


@needs_library
def test_what_the_kernel_does_not_take_goes_to_the_reference():
    cos, sin = table(2, 5, 10)
    x = draw(2, 5, 4, 10)
    for c, s in ((cos.bfloat16(), sin.bfloat16()), (cos[:, :1], sin[:, :1]), (cos.requires_grad_(), sin)):
        assert torch.equal(rotary(x, c, s), reference(x, c, s))
    with pytest.raises(RuntimeError, match="cos and sin must be float32"):
        torch.ops.dist_train.rotary(x, cos[:, :1].detach(), sin[:, :1], False)


def test_gradients_by_finite_differences():
    cos, sin = (each.double() for each in table(2, 3, 6))
    q, k = draw(2, 3, 2, 6).double().requires_grad_(), draw(2, 3, 1, 6, seed=1).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: rotary_pair(a, b, cos, sin), (q, k))


@needs_library
def test_any_number_of_threads_gives_the_same_bits():
    x, (cos, sin) = draw(3, 50, 6, 64, dtype=torch.bfloat16), table(3, 50, 64)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(rotary(x, cos, sin))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
