"""Prepare: parallel equals serial, killed and concurrent callers end with one whole entry, bad input leaves nothing behind."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from dist_train.config.compose import ConfigError
from dist_train.config.schema import TrainConfig
from dist_train.data import Corpus, EvalBatches, TrainBatches, build, check_corpus, prepare
from dist_train.data.cache import Cache
from dist_train.data.rows import TokenSplit
from dist_train.data.sources import open_source
from dist_train.data.tokenizer import ByteTokenizer
from tests.data.texts import build_in_parts, config_of, text_of


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) if folder.exists() else []


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(text_of(120), encoding="utf-8")
    return path


def test_parallel_tokenization_equals_serial(tmp_path: Path, book: Path) -> None:
    made = []
    for workers in (1, 3):
        config = config_of(tmp_path, path=str(book), workers=workers, cache_dir=str(tmp_path / f"cache{workers}"))
        made.append(build_in_parts(config))
    assert content(made[0].path) == content(made[1].path)
    assert made[0].train.documents > 20 and made[0].evaluation.documents > 0
    both = [bytes(np.sort(np.concatenate([m.train.tokens, m.evaluation.tokens]))) for m in made]
    assert both[0] == both[1]


def test_the_tokens_are_the_text(tmp_path: Path, book: Path) -> None:
    corpus = prepare(config_of(tmp_path, path=str(book), eval_fraction=0.0))
    ids = corpus.train[0].tokens.tolist()
    assert bytes(i for i in ids if i != 256) == book.read_bytes()
    assert ids.count(256) == corpus.train[0].documents and not corpus.evaluation[0].documents
    assert corpus.train[0].text_bytes == book.stat().st_size and corpus.bytes_per_token == 1.0


def test_prepared_files_are_private_and_nothing_else_is_left(tmp_path: Path, book: Path) -> None:
    old = os.umask(0)
    try:
        prepare(config_of(tmp_path, path=str(book), tokenizer="bpe", tokenizer_vocab=300))
    finally:
        os.umask(old)
    cache = tmp_path / "cache"
    for path in [cache, *cache.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert [path.name for path in cache.rglob("*") if ".partial" in path.name or ".tmp" in path.name] == []
    assert not list((cache / "locks").iterdir())


def test_the_default_cache_is_in_the_users_cache_folder(tmp_path: Path, book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (folder,) = prepare(config_of(tmp_path, path=str(book), cache_dir="")).folders
    assert folder is not None and folder.parent == tmp_path / "xdg" / "dist_train" / "tokens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert Cache().folder == tmp_path / "home" / ".cache" / "dist_train"


def test_the_cache_is_used_again_until_anything_that_matters_changes(tmp_path: Path, book: Path) -> None:
    base = {"path": str(book), "tokenizer": "bpe", "tokenizer_vocab": 300}
    first = prepare(config_of(tmp_path, **base))
    stamp = (first.folders[0] or Path()).stat().st_mtime_ns
    again = prepare(config_of(tmp_path, **base, workers=2, shuffle=False))
    assert again.fingerprint == first.fingerprint and (again.folders[0] or Path()).stat().st_mtime_ns == stamp
    others = [
        prepare(config_of(tmp_path, **{**base, **change}))
        for change in ({"tokenizer": "bytes"}, {"tokenizer_vocab": 310}, {"eval_fraction": 0.2}, {"max_documents": 30})
    ]
    book.write_text(text_of(120, seed=1), encoding="utf-8")
    others.append(prepare(config_of(tmp_path, **base)))
    assert len({c.fingerprint for c in [first, *others]}) == 6


def test_max_documents_stops_early_and_takes_the_first(tmp_path: Path, book: Path) -> None:
    for workers in (1, 2):
        config = config_of(tmp_path, path=str(book), max_documents=7, workers=workers, eval_fraction=0.0)
        folder = build_in_parts(dataclasses.replace(config, cache_dir=str(tmp_path / f"cache{workers}")))
        assert folder.train.documents == 7
        text = bytes(i for i in folder.train.tokens.tolist() if i != 256)
        assert book.read_bytes().startswith(text)


def test_a_damaged_cache_entry_is_refused_by_name(tmp_path: Path, book: Path) -> None:
    config = config_of(tmp_path, path=str(book))
    (folder,) = prepare(config).folders
    assert folder is not None
    os.truncate(folder / "train.bin", 100)
    with pytest.raises(ConfigError, match=r"train\.bin: damaged \(100 bytes.*remove the folder"):
        prepare(config)


PREPARE = """
import sys
from pathlib import Path
from tests.data.texts import build_in_parts, config_of
print(build_in_parts(config_of(Path(sys.argv[1]), path=sys.argv[2], workers=int(sys.argv[3])), int(sys.argv[4])).path, flush=True)
"""


def start(tmp_path: Path, path: Path, workers: int, part_bytes: int = 20_000) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", PREPARE, str(tmp_path), str(path), str(workers), str(part_bytes)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_prepare_goes_on_where_it_stopped(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "long.txt"
    path.write_text(text_of(4000), encoding="utf-8")
    child = start(tmp_path, path, workers)
    deadline = time.monotonic() + 60
    while len(parts := list(tmp_path.glob("cache/tokens/*.partial/part_*.npz"))) < 12:
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not [p for p in (tmp_path / "cache" / "tokens").iterdir() if not p.name.endswith(".partial")]
    time.sleep(0.5)  # its workers end by themselves
    parts = sorted(tmp_path.glob("cache/tokens/*.partial/part_*.npz"))
    kept = parts[2:-1]
    os.truncate(parts[0], 50)  # as after a loss of power
    with open(parts[1], "r+b") as file:
        file.seek(parts[1].stat().st_size // 2)
        file.write(bytes(64))
    stamps = {p.name: p.stat().st_mtime_ns for p in kept}
    seen: dict[str, int] = {}
    config = config_of(tmp_path, path=str(path), workers=1)
    source, inner = open_source(config), build._merge

    def look(paths: list[Path], *rest: object) -> None:
        seen.update({p.name: p.stat().st_mtime_ns for p in paths})
        inner(paths, *rest)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_merge", look)
        resumed = build.build(
            source, source.fingerprint(), config, ByteTokenizer(), Cache(config.cache_dir), [], part_bytes=20_000
        )
    assert {name: seen[name] for name in stamps} == stamps  # done once
    clean = build_in_parts(config_of(tmp_path, path=str(path), workers=1, cache_dir=str(tmp_path / "clean")), 20_000)
    assert content(resumed.path) == content(clean.path)
    assert tree(tmp_path / "cache" / "locks") == [] and len(tree(tmp_path / "cache" / "tokens")) == 7


def test_callers_at_once_make_one_entry_and_see_the_same(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text(text_of(1500), encoding="utf-8")
    children = [start(tmp_path, path, workers=1) for _ in range(3)]
    printed = {child.communicate(timeout=90)[0] for child in children}
    assert [child.returncode for child in children] == [0, 0, 0] and len(printed) == 1
    entry = Path(printed.pop().strip())
    assert [p.name for p in entry.parent.iterdir()] == [entry.name] and tree(tmp_path / "cache" / "locks") == []
    clean = build_in_parts(config_of(tmp_path, path=str(path), cache_dir=str(tmp_path / "clean")), 20_000)
    assert content(entry) == content(clean.path)


def test_a_lock_is_held_by_one_and_freed_by_death(tmp_path: Path) -> None:
    holder = (
        "import sys, time; from dist_train.data.cache import Cache\n"
        "with Cache(sys.argv[1]).lock('k'):\n    print('held', flush=True); time.sleep(float(sys.argv[2]))"
    )
    for seconds, kill in ((0.4, False), (60.0, True)):
        child = subprocess.Popen(
            [sys.executable, "-c", holder, str(tmp_path / "c"), str(seconds)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None and child.stdout.readline() == "held\n"
        began = time.monotonic()
        if kill:
            child.kill()
        with Cache(tmp_path / "c").lock("k"):
            waited = time.monotonic() - began
        child.wait()
        assert waited < 30 and (kill or waited > 0.2)
    assert tree(tmp_path / "c") == ["locks"]


def test_a_lock_whose_file_was_replaced_while_waiting_is_taken_anew(tmp_path: Path) -> None:
    """Released locks are removed: a waiter may win the removed file while another caller holds the new one."""
    cache, path, inside = Cache(tmp_path / "c"), tmp_path / "c" / "locks" / "k", threading.Event()

    def held() -> int:
        handle = os.open(path, os.O_RDWR | os.O_CREAT)
        fcntl.flock(handle, fcntl.LOCK_EX)
        return handle

    def wait_and_enter() -> None:
        with cache.lock("k"):
            inside.set()

    cache.make(path.parent)
    first = held()
    waiter = threading.Thread(target=wait_and_enter)
    waiter.start()
    time.sleep(0.2)
    path.unlink()
    second = held()
    os.close(first)
    assert not inside.wait(0.4)
    os.close(second)
    assert inside.wait(10)
    waiter.join()


@pytest.mark.parametrize("cache_exists", [False, True])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize(
    "raw, said",
    [
        (None, "no such file"),
        (b"", "empty"),
        (b"x", "1 tokens of text in all; training needs at least 2"),
        (b"\xef\xbb\xbf", "0 tokens of text"),
        (bytes(range(256)) * 40, "binary"),
        (b"good text\n\n" * 400 + b"\xc3\x28", "byte 4400 is not UTF-8"),
    ],
    ids=["missing", "empty", "one byte", "only a mark", "binary", "not utf-8"],
)
def test_bad_files_are_refused_and_leave_nothing_behind(
    tmp_path: Path, raw: bytes | None, said: str, tokenizer: str, cache_exists: bool
) -> None:
    if raw is not None:
        (tmp_path / "bad").write_bytes(raw)
    if cache_exists:
        (tmp_path / "cache").mkdir()
    with pytest.raises(ConfigError, match=said):
        prepare(config_of(tmp_path, path=str(tmp_path / "bad"), tokenizer=tokenizer))
    assert tree(tmp_path / "cache") == [] and (tmp_path / "cache").exists() == cache_exists


def test_a_bad_line_found_by_a_worker_is_named_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [json.dumps({"text": text_of(1, seed=i)}) for i in range(200)]
    path.write_text("\n".join([*lines, '{"text": 3}', *lines]), encoding="utf-8")
    config = config_of(tmp_path, source="jsonl", path=str(path), workers=2)
    source, cache = open_source(config), Cache(config.cache_dir)
    with pytest.raises(ConfigError, match=r"a\.jsonl:201: field 'text' is not text but int"), cache.undone_on_bad_input() as made:
        build.build(source, source.fingerprint(), config, ByteTokenizer(), cache, made, part_bytes=4000)
    assert not (tmp_path / "cache").exists()


def test_bad_input_leaves_other_entries_alone(tmp_path: Path, book: Path) -> None:
    prepare(config_of(tmp_path, path=str(book)))
    before = tree(tmp_path / "cache" / "tokens")
    (tmp_path / "bad.txt").write_bytes(b"text\xff")
    blend = [{"source": "text", "path": str(book), "eval_fraction": 0.1}, {"source": "text", "path": str(tmp_path / "bad.txt")}]
    with pytest.raises(ConfigError, match=r"bad\.txt: byte 4"):
        prepare(config_of(tmp_path, blend=blend))
    assert tree(tmp_path / "cache" / "tokens") == before


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path, book: Path) -> None:
    config = config_of(tmp_path, path=str(book))
    source = open_source(config)
    before = source.fingerprint()
    book.write_text(text_of(121), encoding="utf-8")
    with pytest.raises(ConfigError, match="changed while it was read"):
        build.build(source, before, config, ByteTokenizer(), Cache(config.cache_dir), [])


def test_a_cache_that_cannot_be_written_is_refused_with_the_key_to_set(tmp_path: Path, book: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigError, match="data.cache_dir"):
        prepare(config_of(tmp_path, path=str(book), cache_dir=str(tmp_path / "file" / "cache")))


def test_a_worker_that_dies_is_reported_and_not_waited_for(tmp_path: Path, book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import os, sys\nif '-m' in sys.orig_argv: os._exit(9)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"book\.txt: its tokenizing process ended with code 9"):
        build_in_parts(config_of(tmp_path, path=str(book), workers=2))


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
@pytest.mark.parametrize("size", [2, 16, 17, 300, 3000])
def test_small_files_can_be_trained_on(tmp_path: Path, size: int, tokenizer: str) -> None:
    path = tmp_path / "small.txt"
    path.write_text(text_of(20)[:size], encoding="utf-8")
    corpus = prepare(config_of(tmp_path, path=str(path), tokenizer=tokenizer))
    train = TrainConfig(seq_len=16, global_batch=4, micro_batch=1)
    check_corpus(corpus, train)
    batches = TrainBatches(corpus, train, True, 2, 1)
    assert sum(batch.live_tokens for step in range(batches.rows_per_epoch) for batch in batches.step(step)) > 0
    evaluated = sum(batch.live_tokens for rank in range(2) for batch in EvalBatches(corpus, 16, 2, 2, rank))
    assert evaluated == corpus.evaluation[0].predicted and corpus.bytes_per_token > 0


def test_bpe_sees_no_held_out_text(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    rng = np.random.default_rng(0)
    words = {"".join(map(chr, rng.integers(97, 123, 6))) for _ in range(60)}
    for word in words:
        (tmp_path / "texts" / word).write_text(f" {word}" * 40)
    corpus = prepare(config_of(tmp_path, path=str(tmp_path / "texts"), tokenizer="bpe", tokenizer_vocab=4096, eval_fraction=0.3))
    vocabulary = json.loads(corpus.tokenizer.to_json())["model"]["vocab"]

    def words_of(split: TokenSplit) -> set[str]:
        return {corpus.tokenizer.decode(ids.tolist()).split()[0] for ids in np.split(split.tokens, split.offsets[1:-1])}

    trained, held = words_of(corpus.train[0]), words_of(corpus.evaluation[0])
    assert trained | held == words and not trained & held and 8 < len(held) < 30
    assert {word for word in words if f"Ġ{word}" in vocabulary} == trained


def test_prepare_imports_no_torch(tmp_path: Path, book: Path) -> None:
    program = (
        "import sys; from dist_train.config.schema import DataConfig, TrainConfig\n"
        "from dist_train.data import prepare, check_corpus\n"
        "check_corpus(prepare(DataConfig(source='text', path=sys.argv[1], cache_dir=sys.argv[2])), TrainConfig())\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program, str(book), str(tmp_path / "c")], check=True, timeout=60)


def test_prepared_tokens_are_the_same_corpus(tmp_path: Path, book: Path) -> None:
    first = prepare(config_of(tmp_path, path=str(book), tokenizer="bpe", tokenizer_vocab=300))
    again: Corpus = prepare(config_of(tmp_path, source="tokens", path=str(first.folders[0]), tokenizer_vocab=300))
    assert again.fingerprint == first.fingerprint and again.bytes_per_token == first.bytes_per_token
    assert np.array_equal(again.train[0].tokens, first.train[0].tokens)
    with pytest.raises(ConfigError, match="300 ids, the model only 299; set model.vocab=300"):
        prepare(config_of(tmp_path, source="tokens", path=str(first.folders[0]), tokenizer_vocab=299))
    with pytest.raises(ConfigError, match="data.path is empty"):
        prepare(config_of(tmp_path, source="tokens"))
