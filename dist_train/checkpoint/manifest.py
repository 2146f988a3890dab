"""What a checkpoint folder holds: logical name -> global shape, dtype, and the boxes of it with file, offset and checksums.

Pure: no file is opened here. A manifest is one JSON text `{"crc32": c, "manifest": {...}}`, where `c` is the CRC-32 of
the compact JSON of the inner object with sorted keys, so a flipped byte in a name, an offset or the train state is seen
whatever the white space. The tensors lie in safetensors files; `start` counts bytes from the beginning of the file, so a
reader needs nothing but the manifest to map a slice. Every byte of a file is under one checksum: the safetensors header
under `header_crc32`, each box under one CRC-32 for every `BLOCK_BYTES` of it, so that a rank that loads a slice reads and
checks only the blocks it touches.

JSON knows no NaN or infinity; in `state` such a float is written as `{"float": "nan" | "inf" | "-inf"}`.
"""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import dataclass, field
from typing import Any

from dist_train.config.compose import ConfigError
from dist_train.params.geometry import Box

VERSION = 1
BLOCK_BYTES = 16 << 20
ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class CheckpointError(ConfigError):
    """A checkpoint that cannot be written or read; the message names the file and, where there is one, the tensor."""


@dataclass(frozen=True)
class SavedBox:
    """A box and where its bytes lie (row-major, little-endian): `file`, from byte `start`, `bytes` long."""

    box: Box
    file: str
    start: int
    bytes: int
    crc32: tuple[int, ...]  # one for every BLOCK_BYTES; none for an empty box


@dataclass(frozen=True)
class TensorEntry:
    shape: tuple[int, ...]
    dtype: str  # a key of ITEM_BYTES
    boxes: tuple[SavedBox, ...]


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    header_bytes: int  # the safetensors header with its 8-byte length
    header_crc32: int


@dataclass(frozen=True)
class Manifest:
    step: int
    tensors: dict[str, TensorEntry]
    files: dict[str, FileEntry]
    state: dict[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def to_json(self) -> str:
        """The text of `manifest.json`. Raises CheckpointError when `state` holds what JSON cannot say."""
        body = {
            "version": self.version,
            "step": self.step,
            "state": encode(self.state),
            "files": {name: vars(entry) for name, entry in self.files.items()},
            "tensors": {name: _entry_to_plain(entry) for name, entry in self.tensors.items()},
        }
        return f'{{"crc32": {_crc(body)}, "manifest": {json.dumps(body)}}}\n'

    @staticmethod
    def from_json(text: str | bytes, source: str) -> Manifest:
        """Read back `to_json`. Raises CheckpointError that begins with `source` for anything but a whole manifest."""
        try:
            outer = json.loads(text)
            crc, body = outer["crc32"], outer["manifest"]
            if body["version"] != VERSION:
                raise CheckpointError(
                    f"{source}: format version {body['version']!r}; this program reads {VERSION}. "
                    "Load it with the program that wrote it."
                )
            if crc != _crc(body):
                raise CheckpointError(
                    f"{source}: damaged: its content does not match its checksum. Resume from another checkpoint."
                )
            return _from_plain(body)
        except CheckpointError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"missing key {error}" if isinstance(error, KeyError) else str(error)
            raise CheckpointError(f"{source}: not a whole manifest ({reason}). Resume from another checkpoint.") from error


def _crc(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())


def _entry_to_plain(entry: TensorEntry) -> dict[str, Any]:
    boxes = [{**vars(b.box), "file": b.file, "start": b.start, "bytes": b.bytes, "crc32": b.crc32} for b in entry.boxes]
    return {"shape": entry.shape, "dtype": entry.dtype, "boxes": boxes}


def _from_plain(body: dict[str, Any]) -> Manifest:
    files = {
        name: FileEntry(_count(f["bytes"]), _count(f["header_bytes"]), _count(f["header_crc32"]))
        for name, f in body["files"].items()
    }
    for name in files:
        # A manifest may come from elsewhere: it must not lead a reader out of its folder.
        _need(name not in ("", ".", "..") and "/" not in name and "\\" not in name, f"file name {name!r}")
    tensors = {name: _entry_from_plain(name, entry, files) for name, entry in body["tensors"].items()}
    state = decode(body["state"])
    _need(isinstance(state, dict), "state is no object")
    return Manifest(_count(body["step"]), tensors, files, state)


def _entry_from_plain(name: str, entry: dict[str, Any], files: dict[str, FileEntry]) -> TensorEntry:
    shape, dtype = _counts(entry["shape"]), entry["dtype"]
    _need(dtype in ITEM_BYTES, f"{name}: dtype {dtype!r}")
    boxes = []
    for plain in entry["boxes"]:
        box = Box(_counts(plain["offset"]), _counts(plain["shape"]))
        saved = SavedBox(box, plain["file"], _count(plain["start"]), _count(plain["bytes"]), _counts(plain["crc32"]))
        _need(len(box.offset) == len(box.shape) == len(shape), f"{name}: box {box} of a tensor of shape {list(shape)}")
        _need(all(o + s <= n for o, s, n in zip(box.offset, box.shape, shape)), f"{name}: box {box} outside shape {list(shape)}")
        _need(saved.file in files, f"{name}: file {saved.file!r} is not listed")
        _need(saved.bytes == box.size * ITEM_BYTES[dtype], f"{name}: {saved.bytes} bytes for box {box} of {dtype}")
        _need(saved.start + saved.bytes <= files[saved.file].bytes, f"{name}: box {box} lies behind the end of {saved.file}")
        _need(saved.start % ITEM_BYTES[dtype] == 0, f"{name}: box {box} is not aligned")
        _need(len(saved.crc32) == -(-saved.bytes // BLOCK_BYTES), f"{name}: {len(saved.crc32)} checksums for {saved.bytes} bytes")
        boxes.append(saved)
    return TensorEntry(shape, dtype, tuple(boxes))


def _need(condition: bool, complaint: str) -> None:
    if not condition:
        raise ValueError(complaint)


def _count(value: Any) -> int:
    _need(isinstance(value, int) and not isinstance(value, bool) and value >= 0, f"{value!r} is no count")
    return int(value)


def _counts(values: Any) -> tuple[int, ...]:
    _need(isinstance(values, list), f"{values!r} is no list")
    return tuple(_count(v) for v in values)


def encode(value: Any) -> Any:
    """`value` as strict JSON can say it: tuples become lists, non-finite floats `{"float": ...}`. Raises CheckpointError."""
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, (list, tuple)):
        return [encode(v) for v in value]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                kind = type(key).__name__
                raise CheckpointError(f"checkpoint state: key {key!r} is a {kind}; JSON keys are strings. Use str(key).")
        return {key: encode(v) for key, v in value.items()}
    if value is None or isinstance(value, (str, bool, int)):
        return value
    kind = type(value).__name__
    raise CheckpointError(f"checkpoint state: {value!r} is a {kind}; JSON holds numbers, texts, lists and dicts. Convert it.")


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if isinstance(value, dict):
        if set(value) == {"float"} and value["float"] in ("nan", "inf", "-inf"):
            return float(value["float"])
        return {key: decode(v) for key, v in value.items()}
    return value
