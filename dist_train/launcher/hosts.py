"""Which hosts a job has: the node lists of Slurm and the hostfiles of ssh. Every error quotes what it met, and where."""

from __future__ import annotations

import ipaddress
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dist_train.config.compose import ConfigError

_NAME = re.compile(r"[A-Za-z0-9._-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
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


@dataclass(frozen=True)
class Host:
    """A line of a hostfile. `slots`: ranks to start there, None where the line does not say. `place`: `path:line`."""

    name: str
    user: str | None = None
    slots: int | None = None
    place: str = ""

    @property
    def login(self) -> str:
        """What ssh is given."""
        return f"{self.user}@{self.name}" if self.user else self.name


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file with one `[user@]host [slots=N]` a line; `#` begins a comment.

    A file that is asked for is read or refused: its absence never means "here alone". Raises ConfigError with path and line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"launch.hostfile={path}: cannot be read ({error}); give a text file with one host a line.") from error
    hosts: list[Host] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host(words, f"{path}:{number}")
        for other in hosts:
            if other.name == host.name:
                told = f"{host.place}: host {host.name} stands in {other.place} too"
                raise ConfigError(f"{told}; give it one line with all its slots.")
        hosts.append(host)
    if not hosts:
        raise ConfigError(f"launch.hostfile={path}: names no host; write one a line, such as `node1 slots=8`.")
    return hosts


def _host(words: list[str], place: str) -> Host:
    user, at, name = words[0].rpartition("@")
    if not _is_name(name) or (at and not _USER.fullmatch(user)):
        raise ConfigError(f"{place}: {words[0]!r} is no host; write `host` or `user@host`.")
    slots = None
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key != "slots" or not equals:
            raise ConfigError(f"{place}: {word!r} is not known here; after the host comes `slots=N` and nothing else.")
        if slots is not None or not value.isascii() or not value.isdigit() or int(value) < 1:
            raise ConfigError(f"{place}: {word!r}: slots is one number of ranks, at least 1.")
        slots = int(value)
    return Host(name, user or None, slots, place)


def _is_name(name: str) -> bool:
    """A name or an address that ssh cannot take for an option of its own."""
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return bool(name) and _NAME.fullmatch(name) is not None and not name.startswith("-")
