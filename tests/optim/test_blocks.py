from __future__ import annotations

import pytest
import torch

import dist_train as dt
from dist_train.mesh.mesh import ParallelMesh
from dist_train.ops.cross_entropy import cross_entropy_sum
from dist_train.optim.blocks import BLOCK, dequantize, quantize
from dist_train.zero import Precision
from tests.toy import toy_batch, toy_model


def spread(blocks, seed=0):
    """Values of very different sizes, also within a block."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(blocks * BLOCK, generator=generator) * torch.randn(blocks * BLOCK, generator=generator).mul(3).exp()


def largest(values):
    return values.view(-1, BLOCK).abs().amax(1, keepdim=True).expand(-1, BLOCK).flatten()


def test_a_signed_value_comes_back_within_an_eighth_or_is_tiny_in_its_block():
    values = spread(50)
    found = dequantize(*quantize(values, torch.int8, torch.tensor(1.0)))
    bound = torch.maximum(values.abs() / 8, largest(values) * 2.0**-15)
    assert ((found - values).abs() <= bound).all()
    assert (found * values >= 0).all()
    assert torch.equal(found.view(-1, BLOCK).abs().amax(1), values.view(-1, BLOCK).abs().amax(1))  # the largest is exact


def test_a_square_comes_back_within_a_sixteenth_and_is_never_zero_but_for_zero():
    values = spread(50).square()
    values[::7] = 0
    found = dequantize(*quantize(values, torch.uint8, torch.tensor(1.0)))
    assert ((found - values).abs() <= torch.maximum(values / 16, largest(values) * 2.0**-15)).all()
    assert torch.equal(found == 0, values == 0)


def test_zeros_and_the_smallest_numbers_are_no_trouble():
    values = torch.zeros(3 * BLOCK)
    values[BLOCK], values[2 * BLOCK :] = 1e-38, 1e-42
    for dtype in (torch.int8, torch.uint8):
        found = dequantize(*quantize(values, dtype, torch.tensor(1.0)))
        assert found.isfinite().all() and not found[:BLOCK].any() and found[BLOCK] > 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_rounding_is_without_bias_over_steps(dtype):
    values = spread(4).abs()
    values = torch.where(values > largest(values) * 2.0**-14, values, 0)
    rounds = [dequantize(*quantize(values, dtype, torch.tensor(float(step)))) for step in range(256)]
    assert len({tuple(found.tolist()) for found in rounds}) > 100
    torch.testing.assert_close(torch.stack(rounds).mean(0), values, rtol=4e-3, atol=0)


@pytest.mark.parametrize("beta", [0.95, 0.999])
def test_a_moving_average_of_codes_follows_the_one_of_numbers(beta):
    """Rounding to the nearest would stop it: a step changes it by less than half the distance of two codes."""
    generator = torch.Generator().manual_seed(0)
    exact, codes = torch.zeros(8 * BLOCK), quantize(torch.zeros(8 * BLOCK), torch.uint8, torch.tensor(0.0))
    for step in range(2000):
        sizes = 1.0 if step < 500 else torch.arange(8 * BLOCK) % 4 + 1
        squares = (torch.randn(8 * BLOCK, generator=generator) * sizes).square()
        exact.lerp_(squares, 1 - beta)
        codes = quantize(dequantize(*codes).lerp_(squares, 1 - beta), torch.uint8, torch.tensor(float(step)))
    ratio = dequantize(*codes) / exact
    assert ratio.mean() == pytest.approx(1, abs=0.03)
    assert ratio.std() < 0.3


def losses(recipe, steps, skipped=()):
    model = toy_model("model.hidden=32")
    engine = dt.shard(model, recipe, ParallelMesh.single(), clip_norm=1.0)
    found = []
    for step in range(steps):
        tokens, labels = toy_batch([11, 3, 7, 12, 9, 5], seed=step % 4)
        loss = cross_entropy_sum(model(tokens), labels)[0]
        found.append(float(loss.detach()) / 47)
        engine.backward(loss)
        before = {piece.name: piece.tensor.clone() for piece in engine.pieces()}
        engine.step(weight=47.0, update=step not in skipped)
        if step in skipped:
            assert all(torch.equal(piece.tensor, before[piece.name]) for piece in engine.pieces())
    return engine, found


def test_eight_bits_train_as_adamw_does():
    _, exact = losses(dt.AdamW(5e-3), 45)
    _, found = losses(dt.AdamW8bit(5e-3), 45)
    assert exact[-1] < 0.4 * exact[0]
    assert sum(found[20:]) == pytest.approx(sum(exact[20:]), rel=0.02)
    assert found[:2] == pytest.approx(exact[:2], rel=1e-6)  # the first step is that of AdamW: moments of zero are exact


def test_a_skipped_step_leaves_codes_and_scales_as_they_are():
    losses(dt.AdamW8bit(5e-3), 5, skipped=(0, 3))


def test_a_gradient_that_is_not_finite_reaches_no_state():
    model = toy_model()
    engine = dt.shard(model, dt.AdamW8bit(5e-3), ParallelMesh.single())
    tokens, labels = toy_batch([11, 3])
    for factor in (1.0, float("nan"), float("inf")):
        before = {piece.name: piece.tensor.clone() for piece in engine.pieces()}
        engine.backward(cross_entropy_sum(model(tokens), labels)[0] * factor)
        assert bool(engine.step().skipped) == (factor != 1.0)
        assert all(torch.equal(piece.tensor, before[piece.name]) == (factor != 1.0) for piece in engine.pieces() if piece.shape)


def test_state_takes_two_bytes_an_element_and_a_scale_for_each_block():
    engine, _ = losses(dt.AdamW8bit(5e-3), 1)
    padded = sum(bucket.layout.numel for bucket in engine.buckets)
    assert padded % BLOCK == 0
    assert engine.held_bytes()["moments"] == 2 * padded + 2 * 4 * padded // BLOCK == engine.predicted_bytes()["moments"]


def test_masters_that_are_not_fp32_are_refused():
    with pytest.raises(ValueError, match=r"bfloat16.*precision\.master=fp32"):
        dt.shard(toy_model(), dt.AdamW8bit(), ParallelMesh.single(), precision=Precision(torch.bfloat16, master=torch.bfloat16))
