"""From a source to a folder of token files: tokenized in parts by several processes, resumable, committed by one rename.

A part is written aside and renamed, so an interrupted prepare goes on from the parts that are there. The entry's key covers
the documents, the tokenizer and every setting that changes the tokens, so an entry is never out of date.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dist_train.config.compose import ConfigError
from dist_train.config.schema import DataConfig
from dist_train.data.cache import Cache, flush_folder, write_private
from dist_train.data.sources import PART_BYTES, Part, Source
from dist_train.data.split import certainly_held_out, content_bits, held_out
from dist_train.data.tokenfile import VERSION, TokenFolder, TokenWriter, is_token_folder, open_tokens
from dist_train.data.tokenizer import BPE_MIN_VOCAB, Tokenizer, train_bpe

_BPE_BYTES = 24 << 20  # text that a bpe tokenizer is trained on at most
_BPE_PARTS = 24
_SERIAL_BYTES = 2 << 20  # less text than this is not worth starting processes for


def key_of(*facts: object) -> str:
    """A short name for these facts."""
    return hashlib.blake2b(repr((VERSION, *facts)).encode(), digest_size=12).hexdigest()


def trained_tokenizer(
    sources: Sequence[Source],
    fingerprints: Sequence[str],
    configs: Sequence[DataConfig],
    cache: Cache,
    made: list[Path],
    progress: bool = False,
) -> Tokenizer:
    """The bpe tokenizer of these sources, trained once on their training documents and kept in the cache."""
    vocab = configs[0].tokenizer_vocab
    if vocab < BPE_MIN_VOCAB:
        train_bpe([], vocab)  # raises
    settings = [(config.eval_fraction, config.max_documents, config.text_field) for config in configs]
    key = key_of("bpe", vocab, list(zip(fingerprints, settings)))
    path = cache.tokenizer(key)
    if not path.is_file():
        with cache.lock(f"tokenizer-{key}", progress):
            if not path.is_file():
                with _status("training the tokenizer", progress):
                    tokenizer = train_bpe(_sample(sources, configs), vocab)
                cache.make(path.parent)
                made.append(path)
                write_private(path, tokenizer.to_json().encode())
    return Tokenizer.load(path)


def _sample(sources: Sequence[Source], configs: Sequence[DataConfig]) -> Iterator[str]:
    """Training documents from evenly spaced parts of each source, as much of each source."""
    for source, config in zip(sources, configs):
        parts = source.parts()
        chosen = sorted({i * len(parts) // _BPE_PARTS for i in range(_BPE_PARTS)})
        seen, documents = 0, 0
        for count, place in enumerate(chosen, start=1):
            for text in source.read(parts[place]):
                raw = text.encode("utf-8")
                full = seen * len(sources) >= _BPE_BYTES * count // len(chosen)
                if full or (config.max_documents and documents >= config.max_documents):
                    break
                documents += 1
                if not certainly_held_out(content_bits(raw), config.eval_fraction):
                    seen += len(raw)
                    yield text


def build(
    source: Source,
    fingerprint: str,
    config: DataConfig,
    tokenizer: Tokenizer,
    cache: Cache,
    made: list[Path],
    progress: bool = False,
    part_bytes: int = PART_BYTES,
) -> TokenFolder:
    """The token folder of a source, from the cache or made now; concurrent callers wait for the one that makes it.

    Appends what it made to `made`. Raises ConfigError for bad documents, a damaged entry or a cache that cannot be written.
    """
    key = key_of(config.source, fingerprint, tokenizer.fingerprint, config.text_field, config.eval_fraction, config.max_documents)
    entry = cache.entry(key)
    if not is_token_folder(entry):
        with cache.lock(f"tokens-{key}", progress):
            if not is_token_folder(entry):
                made += [cache.partial(key), entry]
                try:
                    _make(source, fingerprint, key, config, tokenizer, cache, progress, part_bytes)
                except OSError as error:
                    reason = error.strerror or error
                    raise ConfigError(f"{cache.folder}: {reason}; free some space or set data.cache_dir.") from error
    return open_tokens(entry)


def _make(
    source: Source,
    fingerprint: str,
    key: str,
    config: DataConfig,
    tokenizer: Tokenizer,
    cache: Cache,
    progress: bool,
    part_bytes: int,
) -> None:
    work = cache.partial(key)
    cache.make(work)
    write_private(work / "tokenizer.json", tokenizer.to_json().encode())
    parts = source.parts(part_bytes)
    paths = [work / f"part_{part_bytes}_{number:06d}.npz" for number in range(len(parts))]
    used = _tokenize(source, config, tokenizer, work / "tokenizer.json", parts, paths, progress)
    if source.fingerprint() != fingerprint:
        raise ConfigError(f"{config.path or config.source}: changed while it was read; prepare again when nothing writes to it.")
    finished = work / "finished"
    shutil.rmtree(finished, ignore_errors=True)
    cache.make(finished)
    facts = {"source": config.source, "path": config.path, "text_field": config.text_field, "eval_fraction": config.eval_fraction}
    _merge(used, config, finished, tokenizer, key, facts)
    os.replace(finished, cache.entry(key))
    flush_folder(cache.entry(key).parent)
    shutil.rmtree(work)


def _tokenize(
    source: Source, config: DataConfig, tokenizer: Tokenizer, saved: Path, parts: list[Part], paths: list[Path], progress: bool
) -> list[Path]:
    """Make the parts that are not there yet; the paths of all that are needed for config.max_documents, in order."""
    counts: dict[int, int] = {i: n for i, path in enumerate(paths) if (n := _documents_in(path)) is not None}

    def enough() -> int:
        """How many parts from the first on are needed; 0 while that is not known."""
        seen = 0
        for needed in range(len(parts)):
            if needed not in counts:
                return 0
            seen += counts[needed]
            if config.max_documents and seen >= config.max_documents:
                return needed + 1
        return len(parts)

    todo = [i for i in range(len(parts)) if i not in counts]
    size = sum(parts[i].size for i in todo)
    workers = min(config.workers or _cores(), len(todo))
    with _bar("tokenizing", sum(part.size for part in parts), progress) as advance:
        advance(sum(parts[i].size for i in counts))

        def done(at: int) -> bool:
            counts[todo[at]] = _documents_in(paths[todo[at]]) or 0
            advance(parts[todo[at]].size)
            return bool(enough())

        if enough():
            pass
        elif workers > 1 and (config.workers or size > _SERIAL_BYTES):
            from dist_train.data.worker import tokenize_parts

            tokenize_parts(config, saved, [(parts[i], paths[i]) for i in todo], workers, done)
        else:
            from dist_train.data.worker import tokenize_part

            for at, i in enumerate(todo):
                tokenize_part(source, tokenizer, parts[i], paths[i])
                if done(at):
                    break
    return paths[: enough()]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _documents_in(path: Path) -> int | None:
    """Documents of a whole part file; None where there is none or it is damaged, as after a loss of power."""
    try:
        with np.load(path, allow_pickle=False) as part:
            return len(part["lengths"]) if len(part["tokens"]) == part["lengths"].sum(dtype=np.int64) else None
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _merge(paths: list[Path], config: DataConfig, folder: Path, tokenizer: Tokenizer, key: str, facts: dict[str, Any]) -> None:
    lengths, sizes, bits = [], [], []
    for path in paths:
        with np.load(path, allow_pickle=False) as part:
            lengths.append(part["lengths"])
            sizes.append(part["sizes"])
            bits.append(part["bits"])
    limit = config.max_documents or None
    all_lengths = np.concatenate(lengths)[:limit]
    text_tokens = int(all_lengths.sum(dtype=np.int64)) - (len(all_lengths) if tokenizer.eos is not None else 0)
    if text_tokens < 2:
        name = config.path or config.source
        raise ConfigError(f"{name}: {text_tokens} tokens of text in all; training needs at least 2. Give more text.")
    held = held_out(np.concatenate(bits)[:limit], np.concatenate(sizes)[:limit], config.eval_fraction)
    writer, first = TokenWriter(folder, tokenizer), 0
    for path in paths:
        with np.load(path, allow_pickle=False) as part:
            mask = held[first : first + len(part["lengths"])]
            first += len(part["lengths"])
            lengths_here, sizes_here = part["lengths"][: len(mask)], part["sizes"][: len(mask)]
            tokens = part["tokens"][: lengths_here.sum(dtype=np.int64)]
        owner = np.repeat(mask, lengths_here)
        for split, side in (("train", False), ("evaluation", True)):
            writer.add(split, tokens[owner == side], lengths_here[mask == side], int(sizes_here[mask == side].sum()))
    writer.close(key, facts)


@contextlib.contextmanager
def _status(text: str, progress: bool) -> Iterator[None]:
    if not progress:
        yield
        return
    from rich.console import Console

    with Console(file=sys.stderr).status(text):
        yield


@contextlib.contextmanager
def _bar(text: str, total: int, progress: bool) -> Iterator[Any]:
    """A progress bar on stderr; yields a function to which one gives bytes done."""
    if not progress:
        yield lambda size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(text, total=total)
        yield lambda size: bar.advance(task, size)
