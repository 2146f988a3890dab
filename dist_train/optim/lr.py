"""The learning rate as a pure function of the step: restarts, accumulation and skipped steps cannot move it."""

from __future__ import annotations

import math

from dist_train.config.schema import LrConfig


def learning_rate(step: int, config: LrConfig, peak: float, total_steps: int) -> float:
    """The rate of the update that follows `step` completed steps, out of `total_steps`.

    Linear warm-up to `peak` over `warmup_steps`, then the schedule: constant; linear or cosine from `peak` down to
    `min_ratio · peak` at the last step (arXiv:1608.03983 without restarts); wsd: constant, then linear over the last
    `decay_steps` (warmup-stable-decay, arXiv:2404.06395).
    """
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    low = config.min_ratio * peak
    start = config.warmup_steps
    if config.schedule == "wsd":
        start = max(start, total_steps - (config.decay_steps or max(1, total_steps // 10)))
    done = min(1.0, max(0.0, (step - start) / max(1, total_steps - 1 - start)))
    if config.schedule == "constant":
        return peak
    if config.schedule == "cosine":
        return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * done))
    return peak + (low - peak) * done
