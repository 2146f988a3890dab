from __future__ import annotations

from dist_train.config.schema import PrecisionConfig
from dist_train.optim.scaler import LossScale


def run(scale, verdicts):
    found = []
    for finite in verdicts:
        scale.update(finite)
        found.append(scale.scale)
    return found


def scaler(**values):
    return LossScale.from_config(PrecisionConfig(**{"loss_scale": 8.0, "loss_scale_growth_steps": 3, **values}))


def test_doubles_after_finite_steps_in_a_row_and_halves_at_once():
    assert run(scaler(), [True, True, True, True, True, False, True, True, True]) == [8, 8, 16, 16, 16, 8, 8, 8, 16]


def test_F10_hysteresis_waits_before_it_halves_once():
    assert run(scaler(loss_scale_hysteresis=2), [False, True, False, False, False]) == [8, 8, 4, 4, 2]


def test_growth_gives_the_patience_back():
    assert run(scaler(loss_scale_hysteresis=2), [False, True, True, True, False, False]) == [8, 8, 8, 16, 16, 8]


def test_never_falls_below_its_minimum_and_without_scaling_stays_one():
    assert run(scaler(loss_scale_min=4.0), [False] * 4) == [4, 4, 4, 4]
    assert run(LossScale.from_config(PrecisionConfig()), [False, True] * 3) == [1.0] * 6
