"""The run in the terminal: one live line where stdout is a terminal, otherwise a plain line every now and then."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

WINDOW_STEPS = 50  # the ETA is that of the last steps, evaluations and saves included


class Progress:
    """Shows step, loss, tokens/s, MFU and ETA; bits per byte at evaluations. Goes to stdout, warnings to stderr.

    Plain lines come at the first and the last step and between them after `5 s + 2 % of the run so far`, at most a minute,
    so a short run shows its course and a log of days stays readable. `clock` returns seconds.
    """

    def __init__(self, steps: int, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._clock = steps, clock
        self._console = console or Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._started, self._next = clock(), 0.0
        self._times: deque[tuple[int, float]] = deque(maxlen=WINDOW_STEPS + 1)
        self._live: Live | None = None

    def step(self, record: dict[str, Any]) -> None:
        now = self._clock()
        if not self._times:
            self._times.append((record["step"] - 1, now - (record.get("step_seconds") or 0.0)))
        self._times.append((record["step"], now))
        line = self.line(record)
        if self._console.is_terminal:
            self._show(record["step"], line)
        elif now >= self._next or record["step"] >= self._steps:
            self._next = now + min(60.0, 5.0 + 0.02 * (now - self._started))
            self._print(line)

    def line(self, record: dict[str, Any]) -> str:
        """`step 12/200  loss 8.1234  ...`: what is not known is left out."""
        parts = [f"step {record['step']}/{self._steps}"]
        for key, form in (("loss", "loss {:.4f}"), ("tokens_per_second", "{:,.0f} tokens/s")):
            if record.get(key) is not None:
                parts.append(form.format(record[key]))
        if record.get("mfu") is not None:
            parts.append(f"MFU {100 * record['mfu']:.1f}%")
        if record.get("skipped"):
            parts.append("update skipped")
        if (seconds := self.eta_seconds()) is not None:
            parts.append(f"ETA {timedelta(seconds=round(seconds))}")
        return "  ".join(parts)

    def eta_seconds(self) -> float | None:
        """Seconds to the last step at the pace of the last steps; None before there is a pace."""
        if len(self._times) < 2:
            return None
        (first, start), (last, now) = self._times[0], self._times[-1]
        return max(0, self._steps - last) * (now - start) / (last - first) if last > first else None

    def evaluation(self, step: int, loss: float, bits_per_byte: float) -> None:
        bits = f"  {bits_per_byte:.4f} bits per byte" if math.isfinite(bits_per_byte) else ""
        self._print(f"step {step}/{self._steps}  eval loss {loss:.4f}{bits}")

    def text(self, tag: str, text: str, step: int) -> None:
        """Nothing: the config and the like are for TensorBoard."""

    def sample(self, step: int, text: str) -> None:
        self._print(f"sample at step {step}:\n{text}")

    def message(self, text: str) -> None:
        self._print(text)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _show(self, step: int, line: str) -> None:
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=4)
            self._live.start()
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(total=max(1, self._steps), completed=step, width=20), line)
        self._live.update(row)

    def _print(self, text: str) -> None:
        self._console.print(printable(text, self._console.encoding))


def tell(text: str) -> None:
    """One line on stderr; a live line stays below it (rich redirects stderr while it is shown)."""
    print(printable(text, sys.stderr.encoding or "ascii"), file=sys.stderr, flush=True)


def printable(text: str, encoding: str) -> str:
    """`text` with control characters and what `encoding` cannot say escaped: a model's output must not steer the terminal."""
    shown = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    return shown.encode(encoding, "backslashreplace").decode(encoding)
