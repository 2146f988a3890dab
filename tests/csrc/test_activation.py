"""SwiGLU, GEGLU and GELU: on the CPU, and the CUDA kernels in the shim."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dist_train.ops import gelu, library, swiglu
from tests.csrc.harness import Kernels, build, error_check

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1,), (3,), (53,), (2, 1000), (3, 4097), (0,), (2, 0), (0, 5)]
SILU, GELU = 0, 1
OPS = {  # fused, reference, inputs
    "swiglu": (swiglu.swiglu, swiglu.reference, 2),
    "geglu": (gelu.geglu, gelu.gated_reference, 2),
    "gelu": (gelu.gelu, gelu.reference, 1),
}
WRONG_TAIL = ("activation/activation_kernels.cuh", "i + N <= columns;", "i < columns;")

needs_library = pytest.mark.skipif(not library.loaded, reason=library.missing)


def draw(shape, count: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(3 * torch.randn(shape, generator=generator)).to(dtype) for _ in range(count)]


def run(function, inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def compare(name: str, inputs: list[Tensor], dy: Tensor) -> None:
    fused, reference, _ = OPS[name]
    ours, theirs = run(fused, inputs, dy), run(reference, inputs, dy)
    exact = run(reference, [each.double() for each in inputs], dy)
    for mine, their, true in zip(ours, theirs, exact, strict=True):
        error_check(mine, their, true)


def quick_check(kernels: Kernels) -> None:
    for activation, reference in ((SILU, swiglu.reference), (GELU, gelu.gated_reference)):
        for size, dtype in ((4097, torch.float32), (5003, torch.bfloat16), (7, torch.float16)):
            gate, up, dy = draw(size, 3, dtype)
            y, dgate, dup = (torch.empty_like(gate) for _ in range(3))
            kernels.dt_activation_forward(gate, up, y, 1, size, size, size, dtype, activation)
            kernels.dt_activation_backward(dy, gate, up, dgate, dup, 1, size, size, size, dtype, activation)
            for mine, true in zip((y, dgate, dup), run(reference, [gate.double(), up.double()], dy), strict=True):
                torch.testing.assert_close(mine.double(), true, rtol=max(torch.finfo(dtype).eps, 1e-5), atol=1e-5)


@needs_library
@pytest.mark.parametrize("isa", library.ISAS)
@pytest.mark.parametrize("name", OPS)
def test_cpu(name, isa):
    try:
        if library.cpu_isa(isa) != isa:
            return  # this processor lacks it: the sets below are checked
        for dtype in DTYPES:
            for shape in SHAPES:
                *inputs, dy = draw(shape, OPS[name][2] + 1, dtype)
                compare(name, inputs, dy)
    finally:
        library.cpu_isa()


def call_kernels(kernels: Kernels, name: str, inputs: list[Tensor], dy: Tensor, strides: list[int]) -> list[Tensor]:
    """The kernels on rows of dy's shape, which lie `strides` elements apart in the inputs."""
    rows, columns = dy.shape
    x, up = (*inputs, None)[:2]
    activation = SILU if name == "swiglu" else GELU
    y, dx, dup = (torch.empty_like(dy) for _ in range(3))
    sizes = rows, columns, strides[0], strides[-1], dy.dtype, activation
    kernels.dt_activation_forward(x, up, y, *sizes)
    kernels.dt_activation_backward(dy, x, up, dx, dup if up is not None else None, *sizes)
    return [y, dx, dup][: 1 + len(inputs)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_shim(name, dtype):
    kernels = Kernels(build(only="activation"))
    for columns in (1, 3, 53, 1000, 4096, 4097, 9000):
        for offset in (0, 1):  # the second is not aligned
            *inputs, dy = draw((1, columns), OPS[name][2] + 1, dtype)
            shifted = [torch.cat((each.new_zeros(offset), each[0]))[offset:] for each in inputs]
            got = call_kernels(kernels, name, shifted, dy, [columns])
            reference = OPS[name][1]
            exact = run(reference, [each.double() for each in inputs], dy)
            for mine, their, true in zip(got, run(reference, inputs, dy), exact, strict=True):
                error_check(mine, their, true)


@pytest.mark.parametrize("columns", [1000, 1536, 77])
def test_shim_takes_rows_that_lie_apart(columns):
    kernels = Kernels(build(only="activation"))
    for dtype in DTYPES:
        both, dy = draw((3, 2 * columns), 1, dtype)[0], draw((3, columns), 1, dtype, seed=1)[0]
        gate, up = both.chunk(2, dim=-1)
        flat = both.flatten()
        got = call_kernels(kernels, "swiglu", [flat, flat[columns:]], dy, [2 * columns, 2 * columns])
        exact = run(swiglu.reference, [gate.double(), up.double()], dy)
        for mine, their, true in zip(got, run(swiglu.reference, [gate, up], dy), exact, strict=True):
            error_check(mine, their, true)


@needs_library
@pytest.mark.parametrize("name", OPS)
def test_strided_and_unaligned_input(name):
    count = OPS[name][2]
    for dtype in DTYPES:
        halves = list(draw((2, 3, 106), 1, dtype)[0].chunk(2, dim=-1))
        dy = draw((2, 3, 53), 1, dtype, seed=1)[0]
        compare(name, halves[:count], dy)
        compare(name, [each.transpose(0, 1) for each in halves[:count]], dy.transpose(0, 1))
        compare(name, draw((53, 2), count, dtype), draw((2, 53), 1, dtype)[0].t())
        compare(name, [each[1:] for each in draw(54, count, dtype)], draw(53, 1, dtype)[0])
        compare(name, [each[:, ::2] for each in draw((4, 106), count, dtype)], draw((4, 53), 1, dtype)[0])
        compare(name, [halves[0], dy.clone()][:count], dy.expand(2, 3, 53))


@needs_library
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_extreme_values(name, dtype):
    tiny, huge = torch.finfo(dtype).smallest_normal, min(torch.finfo(dtype).max, 1e18)
    values = torch.tensor([0.0, -0.0, tiny / 4, -tiny / 4, tiny, huge, -huge, 88.0, -88.0, -104.0, -50.0, 1e4, -1e4], dtype=dtype)
    inputs = [values, torch.ones_like(values)][: OPS[name][2]]
    compare(name, inputs, torch.ones_like(values))
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0], dtype=dtype)
    compare(name, [special, torch.ones_like(special)][: OPS[name][2]], torch.ones_like(special))
    if OPS[name][2] == 2:
        compare(name, [torch.ones_like(special), special], torch.ones_like(special))
    compare(name, [torch.ones_like(special)] * OPS[name][2], special)


