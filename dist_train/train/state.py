"""Every mutable thing of a run that is not a tensor."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from dist_train.optim.scaler import LossScale


@dataclass
class TrainState:
    """What a checkpoint holds beside tensors. The learning rate is not here: it is a function of `step`."""

    step: int = 0  # completed steps, skipped ones included
    samples: int = 0  # rows of the training order consumed: the data position
    tokens: int = 0  # positions seen, padding included
    live_tokens: int = 0  # tokens that counted in the loss
    skipped: int = 0  # steps that changed nothing: gradients not finite, no live token, or asked for
    evaluated_step: int = -1  # newest step whose weights were evaluated
    eval_loss: float | None = None  # of that step
    best_step: int = -1  # step of the lowest evaluation loss
    best_loss: float | None = None
    loss: float | None = None  # of the newest step
    loss_scale: LossScale = field(default_factory=LossScale)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TrainState:
        return cls(**{**values, "loss_scale": LossScale(**values["loss_scale"])})
