"""Published parameter counts, and FLOPs against a count by hand and torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from dist_train.config.compose import compose, configs_dir
from dist_train.model import build_model, empty_model, flops_per_token, parameter_count
from tests.model.toy import token_rows, toy

PUBLISHED = {
    "gpt2_124m": 124_439_808,
    "gpt2_1_5b": 1_557_611_200,
    "gpt3_175b": 174_604_259_328,  # 96·(12·12288² + 13·12288) + (50257 + 2048)·12288 + 2·12288: the tied head counts once
    "llama_7b": 6_738_415_616,
    "llama_13b": 13_015_864_320,
    "llama_65b": 65_285_660_672,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "smollm2_135m": 134_515_008,
    "toy_10m": 10_059_840,
}


def test_every_preset_has_its_published_count_here():
    assert {path.stem for path in (configs_dir() / "model").glob("*.yaml")} == set(PUBLISHED)


@pytest.mark.parametrize("preset", PUBLISHED)
def test_parameters_by_arithmetic_and_on_the_meta_device_equal_the_published_count(preset):
    config = compose([f"model={preset}"])
    counted = sum(parameter.numel() for parameter in empty_model(config).parameters())
    assert (parameter_count(config.model), counted) == (PUBLISHED[preset], PUBLISHED[preset])


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("change", [{}, {"bias": True}, {"bias": False}, {"tie_embeddings": False}, {"kv_heads": 1}])
def test_arithmetic_follows_every_option(family, change):
    config = toy(family, **change)
    assert parameter_count(config.model) == sum(p.numel() for p in build_model(config).parameters())


def test_U02_flops_of_the_toy_by_hand():
    # A layer: q and out 16x16, k and v 16x8 (2 of 4 heads); gate, up, down 16x32. The head: 16x53. Look-up: nothing.
    products = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 32) + 16 * 53
    assert flops_per_token(toy("llama").model, 12) == 6 * products + 12 * 2 * 16 * 12 == 37_344
    products = 2 * (4 * 16 * 16 + 2 * 16 * 32) + 16 * 53
    assert flops_per_token(toy("gpt").model, 12) == 6 * products + 12 * 2 * 16 * 12 == 34_272


def test_U02_flops_follow_the_real_sequence_not_the_longest_one():
    model = toy("llama", max_positions=4096).model
    assert flops_per_token(model, 24) - flops_per_token(model, 12) == 12 * 2 * 16 * 12


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_U02_flops_equal_torchs_count_of_a_real_step(family):
    config = toy(family, attention="math")
    model = build_model(config)
    with FlopCounterMode(display=False) as counter:
        model(token_rows(3)).sum().backward()
    assert counter.get_total_flops() == 3 * 12 * flops_per_token(config.model, 12)


def test_presets_override_key_by_key():
    changes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "vocab": 53}
    config = compose(["model=llama3_405b", *(f"model.{key}={value}" for key, value in changes.items())])
    with torch.device("meta"):
        assert empty_model(config).blocks[0].attention.k.weight.shape == (32, 64)
