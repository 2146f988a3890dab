"""Which hosts a job of Slurm has: its node lists. Pure."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from dist_train.config.compose import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._-]*")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_MOST = 100_000  # hosts of a list: a slip of the pen in a range should not fill the memory


def expand_nodes(nodes: str) -> list[str]:
    """The names of a Slurm node list, in order: `a,b[08-09,12],r[1-2]n[1-2]` -> a, b08, b09, b12, r1n1, r1n2, r2n1, r2n2.

    Brackets hold numbers and ranges, which keep their zeros; a name may have several. `scontrol` is not needed. Raises
    ConfigError.
    """
    found: list[str] = []
    for part in _split(nodes):
        pieces = list(_pieces(part, nodes))
        count = 1
        for piece in pieces:
            count *= len(piece)
        if len(found) + count > _MOST:
            raise _wrong(nodes, f"{part!r} makes more than {_MOST} names")
        found += ["".join(chosen) for chosen in itertools.product(*pieces)]
    return found


def _split(nodes: str) -> list[str]:
    """At the commas outside brackets."""
    parts, depth = [""], 0
    for at, letter in enumerate(nodes.strip()):
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise _wrong(nodes, f"the bracket at {at + 1} has no partner")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise _wrong(nodes, "a bracket is not closed")
    if not all(parts):
        raise _wrong(nodes, "a name is empty")
    return parts


def _pieces(part: str, nodes: str) -> Iterator[list[str]]:
    """What each piece of a name may be: plain text, or the numbers of a bracket."""
    for index, piece in enumerate(re.split(r"[\[\]]", part)):
        if index % 2:
            yield [number for item in piece.split(",") for number in _numbers(item, nodes)]
        elif _NAME.fullmatch(piece):
            yield [piece]
        else:
            raise _wrong(nodes, f"{piece!r} is no part of a host's name")


def _numbers(item: str, nodes: str) -> list[str]:
    match = _RANGE.fullmatch(item)
    if match is None:
        raise _wrong(nodes, f"{item!r} is neither a number nor a range of numbers")
    first, last = match[1], match[2] or match[1]
    if int(last) < int(first):
        raise _wrong(nodes, f"the range {item} runs backwards")
    if int(last) - int(first) >= _MOST:
        raise _wrong(nodes, f"the range {item} makes more than {_MOST} names")
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _wrong(nodes: str, what: str) -> ConfigError:
    return ConfigError(f"node list {nodes!r}: {what}; write it as Slurm does, such as gpu[01-04,07],login.")
