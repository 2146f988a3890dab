"""Files of records that any tool can read: one JSON object a line, appended and flushed, and one JSON object for the run.

JSON has no NaN or infinity and strict parsers refuse Python's own spelling of them. They are written as the strings "NaN",
"Infinity" and "-Infinity", which `float()` of Python, `Number()` of JavaScript and pandas turn back into the values;
null stays free for "not known". Finite floats are written by `repr`, so they read back bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


class JsonLines:
    """Appends records to a private (0600) file. One writer a file: only the main rank opens one.

    Opening drops what a resumed run will write again: records of steps after `resumed_step` and a last line that a kill cut
    short. The rewrite goes aside and is renamed, so a kill in it loses nothing. `recent` holds the last records that stay.
    """

    def __init__(self, path: Path, resumed_step: int = 0, recent: int = 200) -> None:
        self.recent: deque[dict[str, Any]] = deque(maxlen=recent)
        self._drop_after(path, resumed_step)
        self._file = open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _drop_after(self, path: Path, step: int) -> None:
        if not path.exists():
            return
        with path.open("rb") as old, _replacing(path) as new:
            for line in old:
                record = _record(line)
                if record is not None and record["step"] <= step:
                    new.write(line)
                    self.recent.append(record)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write one private JSON file aside and rename it: a reader sees the old one or the whole new one."""
    with _replacing(path) as new:
        new.write((dumps(value, indent=2) + "\n").encode())


def dumps(value: Any, indent: int | None = None) -> str:
    """Strict JSON of numbers, texts, lists and dicts; see the head of this file for non-finite floats.

    Anything with `.item()` (a scalar tensor or numpy value) becomes its number, any other object its `str`.
    """
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {str(key): _plain(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return _plain(value.item()) if hasattr(value, "item") else str(value)


def _record(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    aside = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