@needs_library
@pytest.mark.parametrize("name", OPS)
def test_registration(name):
    inputs = [each.requires_grad_() for each in draw((3, 53), OPS[name][2], torch.float32)]
    torch.library.opcheck(getattr(torch.ops.dist_train, name).default, tuple(inputs))
    torch.library.opcheck(getattr(torch.ops.dist_train, name).default, tuple(each.detach().t() for each in inputs))
    fixed = [each.detach() for each in inputs]
    torch.library.opcheck(getattr(torch.ops.dist_train, f"{name}_backward").default, (fixed[0], *fixed))
    fused = OPS[name][0]
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    dy = torch.ones(3, 53)
    for mine, true in zip(run(compiled, inputs, dy), run(fused, inputs, dy), strict=True):
        assert torch.equal(mine, true)


@pytest.mark.parametrize("name", OPS)
def test_gradients_by_finite_differences(name):
    assert torch.autograd.gradcheck(OPS[name][0], [each.requires_grad_() for each in draw((2, 7), OPS[name][2], torch.float64)])


@needs_library
@pytest.mark.parametrize("name", OPS)
def test_any_number_of_threads_gives_the_same_bits(name):
    *inputs, dy = draw((7, 30011), OPS[name][2] + 1, torch.float32)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(OPS[name][0], inputs, dy))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@needs_library
def test_other_shapes_and_dtypes_take_the_reference():
    gate, up = draw((2, 3), 2, torch.float32)
    assert torch.equal(swiglu.swiglu(gate, up[:1]), swiglu.reference(gate, up[:1]))
    assert torch.equal(gelu.geglu(gate, up.bfloat16()), gelu.gated_reference(gate, up.bfloat16()))
    assert torch.equal(gelu.gelu(gate, fused=False), gelu.reference(gate))
    with pytest.raises(RuntimeError, match="must have the shape and dtype"):
        torch.ops.dist_train.swiglu(gate, up[:1])
