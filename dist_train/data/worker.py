"""Tokenize one part; and a process that does so for a pool: `python -m dist_train.data.worker`, a JSON line in, one out.

Workers are plain child processes that end when their input ends, so that killing the parent, in any way, leaves none behind,
and the caller's main module is never imported again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from dist_train.config.compose import ConfigError
from dist_train.config.schema import DataConfig
from dist_train.data.cache import flush, open_private
from dist_train.data.rows import document_offsets
from dist_train.data.sources import Part, Source, Span, open_source
from dist_train.data.split import content_bits
from dist_train.data.tokenizer import Tokenizer

_BATCH_BYTES = 1 << 20  # text given to the tokenizer at once


def tokenize_part(source: Source, tokenizer: Tokenizer, part: Part, path: Path) -> None:
    """Write a part's documents to one file, in one step: tokens, lengths, UTF-8 bytes and content bits of each document."""
    pieces: list[np.ndarray[Any, Any]] = []
    bits: list[int] = []
    sizes: list[int] = []
    waiting: list[str] = []
    held = 0
    for text in source.read(part):
        raw = text.encode("utf-8")
        if not raw:
            continue
        waiting.append(text)
        sizes.append(len(raw))
        bits.append(content_bits(raw))
        held += len(raw)
        if held >= _BATCH_BYTES:
            pieces += tokenizer.encode_documents(waiting)
            waiting, held = [], 0
    pieces += tokenizer.encode_documents(waiting)
    lengths = np.asarray([len(piece) for piece in pieces], dtype=np.int64)
    keep = lengths > 0  # a normalizer without an end token may leave nothing of a document
    document_offsets(lengths[keep])
    aside = path.with_name(f"{path.name}.tmp-{os.getpid()}-{threading.get_ident()}")
    with open_private(aside, "wb") as file:
        np.savez(
            file,
            tokens=np.concatenate([np.zeros(0, dtype=np.int64), *pieces]).astype(np.uint32),
            lengths=lengths[keep],
            sizes=np.asarray(sizes, dtype=np.int64)[keep],
            bits=np.asarray(bits, dtype=np.uint64)[keep],
        )
        flush(file)
    os.replace(aside, path)


def tokenize_parts(
    config: DataConfig, tokenizer: Path, todo: Sequence[tuple[Part, Path]], workers: int, done: Callable[[int], bool]
) -> None:
    """Tokenize in `workers` processes; `done(i)` is called as each part is written, and may return True to stop early.

    Raises the ConfigError of the part that has one.
    """
    pending, stop, turn = iter(range(len(todo))), threading.Event(), threading.Lock()

    def serve() -> None:
        child = subprocess.Popen(
            [sys.executable, "-m", "dist_train.data.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "PYTHONPATH": _import_path()},
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps({"config": dataclasses.asdict(config), "tokenizer": str(tokenizer)}) + "\n")
            while not stop.is_set():
                with turn:
                    at = next(pending, None)
                if at is None:
                    break
                part, path = todo[at]
                with contextlib.suppress(BrokenPipeError):  # it died: there will be no answer
                    child.stdin.write(json.dumps({"part": dataclasses.asdict(part), "path": str(path)}) + "\n")
                    child.stdin.flush()
                _raise_answer(child.stdout.readline(), child, part)
                with turn:
                    if done(at):
                        stop.set()
        except BaseException:
            stop.set()
            child.kill()
            raise
        finally:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            child.wait()
            child.stdout.close()

    with ThreadPoolExecutor(workers) as pool:
        servers = [pool.submit(serve) for _ in range(workers)]
        try:
            for server in servers:
                server.result()
        finally:
            stop.set()


def _import_path() -> str:
    """PYTHONPATH with which a child finds this very package."""
    root = str(Path(__file__).resolve().parents[2])
    return os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])


def _raise_answer(line: str, child: subprocess.Popen[str], part: Part) -> None:
    where = part.spans[0].path
    if not line:
        code = child.wait()
        raise ConfigError(
            f"{where}: its tokenizing process ended with code {code}, perhaps for want of memory; try fewer data.workers."
        )
    answer = json.loads(line)
    if "config_error" in answer:
        raise ConfigError(answer["config_error"])
    if "crash" in answer:
        raise RuntimeError(f"tokenizing {where} failed:\n{answer['crash']}")


def main() -> int:
    """Serve one pool: the first line names the source and the tokenizer, each later one a part."""
    setup = json.loads(sys.stdin.readline() or "null")
    if setup is None:
        return 0
    source = open_source(DataConfig(**setup["config"]))
    tokenizer = Tokenizer.load(setup["tokenizer"])
    for line in sys.stdin:
        request = json.loads(line)
        part = Part(tuple(Span(**span) for span in request["part"]["spans"]), request["part"]["size"])
        try:
            tokenize_part(source, tokenizer, part, Path(request["path"]))
            answer = {}
        except ConfigError as error:
            answer = {"config_error": str(error)}
        except Exception:
            answer = {"crash": traceback.format_exc()}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (BrokenPipeError, KeyboardInterrupt):  # the parent is gone or going
        raise SystemExit(1) from None
