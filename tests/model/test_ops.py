"""Rotary positions, norms and the gated activation against fp64."""

from __future__ import annotations

import pytest
import torch

from dist_train.ops.layer_norm import layer_norm
from dist_train.ops.rms_norm import rms_norm
from dist_train.ops.rotary import rotary, rotary_table
from dist_train.ops.swiglu import swiglu

DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("width", [8, 40, 96])
def test_F45_angles_at_long_positions(width, theta):
    positions = torch.tensor([[*range(255, 261), 4095]])
    cos, sin = rotary_table(positions, width, theta)
    assert cos.dtype == sin.dtype == torch.float32
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = positions.double()[..., None, None] * frequencies
    for table, exact in ((cos, angles.cos().repeat(1, 1, 1, 2)), (sin, torch.cat([-angles.sin(), angles.sin()], -1))):
        assert (table - exact).abs().max() < 4095 * 2**-24 * 2  # far below one bf16 ulp, 2^-8
    rows = torch.cat([cos, sin], -1).bfloat16()[0, :, 0]
    assert len({tuple(row.tolist()) for row in rows}) == positions.numel()


def test_F45_bf16_heads_are_turned_in_fp32():
    x = draw(1, 7, 2, 40).bfloat16()
    table = rotary_table(torch.tensor([[*range(255, 261), 4095]]), 40, 1e4)
    turned = rotary(x, *table)
    assert turned.dtype == torch.bfloat16
    exact = rotary(x.double(), *(part.double() for part in table))
    assert torch.all((turned - exact).abs() <= exact.abs() * 2**-8)  # one rounding of the result and no other


def test_rotary_keeps_lengths_and_makes_scores_relative():
    x, y = draw(1, 1, 1, 24).double(), draw(1, 1, 1, 24, seed=1).double()

    def turn(z, p):
        return rotary(z, *(part.double() for part in rotary_table(torch.tensor([[p]]), 24, 100.0)))

    torch.testing.assert_close(turn(x, 17).norm(), x.norm(), rtol=1e-6, atol=0)
    scores = [(turn(x, p + 3) * turn(y, p)).sum() for p in (0, 5, 40)]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores[0], scores[2], rtol=1e-5, atol=1e-5)
    assert abs((turn(x, 4) * turn(y, 0)).sum() - scores[0]) > 1e-3
    assert torch.equal(turn(x, 0), x)


def test_rotary_gradient():
    table = tuple(part.double() for part in rotary_table(torch.tensor([[0, 3, 9]]), 6, 50.0))
    assert torch.autograd.gradcheck(lambda x: rotary(x, *table), draw(2, 3, 2, 6).double().requires_grad_())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 3, 53, 320])
def test_norms_err_at_most_twice_a_plain_writing(width, dtype):
    x, weight, bias = (draw(4, 5, width, scale=3.0) + 1).to(dtype), draw(width, seed=1).to(dtype), draw(width, seed=2).to(dtype)
    upstream = draw(4, 5, width, seed=3)

    def plain_rms(x, weight, bias):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight

    def plain_layer(x, weight, bias):
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5) * weight + bias

    def results(function, cast):
        inputs = [value.detach().to(cast).requires_grad_() for value in (x, weight, bias)]
        out = function(*inputs)
        return [out, *(g for g in torch.autograd.grad(out, inputs, upstream.to(cast), allow_unused=True) if g is not None)]

    pairs = [(plain_rms, lambda x, w, b: rms_norm(x, w, 1e-5))]
    if width > 3:  # of one to three values the spread may nearly vanish, and torch's backward then errs more than autograd's
        pairs.append((plain_layer, lambda x, w, b: layer_norm(x, w, b, 1e-5)))
    for plain, ours in pairs:
        for got, same_dtype, exact in zip(results(ours, dtype), results(plain, dtype), results(plain, torch.float64)):
            assert got.dtype == dtype
            floor = torch.finfo(dtype).eps * exact.abs().max()
            assert (got - exact).abs().max() <= 2 * (same_dtype - exact).abs().max() + floor


def test_layer_norm_without_bias():
    x = draw(2, 3, 8)
    assert torch.equal(layer_norm(x, torch.ones(8), None, 1e-5), layer_norm(x, torch.ones(8), torch.zeros(8), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu(dtype):
    gate, up = draw(4, 33, scale=4.0).to(dtype), draw(4, 33, seed=1).to(dtype)
    exact = gate.double() / (1 + torch.exp(-gate.double())) * up.double()
    plain = gate / (1 + torch.exp(-gate)) * up
    got = swiglu(gate, up)
    assert got.dtype == dtype and (got - exact).abs().max() <= 2 * (plain - exact).abs().max()
    assert torch.autograd.gradcheck(swiglu, [value.double().requires_grad_() for value in (gate, up)])
