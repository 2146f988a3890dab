"""Dropout of a named stream, with the residual: kernels on the CPU and in the shim make the reference's bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dist_train.ops import library
from dist_train.ops.dropout import dropout_add, dropped, philox, stream
from tests.csrc.harness import Kernels, build

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = (0, 1, 3, 53, 1000, 4097)
WRONG_TAIL = ("dropout/dropout_kernels.cuh", "first + k < a.numel", "true")

needs_library = pytest.mark.skipif(not library.loaded, reason=library.missing)


def draw(size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_kernels(kernels: Kernels, x: Tensor, residual: Tensor | None, state: Tensor, p: float) -> Tensor:
    y = torch.full_like(x, 7.0)
    kernels.dt_dropout_add(x, residual, y, state, x.numel(), p, x.dtype)
    return y


def quick_check(kernels: Kernels) -> None:
    for size, offset, dtype in ((4097, 8, torch.float32), (53, 3, torch.bfloat16)):
        x, residual, state = draw(size, dtype), draw(size, dtype, 1), stream(5, offset)
        assert torch.equal(by_kernels(kernels, x, residual, state, 0.3), dropout_add(x, residual, state, 0.3, fused=False))


def test_the_generator_is_philox_4x32_10():
    """The first known answer of the paper's authors; then all words of two counters are different."""
    (first,) = philox(torch.zeros(1, dtype=torch.int64), torch.tensor(0)).tolist()
    assert [hex(word) for word in first] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]
    words = philox(torch.arange(2**32 - 1, 2**32 + 1), torch.tensor(-1)).flatten().tolist()
    assert len(set(words)) == 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_kernel_makes_the_bits_of_the_reference(dtype, isa):
    kernels = Kernels(build(only="dropout"))
    for size in SIZES:
        for offset in (0, 1, 6, 2**34 - 17):
            for p in (0.0, 0.1, 0.5, 1.0):
                state, x, residual = stream(2**63 + 12345, offset), draw(size, dtype), draw(size, dtype, 1)
                for other in (residual, None):
                    expected = dropout_add(x, other, state, p, fused=False)
                    assert torch.equal(dropout_add(x, other, state, p), expected)
                    assert torch.equal(by_kernels(kernels, x, other, state, p), expected)


def test_parts_of_a_tensor_get_their_parts_of_the_mask():
    whole = dropout_add(torch.ones(1000), None, stream(1, 100), 0.4)
    for start, stop in ((0, 1), (1, 333), (333, 1000)):
        assert torch.equal(dropout_add(torch.ones(stop - start), None, stream(1, 100 + start), 0.4), whole[start:stop])
    assert not torch.equal(dropout_add(torch.ones(1000), None, stream(2, 100), 0.4), whole)


def test_the_dropped_part_is_p_and_the_mean_stays():
    y = dropout_add(torch.ones(1 << 18), None, stream(3, 0), 0.3)
    assert float((y == 0).float().mean()) == pytest.approx(0.3, abs=0.005)
    assert float(y.mean()) == pytest.approx(1.0, abs=0.01)
    assert torch.equal(y == 0, dropped(1 << 18, stream(3, 0), 0.3))


def test_what_is_dropped_is_zero_whatever_it_was():
    state = stream(4, 0)
    gone = dropped(1000, state, 0.5)
    for value in (float("nan"), float("inf")):
        y = dropout_add(torch.full((1000,), value), torch.ones(1000), state, 0.5)
        assert (y[gone] == 1).all() and not y[~gone].isfinite().any()


@pytest.mark.parametrize("fused", [pytest.param(True, marks=needs_library), False])
def test_backward_has_the_mask_of_forward(fused):
    x, residual, dy, state = draw(1003).requires_grad_(), draw(1003, seed=1).requires_grad_(), draw(1003, seed=2), stream(9, 7)
    y = dropout_add(x, residual, state, 0.25, fused)
    dx, dresidual = torch.autograd.grad(y, (x, residual), dy)
    gone = dropped(1003, state, 0.25)
    torch.testing.assert_close(dx, torch.where(gone, 0.0, dy / 0.75))
    assert torch.equal(dresidual, dy)


def test_gradcheck_of_the_reference():
    x, residual = (torch.randn(37, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: dropout_add(a, b, stream(1, 2), 0.3), (x, residual))


@needs_library
def test_strides_refusals_opcheck_and_compile():
    x, residual, state = draw(600).view(20, 30).T, draw(600, seed=1).view(30, 20), stream(1, 0)
    assert torch.equal(dropout_add(x, residual, state, 0.2), dropout_add(x.contiguous(), residual, state, 0.2, fused=False))
    with pytest.raises(RuntimeError, match="p=1.5"):
        dropout_add(x, None, state, 1.5)
    with pytest.raises(ValueError, match="p=1.5"):
        dropout_add(x, None, state, 1.5, fused=False)
    with pytest.raises(ValueError, match="offset=-1"):
        stream(0, -1)
    leaves = x.detach().requires_grad_(), residual.detach().requires_grad_()
    torch.library.opcheck(torch.ops.dist_train.dropout_add.default, (*leaves, state, 0.2))
    compiled = torch.compile(lambda a, b, s: dropout_add(a, b, s, 0.2), fullgraph=True, backend="aot_eager")
    for offset in (0, 40):
        assert torch.equal(compiled(x, residual, stream(1, offset)), dropout_add(x, residual, stream(1, offset), 0.2))
