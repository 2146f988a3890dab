"""Token files: what is written is read, and damage is refused by the name of the file."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from dist_train.config.compose import ConfigError
from dist_train.data import tokenfile
from dist_train.data.tokenfile import TokenWriter, open_tokens
from dist_train.data.tokenizer import ByteTokenizer, IdTokenizer, Tokenizer


def write(folder: Path, tokenizer: Tokenizer | None = None, evaluation: bool = True) -> Path:
    folder.mkdir()
    writer = TokenWriter(folder, tokenizer or ByteTokenizer())
    writer.add("train", np.arange(10), np.asarray([3, 7]), 8)
    writer.add("train", np.arange(5), np.asarray([5]), 4)
    if evaluation:
        writer.add("evaluation", np.arange(4), np.asarray([4]), 3)
    writer.close("made of this", {"source": "text"})
    return folder


def test_documents_come_back(tmp_path: Path) -> None:
    opened = open_tokens(write(tmp_path / "t"))
    assert opened.train.tokens.tolist() == [*range(10), *range(5)] and opened.train.offsets.tolist() == [0, 3, 10, 15]
    assert opened.train.text_bytes == 12 and opened.evaluation.text_bytes == 3
    assert opened.evaluation.offsets.tolist() == [0, 4] and opened.fingerprint == "made of this"
    assert opened.train.tokens.dtype == np.uint16 and opened.train.offsets.dtype == np.int64
    assert isinstance(opened.train.tokens.base, np.memmap) and not opened.train.tokens.flags.writeable


@pytest.mark.parametrize("vocab, dtype", [(65536, np.uint16), (65537, np.uint32)])
def test_ids_above_16_bits_get_32(tmp_path: Path, vocab: int, dtype: type) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    writer = TokenWriter(folder, IdTokenizer(vocab))
    writer.add("train", np.asarray([0, vocab - 1]), np.asarray([2]), 2)
    writer.close("", {})
    tokens = open_tokens(folder).train.tokens
    assert tokens.dtype == dtype and tokens.tolist() == [0, vocab - 1]


def test_an_empty_split_opens(tmp_path: Path) -> None:
    opened = open_tokens(write(tmp_path / "t", evaluation=False))
    assert len(opened.evaluation.tokens) == 0 and opened.evaluation.documents == 0


def test_ids_outside_the_vocabulary_are_never_written(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path, ByteTokenizer())
    for bad in ([257], [-1]):
        with pytest.raises(ValueError, match="vocabulary of 257"):
            writer.add("train", np.asarray(bad), np.asarray([1]), 1)
    with pytest.raises(ValueError, match="documents of 3 tokens"):
        writer.add("train", np.asarray([1, 2]), np.asarray([3]), 1)


def test_files_are_private(tmp_path: Path) -> None:
    for path in write(tmp_path / "t").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


NAMES = ["train.bin", "train.idx", "eval.bin", "eval.idx", "tokenizer.json", "manifest.json"]


@pytest.mark.parametrize("name", NAMES)
def test_a_file_cut_short_or_gone_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "t") / name
    for size in (path.stat().st_size - 1, 0):
        os.truncate(path, size)
        with pytest.raises(
            ConfigError, match=name if name == NAMES[-1] else f"{name}: damaged \\({size} bytes, the manifest says"
        ):
            open_tokens(tmp_path / "t")
    path.unlink()
    with pytest.raises(ConfigError, match=name):
        open_tokens(tmp_path / "t")


@pytest.mark.parametrize("name", NAMES[:-1])
def test_one_flipped_bit_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "t") / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}: damaged"):
        open_tokens(tmp_path / "t")


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"format": "other"},
        {"dtype": "float32"},
        {"splits": {}},
        {"files": 3},
        {"files": {"../../etc/passwd": {"bytes": 1, "checksums": ["x"]}}},
        {"fingerprint": None, "splits": None},
        {"splits": dict.fromkeys(("train", "evaluation"), {"documents": 9, "tokens": 15, "text_bytes": 1})},
    ],
    ids=lambda change: "+".join(change),
)
def test_a_manifest_that_lies_is_refused(tmp_path: Path, change: dict) -> None:
    path = write(tmp_path / "t") / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=r"manifest.json|train.idx"):
        open_tokens(tmp_path / "t")


def test_a_folder_of_something_else_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nope"):
        with pytest.raises(ConfigError, match="dist-train data prepare"):
            open_tokens(path)


def test_large_files_are_checked_at_both_ends_and_wholly_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenfile, "_BLOCK_BYTES", 4)
    path = write(tmp_path / "t") / "train.bin"  # 30 bytes: 8 blocks
    assert len(json.loads((tmp_path / "t" / "manifest.json").read_text())["files"]["train.bin"]["checksums"]) == 8
    whole = path.read_bytes()
    for place, caught_at_open in ((0, True), (29, True), (13, False)):
        content = bytearray(whole)
        content[place] ^= 1
        path.write_bytes(content)
        if caught_at_open:
            with pytest.raises(ConfigError, match="train.bin"):
                open_tokens(tmp_path / "t")
        with pytest.raises(ConfigError, match="train.bin"):
            open_tokens(tmp_path / "t", full=True)
    path.write_bytes(whole)
    assert open_tokens(tmp_path / "t", full=True).train.documents == 3
