"""A run in TensorBoard: scalars of every step and evaluation, the config and generated samples as text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dist_train.config.compose import ConfigError

# Record key -> tag. Numbers under other keys appear as train/<key>.
TAGS = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "loss_scale": "train/loss_scale",
    "tokens_per_second": "speed/tokens_per_second",
    "model_flops_per_second": "speed/model_flops_per_second",
    "mfu": "speed/mfu",
    "step_seconds": "speed/step_seconds",
    "memory_peak_bytes": "memory/peak_bytes",
    "input_min": "input/min_token",
    "input_max": "input/max_token",
}


class TensorBoard:
    """Writes event files into a private folder. A resumed run hides what the earlier one wrote after `resumed_step`."""

    def __init__(self, folder: Path, resumed_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "observe.tensorboard=true needs tensorboard, which is not installed: pip install tensorboard, "
                "or set observe.tensorboard=false."
            ) from error
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Events of purge_step and later are hidden. A run from scratch hides all that lies there, step 0 included.
        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1 if resumed_step else 0, flush_secs=10)
        self._writer.flush()
        for path in folder.glob("events.*"):
            path.chmod(0o600)

    def step(self, record: dict[str, Any]) -> None:
        for key, value in record.items():
            if key != "step" and isinstance(value, (int, float)):
                self._writer.add_scalar(TAGS.get(key, f"train/{key}"), value, record["step"])

    def evaluation(self, step: int, loss: float, bits_per_byte: float) -> None:
        self._writer.add_scalar("eval/loss", loss, step)
        self._writer.add_scalar("eval/bits_per_byte", bits_per_byte, step)
        self._writer.flush()

    def text(self, tag: str, text: str, step: int) -> None:
        """`text` as it is; TensorBoard reads it as Markdown."""
        self._writer.add_text(tag, text, step)

    def sample(self, step: int, text: str) -> None:
        self.text("sample", verbatim(text), step)

    def close(self) -> None:
        self._writer.close()


def verbatim(text: str) -> str:
    """Markdown that shows `text` letter by letter, whatever marks it holds: an indented block."""
    return "\n".join("    " + line for line in text.splitlines()) or "    "
