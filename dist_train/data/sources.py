"""Where documents come from: files of text, JSON lines and this Python's own standard library.

A source lists its parts, each of which any process can read on its own, in an order that depends on the files alone. What a
document is: one file, one JSON line, or, in a single or a large file, a block of lines that ends at an empty line.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dist_train.config.compose import ConfigError
from dist_train.config.schema import DataConfig

PART_BYTES = 1 << 20  # least text of a part; more where there would be over 4096 of them
SOURCES = ("stdlib", "text", "jsonl", "parquet", "huggingface", "tokens", "synthetic")
_SPLIT_ABOVE_BYTES = 1 << 20  # files above this are split in blocks even in a folder of files
_FULL_HASH_BYTES = 1 << 28  # above this, the fingerprint of a source samples its files and takes their times
_STDLIB_LEFT_OUT = frozenset(
    {"test", "tests", "idlelib", "lib2to3", "ensurepip", "site-packages", "dist-packages", "__pycache__"}
)


@dataclass(frozen=True)
class Span:
    """Bytes start..stop of a file (or rows of a table); block > 0: split in documents of about so many bytes."""

    path: str
    start: int
    stop: int
    block: int = 0


@dataclass(frozen=True)
class Part:
    """What one process tokenizes at a time."""

    spans: tuple[Span, ...]
    size: int  # about how many bytes of text; for progress and for sampling


class Source(Protocol):
    """Documents in parts. `parts` and `fingerprint` look at the files; `read` needs the part alone. All raise ConfigError."""

    def parts(self, part_bytes: int = PART_BYTES) -> list[Part]: ...

    def fingerprint(self) -> str:
        """Changes when the documents change."""
        ...

    def read(self, part: Part) -> Iterator[str]: ...


def open_source(config: DataConfig) -> Source:
    """The source that config.source names. Raises ConfigError for an unknown name."""
    from dist_train.data.tables import HuggingFaceSource, ParquetSource

    kinds: dict[str, Any] = {
        "stdlib": StdlibSource,
        "text": TextSource,
        "jsonl": JsonLinesSource,
        "parquet": ParquetSource,
        "huggingface": HuggingFaceSource,
    }
    if config.source not in kinds:
        raise ConfigError(f"data.source={config.source}: no such source; give one of {', '.join(SOURCES)}.")
    source: Source = kinds[config.source](config)
    return source


class TextSource:
    """UTF-8 text: a file, a folder (all files in it that are not hidden) or a glob."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config

    def files(self) -> list[Path]:
        return matching_files(self._config.path)

    def parts(self, part_bytes: int = PART_BYTES) -> list[Part]:
        files = self.files()
        sizes = [os.path.getsize(file) for file in files]
        if not sum(sizes):
            raise ConfigError(f"{self._config.path}: empty; give files with text in them.")
        part_bytes = max(part_bytes, sum(sizes) // 4096)
        spans: list[Span] = []
        for file, size in zip(files, sizes):
            if len(files) > 1 and size <= _SPLIT_ABOVE_BYTES:
                spans.append(Span(str(file), 0, size))
                continue
            block = min(max(size // 50, 512), 16384)
            cuts = _text_cuts(file, size, part_bytes)
            spans += [Span(str(file), a, b, block) for a, b in zip(cuts[:-1], cuts[1:])]
        return grouped(spans, part_bytes)

    def fingerprint(self) -> str:
        return files_fingerprint(self.files())

    def read(self, part: Part) -> Iterator[str]:
        for span in part.spans:
            content = read_span(span)
            if span.start == 0:
                content = content.removeprefix(b"\xef\xbb\xbf")  # a byte order mark is not text
            if (at := content.find(b"\0")) >= 0:
                raise ConfigError(f"{span.path}: byte {span.start + at} is 0: a binary file, not text. {_GIVE_TEXT}")
            yield from _documents(span, content)


class StdlibSource(TextSource):
    """The source code of the running Python's standard library, one document per module, without tests and installed packages."""

    def files(self) -> list[Path]:
        root = Path(sysconfig.get_path("stdlib"))
        found = []
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(set(folders) - _STDLIB_LEFT_OUT)
            found += [Path(folder, name) for name in names if name.endswith(".py")]
        if not found:
            raise ConfigError(f"{root}: this Python has no source of its standard library; give data=text data.path=FILE.")
        return sorted(found)

    def read(self, part: Part) -> Iterator[str]:
        for span in part.spans:
            yield from _documents(span, read_span(span), errors="replace")  # a few modules declare another encoding


class JsonLinesSource:
    """One JSON object per line, its text in the field data.text_field."""

    def __init__(self, config: DataConfig) -> None:
        self._config = config

    def parts(self, part_bytes: int = PART_BYTES) -> list[Part]:
        files = matching_files(self._config.path)
        sizes = [os.path.getsize(file) for file in files]
        if not sum(sizes):
            raise ConfigError(f"{self._config.path}: empty; give files with JSON lines in them.")
        part_bytes = max(part_bytes, sum(sizes) // 4096)
        spans = []
        for file, size in zip(files, sizes):
            cuts = _line_cuts(file, size, part_bytes)
            spans += [Span(str(file), a, b) for a, b in zip(cuts[:-1], cuts[1:])]
        return grouped(spans, part_bytes)

    def fingerprint(self) -> str:
        return files_fingerprint(matching_files(self._config.path))

    def read(self, part: Part) -> Iterator[str]:
        for span in part.spans:
            for number, line in enumerate(read_span(span).split(b"\n")):
                if not line.strip():
                    continue
                try:
                    yield field_text(json.loads(line.decode("utf-8-sig")), self._config.text_field)
                except (ValueError, RecursionError) as error:
                    where = f"{span.path}:{_lines_before(span) + number + 1}"
                    raise ConfigError(f"{where}: {_reason(error)}. Every line must be a JSON object with a text.") from error


def field_text(row: Any, field: str) -> str:
    """The text of a row. Raises ValueError saying what is wrong with it."""
    if not isinstance(row, dict):
        raise ValueError(f"not an object but {type(row).__name__}")
    if field not in row:
        names = ", ".join(map(str, list(row)[:8])) or "none"
        raise ValueError(f"no field {field!r} (fields here: {names}); set data.text_field")
    text = row[field]
    if not isinstance(text, str):
        raise ValueError(f"field {field!r} is not text but {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"field {field!r} has half a surrogate pair at character {error.start}") from error
    return text


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg} at column {error.colno})"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 (byte {error.start} of the line)"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


_GIVE_TEXT = "Give UTF-8 text, or choose files by a glob: data.path='folder/**/*.txt'."


def _documents(span: Span, content: bytes, errors: str = "strict") -> Iterator[str]:
    shift = span.stop - span.start - len(content) + span.start  # a byte order mark was taken away
    for start, stop in _blocks(content, span.block) if span.block else [(0, len(content))]:
        try:
            text = content[start:stop].decode("utf-8", errors=errors)
        except UnicodeDecodeError as error:
            at = shift + start + error.start
            raise ConfigError(f"{span.path}: byte {at} is not UTF-8 ({error.reason}). {_GIVE_TEXT}") from error
        if text:
            yield text


def _blocks(content: bytes, size: int) -> Iterator[tuple[int, int]]:
    """Cut after the first empty line from `size` bytes on, within three times as much, or else a line, a space, a character."""
    start = 0
    while start < len(content):
        stop = _cut_after(content, start + size, start + 3 * size) if len(content) - start > size + size // 2 else len(content)
        yield start, stop
        start = stop


def _cut_after(content: bytes, low: int, high: int) -> int:
    """The first good place to cut in content[low:high], or the end of the content if that is nearer."""
    if high >= len(content):
        high = len(content)
    for mark in (b"\n\n", b"\n\r\n", b"\n", b" "):
        found = content.find(mark, low, high)
        if found >= 0:
            return found + len(mark)
    while high < len(content) and content[high] & 0xC0 == 0x80:  # within a character
        high += 1
    return high


def _text_cuts(file: Path, size: int, part_bytes: int) -> list[int]:
    """Places about part_bytes apart at which a file may be cut between documents; 0 and size among them."""
    window = 1 << 16
    cuts = [0]
    with open_file(file) as stream:
        for target in range(part_bytes, size - part_bytes // 2, part_bytes):
            stream.seek(target)
            cut = target + _cut_after(stream.read(window + 8), 0, window)
            if cuts[-1] < cut < size:
                cuts.append(cut)
    return [*cuts, size]


def _line_cuts(file: Path, size: int, part_bytes: int) -> list[int]:
    cuts = [0]
    with open_file(file) as stream:
        for target in range(part_bytes, size, part_bytes):
            if target <= cuts[-1]:
                continue
            stream.seek(target)
            stream.readline()
            if stream.tell() < size:
                cuts.append(stream.tell())
    return [*cuts, size]


def _lines_before(span: Span) -> int:
    with open_file(Path(span.path)) as stream:
        return stream.read(span.start).count(b"\n")


def grouped(spans: Iterable[Span], part_bytes: int) -> list[Part]:
    """Neighbouring spans together, until a part has part_bytes."""
    parts, held, size = [], [], 0
    for span in spans:
        held.append(span)
        size += span.stop - span.start
        if size >= part_bytes:
            parts.append(Part(tuple(held), size))
            held, size = [], 0
    return [*parts, Part(tuple(held), size)] if held else parts


def matching_files(pattern: str) -> list[Path]:
    """The files of a path, a folder or a glob, sorted. Raises ConfigError where there are none."""
    if not pattern:
        raise ConfigError("data.path is empty; give data.path=FILE (or a folder, or a glob in quotes).")
    path = Path(pattern).expanduser()
    if path.is_dir():
        found = [Path(folder, name) for folder, folders, names in os.walk(path) for name in names]
        found = [file for file in found if not any(part.startswith(".") for part in file.relative_to(path).parts)]
    elif path.exists():
        found = [path]
    else:
        found = [Path(name) for name in glob.glob(str(path), recursive=True)]
    files = sorted(file for file in found if file.is_file())
    if not files:
        what = "no regular files in it" if path.exists() else "no such file or folder, and no file matches it as a glob"
        raise ConfigError(f"{pattern}: {what}; set data.path to a file, a folder or a glob in quotes.")
    return files


def open_file(path: Path) -> Any:
    try:
        return open(path, "rb")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); give a file you may read.") from error


def read_span(span: Span) -> bytes:
    """The bytes of a span. Raises ConfigError if the file has become shorter."""
    with open_file(Path(span.path)) as stream:
        stream.seek(span.start)
        content: bytes = stream.read(span.stop - span.start)
    if len(content) != span.stop - span.start:
        raise ConfigError(f"{span.path}: became shorter while it was read; prepare again when nothing writes to it.")
    return content


def files_fingerprint(files: list[Path]) -> str:
    """Of names and contents; of large sources of names, sizes, times and samples of the contents, which takes milliseconds."""
    sizes = [os.path.getsize(file) for file in files]
    small = sum(sizes) <= _FULL_HASH_BYTES
    base = os.path.commonpath([file.parent for file in files]) if files else ""
    digest = hashlib.blake2b(digest_size=16)
    for file, size in zip(files, sizes):
        digest.update(f"{os.path.relpath(file, base)}\0{size}\0".encode())
        with open_file(file) as stream:
            if small:
                digest.update(stream.read())
                continue
            digest.update(f"{os.stat(file).st_mtime_ns}\0".encode())
            for at in range(0, size, max(size // 16, 1 << 16)):
                stream.seek(at)
                digest.update(stream.read(1 << 12))
    return digest.hexdigest()
