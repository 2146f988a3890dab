"""RMSNorm and LayerNorm, with and without the residual: on the CPU, and the CUDA kernels in the shim."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from dist_train.ops import library
from dist_train.ops.layer_norm import add_layer_norm, layer_norm
from dist_train.ops.rms_norm import add_rms_norm, rms_norm
from tests.csrc.harness import MISSING, Kernels, build, error_check

EPS = 1e-5
COLUMNS = (1, 3, 53, 1000, 4097)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TYPES = [(dtype, weight) for dtype in DTYPES for weight in {dtype, torch.float32}]  # of x and of the weight
KINDS = ("rms", "add_rms", "layer", "add_layer", "layer without bias")
needs_library = pytest.mark.skipif(not library.loaded, reason=library.missing)
needs_shim = pytest.mark.skipif(bool(MISSING), reason=MISSING)

# Of quick_check and the overrun test: rows, columns, and whether a row lies in whole packs of 16 bytes at aligned addresses.
# One row a warp; a block with one pack a thread, with four; too long for registers; odd.
QUICK_SHAPES = ((9, 64), (9, 512), (17, 640), (3, 4096), (3, 8200), (5, 53), (6, 1000))
WRONG_TAIL = ("norm/norm_kernels.cuh", "if (i < columns) f(slot, i);", "f(slot, i);")


def leaves(kind: str, rows: int, columns: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> list[Tensor | None]:
    """x, residual, weight, bias, dy, dsum; None where the kind has none."""
    generator = torch.Generator().manual_seed(rows * 10007 + columns)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    x, residual, dy, dsum = (draw(rows, columns).to(dtype) for _ in range(4))
    weight, bias = (draw(columns).to(weight_dtype) for _ in range(2))
    added = kind.startswith("add")
    return [x, residual if added else None, weight, bias if kind.endswith("layer") else None, dy, dsum if added else None]


def call(kind: str, inputs: list[Tensor | None], fused: bool) -> list[Tensor]:
    """y, sum, dx, dresidual, dweight, dbias, as far as the kind has them."""
    x, residual, weight, bias, dy, dsum = (
        each if each is None or i >= 4 else each.detach().requires_grad_() for i, each in enumerate(inputs)
    )
    if kind == "rms":
        outputs = (rms_norm(x, weight, EPS, fused),)
    elif kind == "add_rms":
        outputs = add_rms_norm(x, residual, weight, EPS, fused)
    elif kind == "add_layer":
        outputs = add_layer_norm(x, residual, weight, bias, EPS, fused)
    else:
        outputs = (layer_norm(x, weight, bias, EPS, fused),)
    wanted = [each for each in (x, residual, weight, bias) if each is not None]
    grads = torch.autograd.grad(outputs, wanted, [dy] if dsum is None else [dy, dsum])
    return [each.detach() for each in (*outputs, *grads)]


def exact(kind: str, inputs: list[Tensor | None]) -> list[Tensor]:
    """The same in fp64; a sum is rounded as the op must round it."""
    x, residual, weight, bias, dy, dsum = (None if each is None else each.double() for each in inputs)
    if residual is None:
        return call(kind, [x, None, weight, bias, dy, None], fused=False)
    total = (inputs[0] + inputs[1]).double()
    plain = kind.removeprefix("add_")
    y, dx, *rest = call(plain, [total, None, weight, bias, dy, None], fused=False)
    return [y, total, dx + dsum, dx + dsum, *rest]


def shim_call(kernels: Kernels, kind: str, inputs: list[Tensor | None]) -> list[Tensor]:
    """As `call`, by the CUDA kernels."""
    x, residual, weight, bias, dy, dsum = inputs
    (rows, columns), added = x.shape, residual is not None
    y, dx, total = (torch.full_like(x, torch.nan) for _ in range(3))
    rstd = torch.full((rows,), torch.nan)
    mean = None if "rms" in kind else torch.full((rows,), torch.nan)
    sizes = (rows, columns)
    pointers = (x, residual, weight, bias, y, total if added else None, mean, rstd)
    kernels.dt_norm_forward(*pointers, *sizes, EPS, x.dtype, weight.dtype)
    blocks = kernels.value("dt_norm_blocks", *sizes, x.dtype)
    dweight = torch.full_like(weight, torch.nan)
    dbias = None if bias is None else torch.full_like(bias, torch.nan)
    parts = [None if each is None else torch.full((blocks, columns), torch.nan) for each in (dweight, dbias)]
    normed = total if added else x
    pointers = (dy, dsum, normed, weight, mean, rstd, dx, *parts, dweight, dbias)
    kernels.dt_norm_backward(*pointers, blocks, *sizes, x.dtype, weight.dtype)
    return [each for each in (y, total if added else None, dx, dx if added else None, dweight, dbias) if each is not None]


def compare(kind: str, inputs: list[Tensor | None], ours: list[Tensor]) -> None:
    for mine, torchs, fp64 in zip(ours, call(kind, inputs, fused=False), exact(kind, inputs), strict=True):
        error_check(mine, torchs, fp64)


def quick_check(kernels: Kernels) -> None:
    for rows, columns in QUICK_SHAPES:
        inputs = leaves("add_layer", rows, columns, torch.float32, torch.float32)
        compare("add_layer", inputs, shim_call(kernels, "add_layer", inputs))
    inputs = leaves("rms", 5, 1000, torch.bfloat16, torch.float32)
    compare("rms", inputs, shim_call(kernels, "rms", inputs))


@pytest.fixture(params=library.ISAS)
def isa(request):
    if not library.loaded:
        pytest.skip(library.missing)
    if library.cpu_isa(request.param) != request.param:
        pytest.skip(f"this processor has no {request.param}")
    yield request.param
    library.cpu_isa()


@pytest.mark.parametrize("kind", KINDS)
def test_cpu_is_as_exact_as_torch(isa, kind):
    for (dtype, weight_dtype), columns in product(TYPES, COLUMNS):
        for rows in (1, 7) if columns > 1000 else (1, 7, 200):
            inputs = leaves(kind, rows, columns, dtype, weight_dtype)
            compare(kind, inputs, call(kind, inputs, fused=True))


@needs_shim
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_kernels_are_as_exact_as_torch(kind):
    kernels = Kernels(build(only="norm"))
    for (dtype, weight_dtype), columns in product(TYPES, (*COLUMNS, 64, 512, 4096)):
        inputs = leaves(kind, 6, columns, dtype, weight_dtype)
        compare(kind, inputs, shim_call(kernels, kind, inputs))


@needs_shim
@pytest.mark.parametrize("columns", [2048, 8192, 8200])
def test_cuda_kernels_on_long_rows(columns):
    kernels = Kernels(build(only="norm"))
    for dtype in DTYPES:
        inputs = leaves("add_layer", 3, columns, dtype, dtype)
        compare("add_layer", inputs, shim_call(kernels, "add_layer", inputs))


def unaligned(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    buffer = tensor.new_empty(tensor.numel() + 1)
    return buffer[1:].view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("kind", ["add_rms", "add_layer"])
def test_unaligned_input(kind):
    kernels = None if MISSING else Kernels(build(only="norm"))
    for dtype in DTYPES:
        inputs = [unaligned(each) for each in leaves(kind, 5, 256, dtype, dtype)]
        compare(kind, inputs, call(kind, inputs, fused=True))
        if kernels is not None:
            compare(kind, inputs, shim_call(kernels, kind, inputs))


@pytest.mark.parametrize("kind", ["add_rms", "add_layer"])
def test_strided_input(kind):
    for dtype in DTYPES:
        inputs = leaves(kind, 12, 54, dtype, dtype)
        strided = [each if each is None or each.dim() == 1 else each.t().contiguous().t() for each in inputs]
        strided[2] = torch.stack((inputs[2], inputs[2]), dim=-1)[:, 0]
        strided[4] = inputs[4][:1].expand(12, 54)
        assert not strided[0].is_contiguous() and not strided[2].is_contiguous() and not strided[4].is_contiguous()
        compare(kind, strided, call(kind, strided, fused=True))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (4, 0), (0, 0)])
def test_empty_input(shape):
    x, dy = torch.empty(shape, requires_grad=True), torch.empty(shape)
    weight, bias = torch.ones(shape[-1], requires_grad=True), torch.ones(shape[-1], requires_grad=True)
    for outputs in (add_layer_norm(x, x, weight, bias, EPS), (layer_norm(x, weight, bias, EPS),)):
        assert all(each.shape == shape for each in outputs)
        dx, dweight, dbias = torch.autograd.grad(outputs, (x, weight, bias), [dy] * len(outputs))
        assert dx.shape == shape and not dweight.any() and not dbias.any()
    y = rms_norm(x, weight, EPS)
    dx, dweight = torch.autograd.grad(y, (x, weight), dy)
    assert y.shape == dx.shape == shape and not dweight.any()


@needs_shim
def test_empty_input_of_the_cuda_kernels():
    kernels = Kernels(build(only="norm"))
    for kind, (rows, columns) in product(KINDS, ((0, 8), (4, 0))):
        results = shim_call(kernels, kind, leaves(kind, rows, columns, torch.float32, torch.float32))
        assert not any(each.any() for each in results)


EXTREMES = {
    "huge": [1e30, -2e30, 1e25, 3e30],
    "denormal": [1e-40, -3e-40, 2e-41, 0.0],
    "zero": [0.0, 0.0, 0.0, 0.0],
    "constant": [3.0, 3.0, 3.0, 3.0],
    "infinite": [1.0, float("inf"), 2.0, 3.0],
    "not a number": [1.0, float("nan"), 2.0, 3.0],
}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_extreme_values(kind, name):
    """What torch returns, NaN and infinities included; and no other row of the batch is touched."""
    kernels = None if MISSING else Kernels(build(only="norm"))
    for dtype in DTYPES:
        inputs = leaves(kind, 3, 52, dtype, dtype)
        inputs[0][1] = torch.tensor(EXTREMES[name]).repeat(13).to(dtype)
        expected, ours = call(kind, inputs, fused=False), [call(kind, inputs, fused=True)]
        if kernels is not None:
            ours.append(shim_call(kernels, kind, inputs))
        limits = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (2e-2, 3e-2), torch.float16: (2e-3, 4e-3)}[dtype]
        for results in ours:
            for mine, torchs in zip(results[:2], expected[:2], strict=True):  # y and dx
                scale = torchs[1][torchs[1].isfinite()].abs().max().item() if torchs[1].isfinite().any() else 1.0
                torch.testing.assert_close(mine[1], torchs[1], rtol=limits[0], atol=limits[1] * max(scale, 1.0), equal_nan=True)
                assert mine[0].isfinite().all() and mine[2].isfinite().all()


@pytest.mark.parametrize("kind", ["layer", "add_layer"])
def test_rows_far_from_zero(kind):
    kernels = None if MISSING else Kernels(build(only="norm"))
    inputs = leaves(kind, 4, 1000, torch.float32, torch.float32)
    inputs[0] += 1e4
    compare(kind, inputs, call(kind, inputs, fused=True))
    if kernels is not None:
        compare(kind, inputs, shim_call(kernels, kind, inputs))


@needs_library
def test_the_bits_do_not_depend_on_the_threads():
    inputs = leaves("add_layer", 4000, 53, torch.float32, torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(call("add_layer", inputs, fused=True))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(*pair) for other in results[1:] for pair in zip(results[0], other, strict=True))


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_frozen_weights_get_no_gradient(kind):
    x, residual, weight, bias, dy, _ = leaves(kind, 4, 16, torch.float32, torch.float32)
    full = call(kind, [x, residual, weight, bias, dy, torch.zeros_like(dy) if residual is not None else None], fused=True)
    x = x.requires_grad_()
    if kind in ("rms", "add_rms"):
        y = rms_norm(x, weight, EPS) if residual is None else add_rms_norm(x, residual, weight, EPS)[0]
    else:
        y = layer_norm(x, weight, bias, EPS) if residual is None else add_layer_norm(x, residual, weight, bias, EPS)[0]
    y.backward(dy)
    torch.testing.assert_close(x.grad, full[1 if residual is None else 2])
    assert weight.grad is None


@needs_library
def test_only_the_sum_is_used():
    x, residual, weight = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8), torch.ones(8, requires_grad=True)
    _, total = add_rms_norm(x, residual, weight, EPS)
    (2 * total).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0)) and weight.grad is None


def test_gradients_in_fp64():
    x, residual, weight, bias, _, _ = (
        None if each is None else each.double().requires_grad_()
        for each in leaves("add_layer", 3, 7, torch.float32, torch.float32)
    )
    torch.autograd.gradcheck(lambda *inputs: add_layer_norm(*inputs, EPS), (x, residual, weight, bias))
    torch.autograd.gradcheck(lambda *inputs: add_rms_norm(*inputs, EPS), (x, residual, weight))


@needs_library
def test_gradients_by_finite_differences_in_fp32():
    """The fused gradient itself: the directional derivative of the fused forward pass."""
    for kind in KINDS:
        x, residual, weight, bias, dy, _ = leaves(kind, 4, 32, torch.float32, torch.float32)
        inputs = [x, residual, weight, bias, dy, None if residual is None else torch.zeros_like(dy)]
        grads = call(kind, inputs, fused=True)[1 if residual is None else 2 :]
        present = [i for i in range(4) if inputs[i] is not None]
        for i, grad in zip(present, grads, strict=True):
            direction, values = torch.randn_like(inputs[i]), []
            for step in (1e-2, -1e-2):
                moved = [*inputs]
                moved[i] = inputs[i] + step * direction
                values.append((call(kind, moved, fused=True)[0].double() * dy).sum().item())
            slope = (grad.double() * direction).sum().item()
            assert (values[0] - values[1]) / 2e-2 == pytest.approx(slope, rel=2e-2, abs=2e-2)


@needs_library
def test_schema_fake_and_gradient_agree():
    for dtype, weight_dtype in ((torch.float32, torch.float32), (torch.bfloat16, torch.float32)):
        x, residual, weight, bias, dy, dsum = leaves("add_layer", 6, 16, dtype, weight_dtype)
        grown = [each.requires_grad_() for each in (x.view(2, 3, 16), residual.view(2, 3, 16), weight, bias)]
        x, residual, weight, bias = grown
        ops = torch.ops.dist_train
        torch.library.opcheck(ops.rms_norm, (x, weight, EPS))
        torch.library.opcheck(ops.add_rms_norm, (x, residual, weight, EPS))
        torch.library.opcheck(ops.layer_norm, (x, weight, bias, EPS))
        torch.library.opcheck(ops.layer_norm, (x.transpose(0, 1), weight, None, EPS))
        torch.library.opcheck(ops.add_layer_norm, (x, residual, weight, bias, EPS))
        x, residual, weight, bias = (each.detach() for each in grown)
        statistic = torch.ones(6)
        dy, dsum = dy.view(x.shape), dsum.view(x.shape)
        torch.library.opcheck(ops.rms_norm_backward, (dy, None, x, weight, statistic, True))
        torch.library.opcheck(ops.layer_norm_backward, (dy, dsum, x, weight, statistic, statistic, True, False))


@needs_library
def test_compiles_without_a_graph_break():
    x, residual, weight, bias, dy, _ = leaves("add_layer", 4, 16, torch.float32, torch.float32)

    def block(x, residual, weight, bias):
        y, total = add_layer_norm(x, residual, weight, bias, EPS)
        z, total = add_rms_norm(y, total, weight, EPS)
        return rms_norm(layer_norm(z, weight, bias, EPS), weight, EPS) + total

    inputs = [each.requires_grad_() for each in (x, residual, weight, bias)]
    results = []
    for function in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        y = function(*inputs)
        results.append([y, *torch.autograd.grad(y, inputs, dy)])
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


@needs_library
def test_what_does_not_fit_is_refused():
    x, weight = torch.randn(2, 8), torch.ones(8)
    with pytest.raises(RuntimeError, match="weight has 7 elements; it must have one dim, as long as the last of x"):
        rms_norm(x, torch.ones(7), EPS)
    with pytest.raises(RuntimeError, match="weight must be float32 or have the dtype of x"):
        rms_norm(x, weight.bfloat16(), EPS)
    with pytest.raises(RuntimeError, match="residual must have the shape and dtype"):
        add_rms_norm(x, x[:1], weight, EPS)
    with pytest.raises(RuntimeError, match="use fused=False"):
        torch.ops.dist_train.rms_norm(x.double(), weight, EPS)


def test_a_residual_of_another_dtype_makes_a_sum_of_the_wider_one() -> None:
    """Under autocast what a layer gives is bf16 beside an fp32 residual stream."""
    x, residual, weight, bias = (torch.randn(*shape) for shape in ((3, 53), (3, 53), (53,), (53,)))
    for mine, other in ((x.bfloat16(), residual), (x, residual.bfloat16())):
        for normed, added in (add_rms_norm(mine, other, weight, EPS), add_layer_norm(mine, other, weight, bias, EPS)):
            assert normed.dtype == added.dtype == torch.float32 and torch.equal(added, mine + other)
        assert torch.equal(add_rms_norm(mine, other, weight, EPS)[0], rms_norm(mine + other, weight, EPS))
        assert torch.equal(add_layer_norm(mine, other, weight, bias, EPS)[0], layer_norm(mine + other, weight, bias, EPS))
