"""The dynamic loss scale of fp16 (arXiv:1710.03740). Its state is three numbers, all of them in the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

from dist_train.config.schema import PrecisionConfig


@dataclass
class LossScale:
    """Halves after `hysteresis` non-finite steps and doubles after `growth_steps` finite ones in a row; by default fixed at 1."""

    scale: float = 1.0
    growth_steps: int = 0
    hysteresis: int = 1
    minimum: float = 1.0
    finite_steps: int = 0  # since the last change or non-finite step
    patience: int = 1  # non-finite steps left before the scale halves

    @classmethod
    def from_config(cls, config: PrecisionConfig) -> LossScale:
        if config.loss_scale == 0:
            return cls()
        hysteresis = config.loss_scale_hysteresis
        return cls(config.loss_scale, config.loss_scale_growth_steps, hysteresis, config.loss_scale_min, 0, hysteresis)

    def update(self, finite: bool) -> None:
        """After each step, with the verdict that all ranks agreed on."""
        if self.growth_steps == 0:
            return
        if not finite:
            self.finite_steps = 0
            self.patience -= 1
            if self.patience <= 0:
                self.scale, self.patience = max(self.minimum, self.scale / 2), self.hysteresis
            return
        self.finite_steps += 1
        if self.finite_steps == self.growth_steps:
            self.scale, self.finite_steps, self.patience = self.scale * 2, 0, self.hysteresis
