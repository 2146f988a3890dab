"""One finding of a check-up, how findings are shown, and which environment variables may be shown. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

OK, WARN, BAD = "ok", "warn", "bad"
_ORDER = (OK, WARN, BAD)

# What shapes a run. Nothing else of the environment is shown: a report is pasted where others read it.
PREFIXES = ("DIST_TRAIN_", "NCCL_", "GLOO_", "SLURM_", "OMP_", "CUDA_", "TORCH")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH|COOKIE|JWT", re.IGNORECASE)
_IN_VALUE = re.compile(r"(?<=://)[^/@\s]+@|(?<=[?&;])[^=&;\s]*(?:token|key|secret|passw)[^=&;\s]*=[^&;\s]*", re.IGNORECASE)
MASK = "***"


@dataclass(frozen=True)
class Check:
    """`state` is ok, warn (a run starts, but slowly, or it may fail later) or bad (it fails). `value` is what was found."""

    name: str
    state: str
    value: str
    remedy: str = ""


def worst(checks: Iterable[Check]) -> str:
    return max((check.state for check in checks), key=_ORDER.index, default=OK)


def lines(checks: Iterable[Check]) -> list[str]:
    """A line for each, and one for each remedy: plain text that survives a terminal, a log and a bug report."""
    checks = list(checks)
    width = max((len(check.name) for check in checks), default=0)
    found = []
    for check in checks:
        found.append(f"{check.state:4}  {check.name:{width}}  {check.value}".rstrip())
        if check.remedy and check.state != OK:
            found.append(f"{'':4}  {'':{width}}  -> {check.remedy}")
    return found


def verdict(checks: Iterable[Check]) -> str:
    """`3 ok, 1 warn, 0 bad`."""
    states = [check.state for check in checks]
    return ", ".join(f"{states.count(state)} {state}" for state in _ORDER)


def shown_environment(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that shape a run, in order of their names; those that look like secrets, or hold one in a URL, are masked."""
    return {
        name: MASK if _SECRET.search(name) else _IN_VALUE.sub(MASK, env[name])
        for name in sorted(env)
        if name.startswith(PREFIXES)
    }


def bytes_text(count: float) -> str:
    """`11.7 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
