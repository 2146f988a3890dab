"""Prepared token files: one folder, read by memory map, checked by a manifest.

train.bin   eval.bin    token ids end to end: uint16, or uint32 for vocabularies above 65536; little-endian
train.idx   eval.idx    start of each document and the end of the last: int64, little-endian, documents + 1 numbers
tokenizer.json          what made them
manifest.json           counts, dtype, fingerprint, and of every file its size and checksums
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dist_train.config.compose import ConfigError
from dist_train.data.cache import flush, flush_folder, open_private
from dist_train.data.rows import TokenSplit, document_offsets
from dist_train.data.tokenizer import Tokenizer

FORMAT, VERSION = "dist_train.tokens", 1
_BLOCK_BYTES = 1 << 26  # a checksum for every 64 MiB
_BLOCKS_AT_OPEN = 4  # a larger file has only its first and last block checked when it is opened
SPLITS = {"train": "train", "evaluation": "eval"}  # name in the manifest: stem of the files


@dataclass(frozen=True)
class TokenFolder:
    """An opened folder of token files."""

    path: Path
    fingerprint: str
    tokenizer: Tokenizer
    train: TokenSplit
    evaluation: TokenSplit
    source: dict[str, Any]  # what it was made from


class _File:
    """A file being written, with its checksums."""

    def __init__(self, path: Path) -> None:
        self._file = open_private(path, "wb")
        self._blocks: list[str] = []
        self._hash, self._in_block, self._bytes = hashlib.blake2b(digest_size=16), 0, 0

    def write(self, content: bytes) -> None:
        self._file.write(content)
        self._bytes += len(content)
        view = memoryview(content)
        while len(view):
            taken = view[: _BLOCK_BYTES - self._in_block]
            self._hash.update(taken)
            self._in_block += len(taken)
            view = view[len(taken) :]
            if self._in_block == _BLOCK_BYTES:
                self._end_block()

    def _end_block(self) -> None:
        self._blocks.append(self._hash.hexdigest())
        self._hash, self._in_block = hashlib.blake2b(digest_size=16), 0

    def close(self) -> dict[str, Any]:
        if self._in_block or not self._blocks:
            self._end_block()
        flush(self._file)
        self._file.close()
        return {"bytes": self._bytes, "checksums": self._blocks}


class TokenWriter:
    """Writes a folder of token files; the manifest comes last, so a folder without one is not finished."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self._folder, self._tokenizer = folder, tokenizer
        self.dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        self._tokens = {split: _File(folder / f"{stem}.bin") for split, stem in SPLITS.items()}
        self._lengths: dict[str, list[npt.NDArray[np.int64]]] = {split: [] for split in SPLITS}
        self._text_bytes = dict.fromkeys(SPLITS, 0)

    def add(self, split: str, tokens: npt.NDArray[np.integer], lengths: npt.NDArray[np.int64], text_bytes: int) -> None:
        """Documents end to end, with their lengths in tokens."""
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._tokenizer.vocab_size:
            raise ValueError(f"token ids {tokens.min()} to {tokens.max()} of a vocabulary of {self._tokenizer.vocab_size}")
        if int(lengths.sum(dtype=np.int64)) != len(tokens):
            raise ValueError(f"documents of {lengths.sum()} tokens together, but {len(tokens)} tokens")
        self._tokens[split].write(tokens.astype(self.dtype).tobytes())
        self._lengths[split].append(lengths)
        self._text_bytes[split] += text_bytes

    def close(self, fingerprint: str, source: dict[str, Any]) -> None:
        """Finish the files and write the manifest, all flushed to the disk."""
        files, splits = {}, {}
        for split, stem in SPLITS.items():
            offsets = document_offsets(np.concatenate([np.zeros(0, dtype=np.int64), *self._lengths[split]]))
            files[f"{stem}.bin"] = self._tokens[split].close()
            files[f"{stem}.idx"] = _write(self._folder / f"{stem}.idx", offsets.astype("<i8").tobytes())
            splits[split] = {"documents": len(offsets) - 1, "tokens": int(offsets[-1]), "text_bytes": self._text_bytes[split]}
        files["tokenizer.json"] = _write(self._folder / "tokenizer.json", self._tokenizer.to_json().encode())
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": fingerprint,
            "dtype": self.dtype.name,
            "packing": "stream",
            "vocab_size": self._tokenizer.vocab_size,
            "splits": splits,
            "source": source,
            "files": files,
        }
        _write(self._folder / "manifest.json", json.dumps(manifest, indent=1).encode())
        flush_folder(self._folder)


