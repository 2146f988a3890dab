"""A run in Weights & Biases, beside TensorBoard, for those who ask for it (`observe.wandb=true`)."""

from __future__ import annotations

import dataclasses
import importlib
import os
import secrets
from pathlib import Path
from typing import Any

from dist_train.config.compose import ConfigError
from dist_train.config.schema import Config


def require() -> Any:
    """The wandb module. Raises ConfigError with the install line when it is not there; call it on every rank."""
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            "observe.wandb=true needs wandb, which is not installed: pip install wandb, or set observe.wandb=false."
        ) from error


class Wandb:
    """One W&B run for a run folder: its id is kept in the file `wandb_id`, so a resumed run goes on with the same curves.

    Account, project and mode are W&B's own environment variables (WANDB_PROJECT, WANDB_MODE=offline, …).
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._run = require().init(
            project=os.environ.get("WANDB_PROJECT", "dist_train"),
            name=run_dir.resolve().name,
            id=_run_id(run_dir / "wandb_id"),
            resume="allow",
            dir=str(run_dir),
            config=dataclasses.asdict(config),
        )

    def step(self, record: dict[str, Any]) -> None:
        self._run.log({key: value for key, value in record.items() if key != "step" and value is not None}, step=record["step"])

    def evaluation(self, step: int, loss: float, bits_per_byte: float) -> None:
        self._run.log({"eval_loss": loss, "bits_per_byte": bits_per_byte}, step=step)

    def text(self, tag: str, text: str, step: int) -> None:
        """Nothing: W&B has the config already, and texts only as tables of a run's media."""

    def sample(self, step: int, text: str) -> None:
        self._run.log({"sample": text}, step=step)

    def close(self) -> None:
        self._run.finish()


def _run_id(file: Path) -> str:
    if not file.exists():
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as new:
            new.write(secrets.token_hex(8))
    return file.read_text(encoding="utf-8").strip()
