"""The one object through which a run shows itself."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Protocol

from dist_train.config.compose import dump
from dist_train.config.schema import Config
from dist_train.observe import wandb
from dist_train.observe.metrics import JsonLines, write_json
from dist_train.observe.numerics import Repeats, SpikeDetector
from dist_train.observe.progress import Progress, tell
from dist_train.observe.tensorboard import TensorBoard, verbatim


class Sink(Protocol):
    """A place that records go to."""

    def step(self, record: dict[str, Any]) -> None: ...
    def evaluation(self, step: int, loss: float, bits_per_byte: float) -> None: ...
    def text(self, tag: str, text: str, step: int) -> None: ...
    def sample(self, step: int, text: str) -> None: ...
    def close(self) -> None: ...


class MetricsFiles:
    """`metrics.jsonl`, one record a step, and `evaluations.jsonl`, one record an evaluation."""

    def __init__(self, run_dir: Path, resumed_step: int) -> None:
        self.steps = JsonLines(run_dir / "metrics.jsonl", resumed_step)
        self.evaluations = JsonLines(run_dir / "evaluations.jsonl", resumed_step)

    def step(self, record: dict[str, Any]) -> None:
        self.steps.write(record)

    def evaluation(self, step: int, loss: float, bits_per_byte: float) -> None:
        self.evaluations.write({"step": step, "eval_loss": loss, "bits_per_byte": bits_per_byte})

    def text(self, tag: str, text: str, step: int) -> None:
        """Nothing: the run folder has the config already."""

    def sample(self, step: int, text: str) -> None:
        """Nothing: samples are for people."""

    def close(self) -> None:
        self.steps.close()
        self.evaluations.close()


class Observer:
    """Made on every rank, writes on the main one only; elsewhere every method does nothing.

    `resumed_step`: completed steps of the checkpoint that the run goes on from; what an earlier process recorded after it is
    dropped (files) or hidden (TensorBoard), as it will be recorded again. `summary_facts`: what `summary.json` says beside
    what `close` is given. Raises ConfigError when an asked-for package is absent, on every rank alike.

    Call `close` in a `finally`: it gives the terminal back.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        is_main: bool,
        resumed_step: int = 0,
        summary_facts: dict[str, Any] | None = None,
    ) -> None:
        self._run_dir, self._is_main, self._facts = Path(run_dir), is_main, dict(summary_facts or {})
        self._step = resumed_step
        self._spikes, self._bad_losses, self._bad_norms = SpikeDetector(), Repeats(), Repeats()
        self._scaling, self._open = config.precision.loss_scale > 0, True
        self._sinks: list[Sink] = []
        self._progress: Progress | None = None
        if config.observe.wandb:
            wandb.require()
        if is_main:
            self._open_sinks(config, resumed_step)

    def _open_sinks(self, config: Config, resumed_step: int) -> None:
        self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        files = MetricsFiles(self._run_dir, resumed_step)
        for record in files.steps.recent:  # the running mean goes on where it was
            self._note_norm(record)
        self._sinks.append(files)
        if config.observe.tensorboard:
            self._sinks.append(TensorBoard(self._run_dir / "tensorboard", resumed_step))
        if config.observe.wandb:
            self._sinks.append(wandb.Wandb(config, self._run_dir))
        if config.observe.progress:
            self._progress = Progress(config.train.steps)
            self._sinks.append(self._progress)
        self.text("config", f"```yaml\n{dump(config)}```", resumed_step)

    def text(self, tag: str, text: str, step: int = 0) -> None:
        """Markdown text into TensorBoard."""
        for sink in self._sinks:
            sink.text(tag, text, step)

    def first_batch(self, text: str) -> None:
        """The first batch as decoded text with its loss mask, for the eye: terminal and TensorBoard."""
        self.text("first_batch", verbatim(text), self._step)
        if self._progress is not None:
            self._progress.message(f"first batch:\n{text}")

    def step(self, record: dict[str, Any]) -> None:
        """One record of a completed step, with plain Python numbers; at least `step`. Keys: docs of `metrics.jsonl`.

        Warns on a loss that is not finite, and on a gradient norm that is not finite or over ten times its running mean. A
        skipped update (`skipped`) under dynamic loss scaling is the scaler at work and not a warning.
        """
        if not self._is_main:
            return
        self._step = record["step"]
        for sink in self._sinks:
            sink.step(record)
        loss, norm, scaled_down = record.get("loss"), record.get("grad_norm"), self._scaling and record.get("skipped")
        if self._bad_losses.update(loss is not None and not math.isfinite(loss)):
            remedy = "Lower optim.lr, or resume from before it and leave those steps out (train.skip_steps)."
            self.warning(f"step {self._step}: loss is {loss}{self._bad_losses.in_a_row}. {remedy}")
        if self._bad_norms.update(norm is not None and not math.isfinite(norm) and not scaled_down):
            self.warning(f"step {self._step}: gradient norm is {norm}{self._bad_norms.in_a_row}.")
        if (mean := self._note_norm(record)) is not None:
            self.warning(f"step {self._step}: gradient norm {norm:.4g} is over ten times its running mean {mean:.4g}.")

    def _note_norm(self, record: dict[str, Any]) -> float | None:
        norm = record.get("grad_norm")
        return self._spikes.update(float(norm)) if norm is not None else None  # float: a file spells inf "Infinity"

    def evaluation(self, step: int, loss: float, bits_per_byte: float) -> None:
        """Mean loss per token of the held-out split after `step` steps, in nats, and the same in bits per byte of text."""
        for sink in self._sinks:
            sink.evaluation(step, loss, bits_per_byte)

    def sample(self, step: int, text: str) -> None:
        """Text that the model wrote after `step` steps."""
        for sink in self._sinks:
            sink.sample(step, text)

    def warning(self, message: str) -> None:
        """One line on stderr of the main rank, and a text in TensorBoard at the current step."""
        if self._is_main:
            tell(f"warning: {message}")
            self.text("warnings", verbatim(message), self._step)

    def note(self, message: str) -> None:
        """One line about an ordinary event, among the progress lines of the main rank; on its stderr where there are none."""
        if self._progress is not None:
            self._progress.message(message)
        elif self._is_main:
            tell(message)

    def close(self, summary: dict[str, Any] | None = None) -> None:
        """Close everything and, with a `summary`, write `summary.json`. Again is harmless."""
        if not self._open:
            return
        self._open = False
        try:
            if summary is not None and self._is_main:
                write_json(self._run_dir / "summary.json", {**self._facts, **summary})
        finally:
            for sink in self._sinks:
                sink.close()
