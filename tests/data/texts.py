"""Text to prepare, without torch: child processes of the tests start fast."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dist_train.config.schema import DataConfig
from dist_train.data import build
from dist_train.data.cache import Cache
from dist_train.data.sources import open_source
from dist_train.data.tokenfile import TokenFolder
from dist_train.data.tokenizer import ByteTokenizer

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "and", "then", "it", "was", "naïve", "猫"]


def text_of(paragraphs: int, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(WORDS), (paragraphs, 50))
    return "".join(" ".join(WORDS[w] for w in row) + ".\n\n" for row in picks)


def config_of(tmp_path: Path, **values: object) -> DataConfig:
    return DataConfig(**{"source": "text", "tokenizer": "bytes", "cache_dir": str(tmp_path / "cache"), **values})  # type: ignore[arg-type]


def build_in_parts(config: DataConfig, part_bytes: int = 2000) -> TokenFolder:
    source = open_source(config)
    return build.build(source, source.fingerprint(), config, ByteTokenizer(), Cache(config.cache_dir), [], part_bytes=part_bytes)
