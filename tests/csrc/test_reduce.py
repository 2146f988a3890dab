"""Sums of squares and sums of tensors of different dtypes: on the CPU, and the CUDA kernels in the shim."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dist_train.ops import library
from dist_train.ops.reduce import accumulate_, sum_of_squares
from tests.csrc.harness import Kernels, build

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = (0, 1, 3, 53, 1000, 4097, 40000, 100003)
WRONG_TAIL = ("reduce/reduce_kernels.cuh", "i + N <= end", "i < end")

needs_library = pytest.mark.skipif(not library.loaded, reason=library.missing)


def draw(size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).mul(9).to(dtype)


def by_kernels(kernels: Kernels, tensors: list[Tensor]) -> Tensor:
    chunks = [-(-each.numel() // 32768) for each in tensors]
    parts, out = torch.full((sum(chunks),), math.nan, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for tensor, part in zip(tensors, parts.split(chunks), strict=True):
        kernels.dt_chunk_squares(tensor, part, tensor.numel(), tensor.dtype)
    kernels.dt_sum_parts(parts, out, len(parts))
    return out


def check(found: Tensor, tensors: list[Tensor]) -> None:
    assert found.dtype == torch.float64 and found.shape == ()
    assert float(found) == pytest.approx(math.fsum(float(x) ** 2 for each in tensors for x in each.double().tolist()), rel=1e-13)


def quick_check(kernels: Kernels) -> None:
    for dtype in DTYPES:
        tensors = [draw(size, dtype, size) for size in (40001, 7, 0)]
        check(by_kernels(kernels, tensors), tensors)
    total, addend = draw(1003, torch.float32), draw(1003, torch.bfloat16, 1)
    expected = total + addend
    kernels.dt_add_into(total, addend, 1003, total.dtype, addend.dtype)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("fused", [pytest.param(True, marks=needs_library), False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_add_up_in_fp64(dtype, fused):
    for tensors in [[draw(size, dtype)] for size in SIZES] + [[draw(size, dtype, size) for size in SIZES]]:
        check(sum_of_squares(tensors, fused), tensors)


@needs_library
def test_the_bits_depend_neither_on_threads_nor_on_the_instruction_set():
    tensors, found = [draw(100003, torch.float32)[1:], draw(70000, torch.bfloat16)], set()
    threads = torch.get_num_threads()
    try:
        for isa in library.ISAS:
            library.cpu_isa(isa)
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                found.add(float(sum_of_squares(tensors)))
    finally:
        torch.set_num_threads(threads)
        library.cpu_isa()
    assert len(found) == 1


def test_the_sum_is_finite_where_every_element_is():
    kernels = Kernels(build(only="reduce"))
    ways = [lambda x: by_kernels(kernels, [x]), lambda x: sum_of_squares([x], fused=False)]
    if library.loaded:
        ways.append(lambda x: sum_of_squares([x]))
    for way in ways:
        for dtype in DTYPES:
            for size in (1, 33, 50000):
                x = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
                assert way(x).isfinite()
                for wrong in (math.nan, math.inf, -math.inf):
                    for place in (0, size - 1):
                        bad = x.clone()
                        bad[place] = wrong
                        assert not way(bad).isfinite()
        assert float(way(torch.full((7,), 1e-42))) == pytest.approx(7e-84, rel=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("addend", DTYPES)
def test_an_addend_of_another_dtype_is_added_in_fp32_and_rounded_once(dtype, addend, isa):
    kernels = Kernels(build(only="reduce"))
    for size in SIZES:
        a, b = draw(size + 1, dtype)[1:], draw(size, addend, 1)
        expected = (a.float() + b.float()).to(dtype)
        by_shim = a.clone()
        kernels.dt_add_into(by_shim, b, size, dtype, addend)
        assert torch.equal(by_shim, expected)
        found = a.clone()
        accumulate_([found], [b])
        assert torch.equal(found, expected) or not library.loaded


@needs_library
def test_strided_tensors_and_opcheck():
    x = draw(600, torch.float32).view(20, 30).T
    assert float(sum_of_squares([x])) == float(sum_of_squares([x.contiguous()]))
    total = draw(600, torch.float32, 2).view(30, 20)
    expected = total + x
    accumulate_([total], [x])
    assert torch.equal(total, expected)
    torch.library.opcheck(torch.ops.dist_train.sum_of_squares.default, ([x, total],))
    torch.library.opcheck(torch.ops.dist_train.accumulate_.default, ([total], [draw(600, torch.bfloat16)]))
    compiled = torch.compile(lambda a: sum_of_squares([a]) + 1, fullgraph=True, backend="aot_eager")
    assert float(compiled(x)) == float(sum_of_squares([x]) + 1)