def _write(path: Path, content: bytes) -> dict[str, Any]:
    file = _File(path)
    file.write(content)
    return file.close()


def is_token_folder(path: Path) -> bool:
    return (path / "manifest.json").is_file()


def open_tokens(folder: Path, full: bool = False) -> TokenFolder:
    """Memory-map a folder of token files.

    Sizes are compared always, checksums of files up to 256 MiB too (with `full`, of all files). Raises ConfigError naming
    the file that is missing, cut short or changed.
    """
    manifest = _manifest(folder)
    try:
        for name, facts in manifest["files"].items():
            _check_file(folder, name, int(facts["bytes"]), facts["checksums"], full)
        dtype = np.dtype({"uint16": "<u2", "uint32": "<u4"}[manifest["dtype"]])
        splits = {split: _open_split(folder, stem, dtype, manifest, manifest["splits"][split]) for split, stem in SPLITS.items()}
        fingerprint, source = str(manifest["fingerprint"]), dict(manifest["source"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(folder / "manifest.json", f"lacks or garbles {error}") from error
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    return TokenFolder(folder, fingerprint, tokenizer, splits["train"], splits["evaluation"], source)


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{folder}: not a folder of prepared tokens ({path.name}: {error.strerror}); make one with: dist-train data prepare"
        ) from error
    except ValueError as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
        raise ConfigError(f"{path}: not a manifest of {FORMAT} version {VERSION}; make it anew with: dist-train data prepare")
    return manifest


def _check_file(folder: Path, name: str, size: int, checksums: list[str], full: bool) -> None:
    path = folder / name
    if Path(name).name != name:
        raise _damaged(folder / "manifest.json", f"names a file outside of its folder: {name!r}")
    try:
        actual = path.stat().st_size
        if actual != size:
            raise _damaged(path, f"{actual} bytes, the manifest says {size}")
        if len(checksums) != max(-(-size // _BLOCK_BYTES), 1):
            raise _damaged(folder / "manifest.json", f"{len(checksums)} checksums of {name}")
        blocks = range(len(checksums)) if full or len(checksums) <= _BLOCKS_AT_OPEN else (0, len(checksums) - 1)
        with open(path, "rb") as file:
            for block in blocks:
                file.seek(block * _BLOCK_BYTES)
                if hashlib.blake2b(file.read(_BLOCK_BYTES), digest_size=16).hexdigest() != checksums[block]:
                    raise _damaged(path, f"the checksum of bytes from {block * _BLOCK_BYTES} on differs")
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error


def _open_split(folder: Path, stem: str, dtype: np.dtype[Any], manifest: dict[str, Any], facts: dict[str, Any]) -> TokenSplit:
    tokens = _map(folder / f"{stem}.bin", dtype)
    offsets = _map(folder / f"{stem}.idx", np.dtype("<i8"))
    if len(offsets) != facts["documents"] + 1 or offsets[0] != 0 or offsets[-1] != len(tokens) or len(tokens) != facts["tokens"]:
        raise _damaged(folder / f"{stem}.idx", "does not fit the tokens")
    return TokenSplit(tokens, offsets, int(facts["text_bytes"]), str(manifest["packing"]))


def _map(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if os.path.getsize(path) == 0:  # an empty file cannot be mapped
        return np.zeros(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _damaged(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"{path}: damaged ({reason}); remove the folder {path.parent} and prepare the data again.")
