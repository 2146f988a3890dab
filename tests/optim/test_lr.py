from __future__ import annotations

import math

import pytest

from dist_train.config.schema import LrConfig
from dist_train.optim.lr import learning_rate


def series(config, total=20, peak=2.0):
    return [learning_rate(step, config, peak, total) for step in range(total)]


def test_F19_warm_up_is_linear_and_cosine_ends_at_its_minimum():
    rates = series(LrConfig("cosine", warmup_steps=4, min_ratio=0.1))
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert rates[4] == 2.0 and rates[-1] == pytest.approx(0.2)
    assert rates[12] == pytest.approx(0.2 + 0.9 * (1 + math.cos(math.pi * 8 / 15)))
    assert all(a >= b for a, b in zip(rates[4:], rates[5:], strict=False))


def test_linear_is_a_line_and_constant_stays():
    rates = series(LrConfig("linear", warmup_steps=0, min_ratio=0.0))
    assert rates[0] == 2.0 and rates[-1] == pytest.approx(0.0)
    assert [a - b for a, b in zip(rates, rates[1:], strict=False)] == pytest.approx([2 / 19] * 19)
    assert series(LrConfig("constant", warmup_steps=2)) == [1.0, 2.0] + [2.0] * 18


def test_wsd_holds_until_its_last_steps():
    rates = series(LrConfig("wsd", warmup_steps=2, min_ratio=0.5, decay_steps=5))
    assert rates[:2] == [1.0, 2.0] and rates[2:16] == [2.0] * 14
    assert rates[15:] == pytest.approx([2.0, 1.75, 1.5, 1.25, 1.0])
    assert series(LrConfig("wsd", warmup_steps=0, min_ratio=0.0))[17] == 2.0  # a tenth of 20 steps by default


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine", "wsd"])
def test_F19_degenerate_lengths_give_finite_rates(schedule):
    for total, warmup in [(1, 0), (1, 5), (2, 2), (5, 9)]:
        assert all(0 <= rate <= 2.0 for rate in series(LrConfig(schedule, warmup_steps=warmup), total))
    assert learning_rate(50, LrConfig(schedule, warmup_steps=0), 2.0, 20) == pytest.approx(2.0 if schedule == "constant" else 0.2)
