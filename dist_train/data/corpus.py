"""The corpus of a run: one source or a weighted blend, one tokenizer, a training and a held-out split. No torch here, because
the launching process prepares the data before any rank starts."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_train.config.compose import ConfigError
from dist_train.config.schema import DataConfig, TrainConfig
from dist_train.data.build import build, key_of, trained_tokenizer
from dist_train.data.cache import Cache
from dist_train.data.rows import TokenSplit
from dist_train.data.sources import open_source
from dist_train.data.synthetic import synthetic_splits
from dist_train.data.tokenfile import TokenFolder, open_tokens
from dist_train.data.tokenizer import IdTokenizer, Tokenizer, named_tokenizer


@dataclass(frozen=True)
class Corpus:
    """Ready to be read. `train`, `weights`, `evaluation` and `names` have one entry per source of the blend."""

    tokenizer: Tokenizer
    fingerprint: str  # of documents, tokenizer, split and weights: two corpora with one fingerprint give the same batches
    train: tuple[TokenSplit, ...]
    weights: tuple[float, ...]
    evaluation: tuple[TokenSplit, ...]
    names: tuple[str, ...]
    folders: tuple[Path | None, ...]  # where the token files are; None for data that lives in memory

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of text per predicted token of the held-out split (of the training split where there is none):
        bits per byte = loss in nats ÷ ln 2 ÷ this. A synthetic token counts as one byte."""
        for splits in (self.evaluation, self.train):
            if predicted := sum(split.predicted for split in splits):
                return sum(split.text_bytes for split in splits) / predicted
        return 1.0

    def describe(self) -> dict[str, Any]:
        """Counts to be printed or logged; plain values."""

        def count(splits: tuple[TokenSplit, ...]) -> dict[str, int]:
            return {
                "documents": sum(split.documents for split in splits),
                "tokens": sum(len(split.tokens) for split in splits),
                "text_bytes": sum(split.text_bytes for split in splits),
            }

        sources = [
            {"name": name, "weight": weight, "folder": str(folder or ""), "train": count((train,)), "evaluation": count((held,))}
            for name, weight, folder, train, held in zip(self.names, self.weights, self.folders, self.train, self.evaluation)
        ]
        return {
            "fingerprint": self.fingerprint,
            "vocab_size": self.tokenizer.vocab_size,
            "bytes_per_token": self.bytes_per_token,
            "train": count(self.train),
            "evaluation": count(self.evaluation),
            "sources": sources,
        }


def prepare(config: DataConfig, progress: bool = False) -> Corpus:
    """Tokenize the data of a config into the cache, unless it is there, and open it.

    Any number of processes may call this at once: one does the work and the others wait. Raises ConfigError for a missing,
    empty, damaged or unreadable input, naming file and line or byte, and then leaves nothing behind.
    """
    if not 0.0 <= config.eval_fraction <= 0.5:
        raise ConfigError(f"data.eval_fraction={config.eval_fraction}: must be between 0 and 0.5; give the part to hold out.")
    for name, zero in (("workers", "one per core"), ("max_documents", "all")):
        if getattr(config, name) < 0:
            raise ConfigError(f"data.{name}={getattr(config, name)}: must not be negative; 0 means {zero}.")
    entries, weights = blend_entries(config)
    cache = Cache(config.cache_dir)
    with cache.undone_on_bad_input() as made:
        opened = _open_entries(entries, config, cache, made, progress)
    tokenizer = opened[0].tokenizer
    for entry, folder in zip(entries, opened):
        if folder.tokenizer.fingerprint != tokenizer.fingerprint:
            names = f"{entry_name(entry)} has another tokenizer than {entry_name(entries[0])}"
            raise ConfigError(f"data.blend: {names}; prepare both with one tokenizer.json.")
    if tokenizer.vocab_size > config.tokenizer_vocab:
        raise _too_large(tokenizer, config)
    return Corpus(
        tokenizer=tokenizer,
        fingerprint=key_of(tuple(folder.fingerprint for folder in opened), weights),
        train=tuple(folder.train for folder in opened),
        weights=weights,
        evaluation=tuple(folder.evaluation for folder in opened),
        names=tuple(entry_name(entry) for entry in entries),
        folders=tuple(None if entry.source == "synthetic" else folder.path for entry, folder in zip(entries, opened)),
    )


