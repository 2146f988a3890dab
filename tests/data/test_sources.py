"""Sources: documents come whole and in order however a corpus is cut in parts; bad input is named by file and line or byte."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_train.config.compose import ConfigError
from dist_train.config.schema import DataConfig
from dist_train.data import sources
from dist_train.data.sources import SOURCES, open_source


def documents(part_bytes: int = 1 << 20, **config: object) -> list[str]:
    source = open_source(DataConfig(**config))  # type: ignore[arg-type]
    return [text for part in source.parts(part_bytes) for text in source.read(part)]


@settings(max_examples=60, deadline=None)
@given(
    text=st.lists(st.sampled_from(["\n\n", "\n", "\r\n\r\n", " ", "word", "猫", "é", "long" * 300]), max_size=200).map("".join),
    part_bytes=st.sampled_from([600, 1500, 10**6]),
)
def test_a_text_file_comes_back_whole_however_it_is_cut(
    text: str, part_bytes: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_bytes(text.encode())
    if not text:
        with pytest.raises(ConfigError, match="empty"):
            documents(source="text", path=str(path))
        return
    found = documents(part_bytes, source="text", path=str(path))
    assert "".join(found) == text and all(found)


def test_a_single_file_is_cut_in_documents_at_empty_lines(tmp_path: Path) -> None:
    paragraphs = [f"Paragraph {i}. {'word ' * 60}\n\n" for i in range(200)]
    path = tmp_path / "book.txt"
    path.write_text("".join(paragraphs))
    found = documents(source="text", path=str(path))
    assert 20 < len(found) < 120
    assert all(text.startswith("Paragraph ") and text.endswith("\n\n") for text in found)


def test_a_file_without_empty_lines_or_spaces_is_still_cut(tmp_path: Path) -> None:
    path = tmp_path / "solid.txt"
    path.write_text("猫" * 40_000)
    found = documents(30_000, source="text", path=str(path))
    assert "".join(found) == "猫" * 40_000 and len(found) > 10 and max(map(len, found)) < 4000


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbfHello\r\n")
    assert documents(source="text", path=str(path)) == ["Hello\r\n"]


def test_folders_globs_and_hidden_files(tmp_path: Path) -> None:
    for name, text in {"b.txt": "B", "a.txt": "A", "sub/c.md": "C", ".hidden": "no", ".git/x.txt": "no", "empty.txt": ""}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert documents(source="text", path=str(tmp_path)) == ["A", "B", "C"]
    assert documents(source="text", path=f"{tmp_path}/**/*.md") == ["C"]
    assert documents(source="text", path=f"{tmp_path}/?.txt") == ["A", "B"]
    (tmp_path / "[odd].txt").write_text("odd")  # a file whose name looks like a glob
    assert documents(source="text", path=f"{tmp_path}/[odd].txt") == ["odd"]


def test_the_standard_library_is_real_text_of_moderate_size() -> None:
    source = open_source(DataConfig())
    parts = source.parts()
    names = [span.path for part in parts for span in part.spans]
    assert names == sorted(names, key=Path) and any(name.endswith("json/decoder.py") for name in names)
    assert not any("site-packages" in name or f"{os.sep}test{os.sep}" in name for name in names)
    assert 3e6 < sum(part.size for part in parts) < 6e7
    assert source.fingerprint() == open_source(DataConfig()).fingerprint()


@pytest.mark.parametrize("part_bytes", [1, 50, 10**6])
def test_json_lines_come_in_order_however_they_are_cut(tmp_path: Path, part_bytes: int) -> None:
    texts = [f"text {i} é\n" * (i % 7) for i in range(100)]
    lines = [json.dumps({"id": i, "text": text}, ensure_ascii=bool(i % 2)) for i, text in enumerate(texts)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:60]) + "\n\n  \n", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text("\r\n".join(lines[60:]), encoding="utf-8")
    assert documents(part_bytes, source="jsonl", path=f"{tmp_path}/*.jsonl") == texts


GOOD = '{"text": "fine", "other": 3}'


@pytest.mark.parametrize("part_bytes", [1, 10**6])
@pytest.mark.parametrize(
    "bad, said",
    [
        ('{"text": "cut', "not JSON"),
        ("[1, 2]", "not an object but list"),
        ("3", "not an object but int"),
        ('{"body": "x"}', r"no field 'text' \(fields here: body\); set data.text_field"),
        ('{"text": null}', "field 'text' is not text but NoneType"),
        ('{"text": "\\ud800"}', "field 'text' has half a surrogate pair"),
        ("[" * 100_000, "nested too deeply|not JSON"),
        ('{"text": "x"} {"text": "y"}', "not JSON"),
    ],
    ids=["cut", "list", "number", "field", "null", "surrogate", "deep", "two"],
)
def test_bad_json_lines_are_named_by_file_and_line(tmp_path: Path, bad: str, said: str, part_bytes: int) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join([GOOD, "", GOOD, bad, GOOD]))
    with pytest.raises(ConfigError, match=rf"c\.jsonl:4: (?:{said})"):
        documents(part_bytes, source="jsonl", path=str(path))


def test_bytes_that_are_not_utf8_are_named_by_line_in_json(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_bytes(GOOD.encode() + b'\n{"text": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"c\.jsonl:2: not UTF-8 \(byte 10"):
        documents(source="jsonl", path=str(path))


@pytest.mark.parametrize("bad, said", [(b"\xff", "not UTF-8"), (b"\xe7\x8c", "not UTF-8"), (b"\0", "0: a binary file")])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_binary_files_are_named_with_the_offset_of_the_byte(tmp_path: Path, bad: bytes, said: str, bom: bytes) -> None:
    before = bom + b"text \n\n" * 1000
    path = tmp_path / "picture.png"
    path.write_bytes(before + bad + b" more text\n\n" * 1000)
    with pytest.raises(ConfigError, match=rf"picture\.png: byte {len(before)} is {said}"):
        documents(2000, source="text", path=str(path))


@pytest.mark.parametrize("source", ["text", "jsonl", "parquet"])
def test_missing_and_empty_inputs_are_refused(tmp_path: Path, source: str) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    wanted = {"": "data.path is empty", "nope": "no such file", "folder": "no regular files", "*.none": "no such file"}
    for name, said in {**wanted, "empty": "empty"}.items():
        with pytest.raises(ConfigError, match=said):
            documents(source=source, path=str(tmp_path / name) if name else "")


def test_an_unknown_source_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="data.source=nope.*stdlib, text, jsonl"):
        open_source(DataConfig(source="nope"))
    assert {"stdlib", "text", "jsonl", "parquet", "huggingface", "tokens", "synthetic"} == set(SOURCES)


def test_a_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text")
    source = open_source(DataConfig(source="text", path=str(path)))
    parts = source.parts()
    path.write_text("some")
    with pytest.raises(ConfigError, match="became shorter"):
        list(source.read(parts[0]))


@pytest.mark.parametrize("limit", [1 << 28, 10])
def test_fingerprints_follow_content_and_names(tmp_path: Path, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_FULL_HASH_BYTES", limit)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"text of {name}")

    def fingerprint() -> str:
        return open_source(DataConfig(source="text", path=str(tmp_path))).fingerprint()

    first = fingerprint()
    assert fingerprint() == first
    (tmp_path / "b.txt").write_text("text of c.txt")
    os.utime(tmp_path / "b.txt", ns=(1, 1))
    changed = fingerprint()
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    assert len({first, changed, fingerprint()}) == 3


def test_parquet_rows_and_their_faults(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="the extra data is not installed")
    import pyarrow.parquet as parquet

    texts = [f"row {i}" for i in range(25)]
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"body": texts, "n": list(range(25))}), path, row_group_size=10)
    config = {"source": "parquet", "path": str(path), "text_field": "body"}
    assert documents(**config) == texts
    with pytest.raises(ConfigError, match=r"a\.parquet: no column 'text' \(columns: body, n\)"):
        documents(source="parquet", path=str(path))
    with pytest.raises(ConfigError, match=r"a\.parquet:row 1: field 'n' is not text but int"):
        documents(**{**config, "text_field": "n"})
    parquet.write_table(arrow.table({"body": [*texts[:14], None, *texts[15:]]}), path, row_group_size=10)
    with pytest.raises(ConfigError, match=r"a\.parquet:row 15: field 'body' is not text but NoneType"):
        documents(**config)
    os.truncate(path, os.path.getsize(path) - 20)
    with pytest.raises(ConfigError, match=r"a\.parquet: not readable as parquet"):
        documents(**config)


def test_hugging_face_datasets_from_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra data is not installed")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    texts = [f"row {i}" for i in range(25)]
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(str(tmp_path / "saved"))
    assert documents(40, source="huggingface", path=str(tmp_path / "saved")) == texts
    splits = {"train": texts, "test": ["t"]}
    both = datasets.DatasetDict({name: datasets.Dataset.from_dict({"text": rows}) for name, rows in splits.items()})
    both.save_to_disk(str(tmp_path / "both"))
    assert documents(source="huggingface", path=str(tmp_path / "both"), split="test") == ["t"]
    with pytest.raises(ConfigError, match="split 'dev' cannot be loaded"):
        documents(source="huggingface", path=str(tmp_path / "both"), split="dev")
    with pytest.raises(ConfigError, match=r"no column 'body' \(columns: text\)"):
        documents(source="huggingface", path=str(tmp_path / "saved"), text_field="body")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        documents(source="huggingface", path=str(tmp_path / "nope"))


@pytest.mark.parametrize("source, module", [("parquet", "pyarrow.parquet"), ("huggingface", "datasets")])
def test_absence_of_the_extra_is_met_with_the_install_line(source: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"pip install 'dist_train\[data\]'"):
        open_source(DataConfig(source=source, path="x"))
