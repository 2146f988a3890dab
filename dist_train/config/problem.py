"""One refused value of a config."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """What the value is, the rule it breaks, and what to set instead."""

    key: str
    value: object
    rule: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.rule}; {self.remedy}."
