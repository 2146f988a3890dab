"""Signs of numerical trouble in the series of a run. Pure."""

from __future__ import annotations

import math


class SpikeDetector:
    """Tells when a value exceeds `factor` times the running mean of those before it.

    The running mean is exponential with weight `decay` per value, corrected for its start (as Adam's moments are). The first
    `warmup` values never count as spikes. A spike enters the mean cut to `factor` times the mean: one spike hardly moves it,
    a lasting change of level is accepted after a few steps. Non-finite values are ignored.
    """

    def __init__(self, factor: float = 10.0, decay: float = 0.98, warmup: int = 5) -> None:
        self._factor, self._decay, self._warmup = factor, decay, warmup
        self._sum, self._count = 0.0, 0

    @property
    def mean(self) -> float:
        """The running mean; 0 before the first value."""
        return self._sum / (1.0 - self._decay**self._count) if self._count else 0.0

    def update(self, value: float) -> float | None:
        """Take in the next value; when it is a spike return the mean that it is measured against, else None."""
        if not math.isfinite(value):
            return None
        mean = self.mean
        limit = self._factor * mean
        spike = self._count >= self._warmup and value > limit
        self._sum = self._decay * self._sum + (1.0 - self._decay) * (limit if spike else value)
        self._count += 1
        return mean if spike else None


class Repeats:
    """Says which of a row of equal complaints are worth showing: the 1st, 10th, 100th … in a row."""

    def __init__(self) -> None:
        self.count = 0

    def update(self, happened: bool) -> bool:
        """Take in whether it happened at this step; True when it should be shown."""
        self.count = self.count + 1 if happened else 0
        return happened and 10 ** (len(str(self.count)) - 1) == self.count

    @property
    def in_a_row(self) -> str:
        """` (10 steps in a row)`; empty for the first."""
        return f" ({self.count} steps in a row)" if self.count > 1 else ""
