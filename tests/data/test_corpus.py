"""Blends, limits of the config, and what the command line prints."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from dist_train.cli import data as cli
from dist_train.config.compose import ConfigError
from dist_train.config.schema import DataConfig, TrainConfig
from dist_train.data import TrainBatches, prepare
from dist_train.data.corpus import blend_entries
from tests.data.texts import text_of


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for seed, path in enumerate(paths):
        path.write_text(text_of(60, seed), encoding="utf-8")
    return paths


def blend_of(files: list[Path], *weights: float) -> list[dict]:
    return [{"source": "text", "path": str(path), "weight": weight} for path, weight in zip(files, weights)]


def config_of(tmp_path: Path, **values: object) -> DataConfig:
    return DataConfig(**{"tokenizer": "bytes", "cache_dir": str(tmp_path / "cache"), **values})  # type: ignore[arg-type]


def test_a_blend_of_files_hits_its_weights_and_shares_one_tokenizer(tmp_path: Path, files: list[Path]) -> None:
    config = config_of(tmp_path, blend=blend_of(files, 0.7, 0.3), tokenizer="bpe", tokenizer_vocab=300)
    corpus = prepare(config)
    assert corpus.names == tuple(f"text:{path}" for path in files) and corpus.weights == (0.7, 0.3)
    batches = TrainBatches(corpus, TrainConfig(global_batch=20, micro_batch=20, seq_len=16), True, 1, 0)
    edge = batches.rows.counts[0]
    for step in range(20):
        first = sum(i < edge for batch in batches.step(step) for i in batch.sample_ids)
        assert abs(first - 14) <= 1
    facts = corpus.describe()
    assert facts["train"]["tokens"] == sum(source["train"]["tokens"] for source in facts["sources"])
    reweighted = dataclasses.replace(config, blend=blend_of(files, 0.6, 0.4))
    assert corpus.fingerprint == prepare(config).fingerprint != prepare(reweighted).fingerprint


def test_items_of_a_blend_override_what_is_around_them(files: list[Path]) -> None:
    blend = [{"source": "text", "path": str(files[0]), "eval_fraction": 0}, {"source": "jsonl", "text_field": "body"}]
    (first, second), weights = blend_entries(DataConfig(blend=blend, path="around", max_documents=5))
    assert (first.path, first.eval_fraction, first.max_documents, first.blend) == (str(files[0]), 0.0, 5, [])
    assert (second.source, second.path, second.text_field) == ("jsonl", "around", "body") and weights == (1.0, 1.0)


def test_held_out_documents_of_every_source_are_evaluated(tmp_path: Path, files: list[Path]) -> None:
    corpus = prepare(config_of(tmp_path, blend=blend_of(files, 1, 1), eval_fraction=0.2))
    assert all(split.documents > 0 for split in corpus.evaluation)
    assert corpus.bytes_per_token == 1.0


@pytest.mark.parametrize(
    "item, said",
    [
        ("text", "must name a source"),
        ({"path": "a.txt"}, "must name a source"),
        ({"source": "text", "weight": 0}, r"blend\[0\].weight=0: must be a number above 0"),
        ({"source": "text", "weight": -1}, "above 0"),
        ({"source": "text", "weight": "much"}, "above 0"),
        ({"source": "text", "weight": float("nan")}, "above 0"),
        ({"source": "text", "pathh": "a.txt"}, r"blend\[0\].pathh: no such key. Did you mean path\?"),
        ({"source": "text", "tokenizer": "bytes"}, "no such key"),
        ({"source": "text", "path": 3}, r"path=3: must be of type str"),
    ],
    ids=str,
)
def test_bad_blends_are_refused_by_place(item: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        blend_entries(DataConfig(blend=[item]))


def test_sources_with_different_tokenizers_do_not_blend(tmp_path: Path, files: list[Path]) -> None:
    with pytest.raises(ConfigError, match="synthetic has another tokenizer"):
        prepare(config_of(tmp_path, blend=[*blend_of(files[:1], 1), {"source": "synthetic"}]))


def test_two_synthetic_sources_of_a_blend_differ(tmp_path: Path) -> None:
    corpus = prepare(config_of(tmp_path, blend=[{"source": "synthetic"}, {"source": "synthetic"}]))
    first, second = (split.tokens[:200].tolist() for split in corpus.train)
    assert first != second


@pytest.mark.parametrize(
    "values, said",
    [
        ({"eval_fraction": -0.1}, "data.eval_fraction=-0.1: must be between 0 and 0.5"),
        ({"eval_fraction": 0.6}, "must be between"),
        ({"workers": -1}, "data.workers=-1"),
        ({"max_documents": -1}, "data.max_documents=-1"),
        ({"tokenizer_vocab": 256}, "bytes: it has 257 ids, the model only 256; set model.vocab=257"),
        ({"tokenizer": "bpe", "tokenizer_vocab": 256}, "model.vocab=257"),
        ({"source": "synthetic", "synthetic_min_tokens": 9, "synthetic_max_tokens": 8}, "min <= max"),
        ({"source": "synthetic", "synthetic_max_tokens": 1, "synthetic_min_tokens": 1}, "2 <= max"),
        ({"source": "synthetic", "synthetic_documents": 0}, "synthetic_documents=0"),
        ({"source": "synthetic", "tokenizer_vocab": 1}, "model.vocab=2"),
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused_and_leave_nothing_behind(
    tmp_path: Path, files: list[Path], values: dict, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        prepare(config_of(tmp_path, **{"source": "text", "path": str(files[0]), **values}))
    assert not (tmp_path / "cache").exists()


def test_the_prepare_command_says_where_and_what(tmp_path: Path, files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "data=text",
        f"data.path={files[0]}",
        "data.tokenizer=bytes",
        f"data.cache_dir={tmp_path}/cache",
        "data.eval_fraction=0",
    ]
    assert cli.main(["prepare", *words]) == 0
    out = capsys.readouterr().out
    (folder,) = (tmp_path / "cache" / "tokens").iterdir()
    documents = len(np.fromfile(folder / "train.idx", dtype="<i8")) - 1
    assert str(folder) in out and f"{documents:,} documents" in out and "257 ids, 1.00 bytes" in out
    assert repr(files[0].read_text()[:30])[:-1] in out


def test_the_show_command_prints_rows_with_their_mask(
    tmp_path: Path, files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "data=text",
        f"data.path={files[0]}",
        "data.tokenizer=bytes",
        f"data.cache_dir={tmp_path}/cache",
        "data.eval_fraction=0",
    ]
    assert cli.main(["show", *words, "train.seq_len=32", "data.shuffle=false"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "row 0: 32 tokens, 32 counted in the loss"
    assert lines[2].endswith(repr(files[0].read_bytes()[:32].decode(errors="replace")))
    assert lines[3] == "  mask: 32 counted"


def test_shown_rows_mark_boundaries_and_padding() -> None:
    from dist_train.data.rows import Rows, read_rows
    from dist_train.data.show import render_rows
    from dist_train.data.tokenizer import IdTokenizer
    from tests.data.corpora import split_of

    rows = Rows(split_of([[5, 6, 7], [8, 9]]), 7)
    shown = render_rows(read_rows([(rows, 0)], 7), IdTokenizer(53))
    assert shown.splitlines() == [
        "row 0: 7 tokens, 3 counted in the loss",
        "  document 0, 3 tokens, 2 counted: '5 6 7'",
        "  document 1, 2 tokens, 1 counted: '8 9'",
        "  padding, 2 tokens",
        "  mask: 2 counted, 1 not, 1 counted, 3 not",
    ]


def test_the_command_explains_itself_and_refuses_unknown_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0 and cli.main(["prepare", "--help"]) == 0 and cli.main([]) == 2
    assert "dist-train data show" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="no such command; give prepare or show"):
        cli.main(["prepair"])
    with pytest.raises(ConfigError, match="Did you mean data.path"):
        cli.main(["prepare", "data.pth=x"])
