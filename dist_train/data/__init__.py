"""Corpus → token files → batches. Names are loaded when first used: preparing data does not import torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dist_train.data.batch import MicroBatch
    from dist_train.data.batches import EvalBatches, TrainBatches
    from dist_train.data.corpus import Corpus, check_corpus, prepare
    from dist_train.data.tokenizer import Tokenizer

_PUBLIC = {
    "Corpus": "corpus",
    "check_corpus": "corpus",
    "prepare": "corpus",
    "MicroBatch": "batch",
    "TrainBatches": "batches",
    "EvalBatches": "batches",
    "Tokenizer": "tokenizer",
}
__all__ = ["Corpus", "EvalBatches", "MicroBatch", "Tokenizer", "TrainBatches", "check_corpus", "prepare"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dist_train.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dist_train.data.{_PUBLIC[name]}"), name)