def _too_large(tokenizer: Tokenizer, config: DataConfig) -> ConfigError:
    name = "of the prepared tokens" if config.source == "tokens" else config.tokenizer
    return ConfigError(
        f"data.tokenizer={name}: it has {tokenizer.vocab_size} ids, the model only {config.tokenizer_vocab}; "
        f"set model.vocab={tokenizer.vocab_size} or more."
    )


def _open_entries(
    entries: list[DataConfig], config: DataConfig, cache: Cache, made: list[Path], progress: bool
) -> list[TokenFolder]:
    text = [entry for entry in entries if entry.source not in ("tokens", "synthetic")]
    sources = [open_source(entry) for entry in text]
    for source in sources:
        source.parts()  # missing and empty inputs are found before anything is written
    fingerprints = [source.fingerprint() for source in sources]
    tokenizer = None
    if sources:
        tokenizer = named_tokenizer(config.tokenizer) or trained_tokenizer(sources, fingerprints, text, cache, made, progress)
        if tokenizer.vocab_size > config.tokenizer_vocab:
            raise _too_large(tokenizer, config)
    opened, waiting = [], iter(zip(sources, fingerprints, text))
    for place, entry in enumerate(entries):
        if entry.source == "synthetic":
            opened.append(_synthetic(entry, place))
        elif entry.source == "tokens":
            if not entry.path:
                raise ConfigError("data.path is empty; give data.path=FOLDER that `dist-train data prepare` made.")
            opened.append(open_tokens(Path(entry.path).expanduser()))
        else:
            assert tokenizer is not None
            source, fingerprint, entry = next(waiting)
            opened.append(build(source, fingerprint, entry, tokenizer, cache, made, progress))
    return opened


def _synthetic(entry: DataConfig, place: int) -> TokenFolder:
    train, evaluation = synthetic_splits(entry, place)
    sizes = (entry.synthetic_documents, entry.synthetic_min_tokens, entry.synthetic_max_tokens, entry.tokenizer_vocab)
    key = key_of("synthetic", sizes, entry.eval_fraction, entry.max_documents, place)
    return TokenFolder(Path(), key, IdTokenizer(entry.tokenizer_vocab), train, evaluation, {})


def entry_name(entry: DataConfig) -> str:
    """How messages call a source."""
    return f"{entry.source}:{entry.path}" if entry.path else entry.source


def blend_entries(config: DataConfig) -> tuple[list[DataConfig], tuple[float, ...]]:
    """One config per source, and the weights. An item of data.blend overrides the data.* values around it."""
    if not config.blend:
        return [config], (1.0,)
    shared = {"blend", "tokenizer", "tokenizer_vocab", "shuffle", "cache_dir"}
    allowed = sorted({field.name for field in dataclasses.fields(DataConfig)} - shared)
    entries, weights = [], []
    for place, item in enumerate(config.blend):
        if not isinstance(item, dict) or "source" not in item:
            example = "{source: text, path: a.txt, weight: 0.7}"
            raise ConfigError(f"data.blend[{place}]={item}: must name a source; write it as {example}.")
        values = dict(item)
        weight = values.pop("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 < weight < float("inf"):
            raise ConfigError(f"data.blend[{place}].weight={weight}: must be a number above 0; leave out unwanted sources.")
        for name in values:
            if name not in allowed:
                close = difflib.get_close_matches(str(name), allowed, n=1)
                guess = f"Did you mean {close[0]}? " if close else ""
                raise ConfigError(f"data.blend[{place}].{name}: no such key. {guess}Keys: {', '.join(allowed)}.")
            wanted = type(getattr(config, name))
            if wanted is float and type(values[name]) is int:
                values[name] = float(values[name])
            if type(values[name]) is not wanted:
                raise ConfigError(f"data.blend[{place}].{name}={values[name]!r}: must be of type {wanted.__name__}.")
        entries.append(dataclasses.replace(config, blend=[], **values))
        weights.append(float(weight))
    return entries, tuple(weights)


def check_corpus(corpus: Corpus, train: TrainConfig) -> None:
    """Raises ConfigError where a source holds nothing to train on. A corpus of fewer than seq_len tokens is one padded row."""
    for name, split in zip(corpus.names, corpus.train):
        if split.predicted < 1:
            raise ConfigError(
                f"data: {name} has {len(split.tokens)} tokens in {split.documents} documents to train on, none of them predicted "
                f"from another; a row takes up to train.seq_len={train.seq_len} tokens and needs at least 2 of one document. "
                f"Give more text."
            )
