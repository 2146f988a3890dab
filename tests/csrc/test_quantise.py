"""int8 blocks and the largest of a row: kernels on the CPU and in the shim make the reference's bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dist_train.ops import library
from dist_train.ops.quantise import int8_decode_, int8_encode, take_largest_
from tests.csrc.harness import Kernels, build

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WRONG_TAIL = ("quantise/quantise_kernels.cuh", "a.columns - start < a.block ? a.columns - start : a.block", "a.block")

needs_library = pytest.mark.skipif(not library.loaded, reason=library.missing)


def draw(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).mul(5).to(dtype)


def awkward(columns: int, dtype: torch.dtype) -> Tensor:
    """Rows with zeros, ties between two codes, tiny and huge numbers, and numbers that are none."""
    x = draw(7, columns, dtype)
    x[0] = 0.0
    x[1] = torch.arange(columns).sub(columns // 2).div(2).clamp(-127, 127)
    x[2], x[3] = 1e-42, torch.finfo(dtype).max
    x[4, columns // 2], x[5, columns - 1], x[6, 0] = math.nan, math.inf, -math.inf
    return x


def encode_by(kernels: Kernels, x: Tensor, block: int) -> Tensor:
    rows, columns = x.shape
    coded = torch.full((rows, 4 * -(-columns // block) + columns), 99, dtype=torch.int8)
    kernels.dt_int8_encode(x, coded, rows, columns, block, x.dtype)
    return coded


def same(ours: Tensor, theirs: Tensor, block: int) -> None:
    """The same codes and scales; a NaN may have any bits."""
    head = 4 * -(-theirs.shape[1] // (block + 4)) if theirs.shape[1] else 0
    scales = [each[:, :head].contiguous().view(torch.float32) for each in (ours, theirs)]
    assert torch.equal(ours[:, head:], theirs[:, head:])
    torch.testing.assert_close(*scales, rtol=0, atol=0, equal_nan=True)


def take_by(kernels: Kernels, x: Tensor, count: int) -> Tensor:
    out = torch.full((len(x), 2, count), -9, dtype=torch.int32)
    scratch = torch.full((kernels.value("dt_take_scratch", *x.shape),), 85, dtype=torch.uint8)
    kernels.dt_take_largest(x, out, scratch, *x.shape, count)
    return out


def tied(rows: int, columns: int) -> Tensor:
    """Few values, so that many are equal; some are none."""
    x = draw(rows, columns).round()
    x[0] = 0.0
    x[-1, ::7], x[-1, 3::11] = math.nan, -math.inf
    return x


def check_take(take, x: Tensor, count: int) -> None:
    ours, theirs = x.clone(), x.clone()
    found, expected = take(ours, count), take_largest_(theirs, count, fused=False)
    assert torch.equal(found, expected) and torch.equal(ours.view(torch.int32), theirs.view(torch.int32))


def quick_check(kernels: Kernels) -> None:
    x = awkward(300, torch.float32)
    coded = encode_by(kernels, x, 256)
    same(coded, int8_encode(x, 256, fused=False), 256)
    out, expected = torch.empty_like(x), torch.empty_like(x)
    kernels.dt_int8_decode(coded, out, *x.shape, 256, x.dtype, False)
    int8_decode_(coded, expected, 256, fused=False)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    for count in (5, 700):
        for rows in (tied(2, 20001), draw(2, 20001)):
            check_take(lambda rows, k: take_by(kernels, rows, k), rows, count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 53, 256])
def test_codes_are_those_of_the_reference(dtype, block, isa):
    kernels = Kernels(build(only="quantise"))
    for columns in (1, 3, 53, 256, 1000, 4097):
        x = awkward(columns, dtype)
        expected = int8_encode(x, block, fused=False)
        same(int8_encode(x, block), expected, block)
        same(encode_by(kernels, x, block), expected, block)
        for add in (False, True):
            plain, fused, shim = (draw(7, columns, dtype, 1) for _ in range(3))
            int8_decode_(expected, plain, block, add, fused=False)
            int8_decode_(expected, fused, block, add)
            kernels.dt_int8_decode(expected, shim, *x.shape, block, dtype, add)
            for found in (fused, shim):
                torch.testing.assert_close(found, plain, rtol=0, atol=0, equal_nan=True)
            assert not plain[4:, columns // 2 if block >= columns else 0].isfinite().all()


def test_empty_rows_have_no_codes():
    for shape in ((0, 5), (3, 0)):
        assert int8_encode(torch.empty(shape), 256).shape == (shape[0], 4 * -(-shape[1] // 256) + shape[1])


@pytest.mark.parametrize("columns", [1, 3, 53, 1000, 4097, 50000])
def test_the_largest_are_exactly_so_many_and_of_equals_the_first(columns, isa):
    kernels = Kernels(build(only="quantise"))
    ways = [lambda rows, k: take_by(kernels, rows, k)] + [take_largest_] * library.loaded
    for take in ways:
        for count in {0, 1, columns // 100, columns // 2, columns - 1, columns}:
            for x in (draw(3, columns), tied(3, columns), torch.full((2, columns), 1e-42)):
                check_take(take, x, count)


def test_what_is_taken_is_what_topk_takes():
    x = draw(4, 3000)
    taken = take_largest_(x.clone(), 37)
    expected = x.abs().topk(37, sorted=False).indices.sort().values
    assert torch.equal(taken[:, 1].long(), expected)
    assert torch.equal(taken[:, 0].view(torch.float32), x.gather(1, expected))


@needs_library
def test_refusals_and_opcheck():
    x = draw(3, 600)
    with pytest.raises(RuntimeError, match="count=601"):
        take_largest_(x, 601)
    with pytest.raises(RuntimeError, match=r"\(3, 612\)"):
        int8_decode_(torch.zeros(3, 600, dtype=torch.int8), x, 256)
    torch.library.opcheck(torch.ops.dist_train.int8_encode.default, (x.T, 256))
    torch.library.opcheck(torch.ops.dist_train.int8_decode_.default, (int8_encode(x, 256), x.clone(), 256, True))
    torch.library.opcheck(torch.ops.dist_train.take_largest_.default, (x, 5))
    compiled = torch.compile(lambda a: take_largest_(a, 5), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(draw(3, 600)), take_largest_(draw(3, 600), 5))
