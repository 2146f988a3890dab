"""What the outside asks of a running rank: stop (signals) or save now (a file). Flags only; the step boundary acts on them.

Saving inside a signal handler could store half a step and would wait for ranks that never got the signal. The handler
therefore sets a flag, which travels in the step's own all-reduce: all ranks act at the same boundary.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@dataclass(frozen=True)
class Asked:
    stop: bool
    save: bool


class Requests:
    """Listens from construction until `close`. `save_file`: its appearance asks for a checkpoint, on the main rank only."""

    def __init__(self, save_file: Path | None) -> None:
        self._save_file, self._stop = save_file, False
        self._before = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stop = True

    def poll(self) -> Asked:
        """This rank's own requests so far. A stop stays asked; a save is asked until `saved`."""
        return Asked(self._stop, self._save_file is not None and self._save_file.exists())

    def saved(self) -> None:
        """The checkpoint that `save_file` asked for is there."""
        if self._save_file is not None:
            self._save_file.unlink(missing_ok=True)

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
