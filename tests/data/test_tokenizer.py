"""Tokenizers: text comes back byte for byte, special names in a text are text, training is deterministic."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dist_train.config.compose import ConfigError
from dist_train.data.tokenizer import (
    END_OF_TEXT,
    ByteTokenizer,
    IdTokenizer,
    JsonTokenizer,
    Tokenizer,
    named_tokenizer,
    train_bpe,
)

TEXTS = ["the cat sat on the mat; the rat sat on the cat.\n" * 4, "déjà vu: 猫が座った。\n" * 3, "def f(x):\n    return x\n" * 5]
BPE = train_bpe(TEXTS, 300)


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_text_comes_back_byte_for_byte(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids) == text
    (document,) = tokenizer.encode_documents([text])
    assert document.tolist() == [*ids, tokenizer.eos] and document.dtype == np.int64


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=["bytes", "bpe"])
def test_the_name_of_the_end_token_in_a_text_is_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(f"a{END_OF_TEXT}b")
    assert tokenizer.eos not in ids and tokenizer.decode(ids) == f"a{END_OF_TEXT}b"
    assert tokenizer.decode([tokenizer.eos]) == END_OF_TEXT


def test_bpe_has_exactly_the_vocabulary_asked_for_and_fewer_from_little_text() -> None:
    assert BPE.vocab_size == 300
    assert 257 <= train_bpe(["ab ab"], 1000).vocab_size < 265
    assert train_bpe([], 257).vocab_size == 257
    with pytest.raises(ConfigError, match=r"tokenizer_vocab=256.*model.vocab=257"):
        train_bpe(TEXTS, 256)


def test_bpe_training_is_deterministic_over_processes_and_threads(tmp_path: Path) -> None:
    texts = [Path(json.__file__).read_text(), Path(subprocess.__file__).read_text()]
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    program = (
        "import json, sys; from dist_train.data.tokenizer import train_bpe; "
        "print(train_bpe(json.load(open(sys.argv[1])), 700).fingerprint)"
    )
    here = train_bpe(texts, 700)
    for threads in ("1", "3"):
        made = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "texts.json")],
            env={"RAYON_NUM_THREADS": threads, "PATH": ""},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert made.stdout.strip() == here.fingerprint


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE, IdTokenizer(53)], ids=["bytes", "bpe", "ids"])
def test_saved_tokenizers_load_equal(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    for loaded in (Tokenizer.load(path), Tokenizer.load(tmp_path)):
        assert (loaded.vocab_size, loaded.eos, loaded.fingerprint) == (tokenizer.vocab_size, tokenizer.eos, tokenizer.fingerprint)
        assert loaded.encode("12 7 9") == tokenizer.encode("12 7 9")


def test_synthetic_ids_are_text_of_numbers() -> None:
    tokenizer = IdTokenizer(53)
    assert tokenizer.decode([12, 7, 9]) == "12 7 9" and tokenizer.encode("12 7  9") == [12, 7, 9] and tokenizer.eos == 52
    for bad in ("53", "-1", "x", "1.5"):
        with pytest.raises(ConfigError, match="not an id"):
            tokenizer.encode(bad)


def test_any_tokenizer_json_works_without_its_begin_token_and_with_its_end_token(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models, pre_tokenizers, processors

    words = Library(models.WordLevel({"[UNK]": 0, "<s>": 1, "</s>": 2, "hello": 3, "world": 9, "<done>": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    words.enable_truncation(2)
    words.enable_padding(length=8)
    words.save(str(tmp_path / "tokenizer.json"))
    tokenizer = named_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenizer is not None
    assert tokenizer.encode("hello big world hello") == [3, 0, 9, 3]  # neither template, truncation nor padding
    assert tokenizer.vocab_size == 10 and tokenizer.eos == 2  # ids may have holes
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<done>"}}))
    assert Tokenizer.load(tmp_path).eos == 4


def test_a_tokenizer_json_without_end_token_has_none(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    Library(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(tmp_path / "t.json"))
    tokenizer = Tokenizer.load(tmp_path / "t.json")
    assert tokenizer.eos is None and [d.tolist() for d in tokenizer.encode_documents(["b"])] == [[1]]


DAMAGED = ["", "{", "[]", '{"version": "1.0"}', '{"format": "dist_train.tokenizer", "kind": "x"}', "[" * 99999]


@pytest.mark.parametrize("content", DAMAGED, ids=lambda content: content[:40])
def test_damaged_tokenizers_are_refused_by_name(content: str, tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(ConfigError, match="bad.json"):
        named_tokenizer(str(tmp_path / "bad.json"))


def test_a_tokenizer_that_is_not_there_is_refused_with_the_choices() -> None:
    for name in ("", "nope", "/nowhere/tokenizer.json"):
        with pytest.raises(ConfigError, match="bytes, bpe or the path"):
            named_tokenizer(name)
    assert named_tokenizer("bpe") is None and isinstance(named_tokenizer("bytes"), ByteTokenizer)


def test_json_tokenizers_encode_batches_as_single_texts() -> None:
    assert isinstance(BPE, JsonTokenizer)
    assert [d.tolist() for d in BPE.encode_documents(TEXTS)] == [[*BPE.encode(t), BPE.eos] for t in TEXTS]
