"""Starting weights: their spread, and that only the seed and the name decide them."""

from __future__ import annotations

import math

import pytest
import torch

from dist_train.model import build_model
from tests.model.toy import toy

WIDE = {"hidden": 128, "ffn": 256, "vocab": 211, "layers": 3, "init_std": 0.02}


def spread(model: torch.nn.Module) -> dict[str, float]:
    return {name: p.std().item() for name, p in model.named_parameters() if p.ndim == 2}


def expected_std(rule: str, name: str, shape: torch.Size) -> float:
    if name in ("embed.weight", "positions.weight"):
        return 0.02
    if rule == "xavier":
        return math.sqrt(2 / sum(shape))
    if rule == "he":
        return math.sqrt(2 / shape[1])
    return 0.02 / math.sqrt(6) if name.endswith(("attention.out.weight", "mlp.down.weight")) else 0.02


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("rule", ["scaled_normal", "xavier", "he"])
def test_spread_follows_the_rule(family, rule):
    model = build_model(toy(family, init=rule, tie_embeddings=False, **WIDE))
    shapes = {name: p.shape for name, p in model.named_parameters()}
    for name, std in spread(model).items():
        bound = 5 / math.sqrt(2 * shapes[name].numel())  # five standard errors of a standard deviation
        assert abs(std / expected_std(rule, name, shapes[name]) - 1) < bound, name
        mean = model.get_parameter(name).mean().item()
        assert abs(mean) < 5 * std / math.sqrt(shapes[name].numel()), name
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            assert torch.all(parameter == (0.0 if name.endswith("bias") else 1.0)), name


def test_F50_the_seed_alone_decides_and_the_global_generator_stays():
    torch.manual_seed(123)
    state = torch.get_rng_state()
    first = build_model(toy(seed=5)).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(321)
    again, given, other = build_model(toy(seed=5)), build_model(toy(seed=9), seed=5), build_model(toy(seed=6))
    for name, value in first.items():
        assert torch.equal(value, again.state_dict()[name]) and torch.equal(value, given.state_dict()[name])
        if value.ndim == 2:
            assert not torch.equal(value, other.state_dict()[name])


def test_a_weight_does_not_depend_on_what_else_the_model_holds():
    shallow, deep = build_model(toy(layers=1, init="he")), build_model(toy(layers=3, init="he", tie_embeddings=True))
    for name, value in shallow.named_parameters():
        if name != "head.weight":
            assert torch.equal(value, deep.get_parameter(name)), name


def test_no_two_parameters_share_their_numbers():
    values = [p.flatten()[:8] for p in build_model(toy(init="he")).parameters() if p.ndim == 2]
    normed = [value / value.norm() for value in values]
    assert all(abs(a @ b) < 0.999 for i, a in enumerate(normed) for b in normed[:i])


def test_models_start_in_fp32_on_the_cpu_with_everything_trainable():
    model = build_model(toy())
    assert {(p.dtype, p.device.type, p.requires_grad) for p in model.parameters()} == {(torch.float32, "cpu", True)}
