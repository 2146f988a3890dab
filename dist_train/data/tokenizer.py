"""Tokenizers: bytes, BPE trained here, any tokenizer.json, and plain ids for synthetic data. One file holds one, as JSON."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dist_train.config.compose import ConfigError

END_OF_TEXT = "<|endoftext|>"
BPE_MIN_VOCAB = 257  # the 256 bytes and the end-of-document token
_OWN_FORMAT = "dist_train.tokenizer"
_END_NAMES = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "[SEP]")


class Tokenizer(ABC):
    """Text to ids 0..vocab_size-1 and back. `eos` ends a document; None where a tokenizer.json has no such token."""

    vocab_size: int
    eos: int | None

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of the text alone: no begin or end tokens, and a special token's name in the text is ordinary text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD."""

    @abstractmethod
    def to_json(self) -> str:
        """The content of the file that `load` reads back."""

    def encode_documents(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """One array per document, with `eos` at its end where there is one."""
        tail = [] if self.eos is None else [self.eos]
        return [np.asarray(self.encode(text) + tail, dtype=np.int64) for text in texts]

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that give equal ids."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def save(self, path: Path | str) -> None:
        """Write one JSON file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @staticmethod
    def load(path: Path | str) -> Tokenizer:
        """Read a file of `save`, or any tokenizer.json (or a folder with one). Raises ConfigError naming the file."""
        path = Path(path).expanduser()
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            text = path.read_text(encoding="utf-8")
            content = json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            raise _unreadable(path, error) from error
        if isinstance(content, dict) and content.get("format") == _OWN_FORMAT:
            return _own(content, path)
        return JsonTokenizer(text, path)


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(f"{path}: not readable as a tokenizer ({error}); give data.tokenizer=bytes, bpe or a tokenizer.json.")


def _own(content: dict[str, Any], path: Path) -> Tokenizer:
    if content.get("kind") == "bytes":
        return ByteTokenizer()
    if content.get("kind") == "ids" and isinstance(content.get("vocab_size"), int):
        return IdTokenizer(content["vocab_size"])
    raise ConfigError(f"{path}: unknown tokenizer kind {content.get('kind')!r}; known are bytes and ids.")


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, and 256 for the end of a document."""

    def __init__(self) -> None:
        self.vocab_size, self.eos = 257, 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_documents(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        return [np.append(np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64), 256) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        pieces = (bytes([i]) if 0 <= i < 256 else END_OF_TEXT.encode() if i == 256 else b"\xff" for i in ids)
        return b"".join(pieces).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        return json.dumps({"format": _OWN_FORMAT, "kind": "bytes"})


class IdTokenizer(Tokenizer):
    """Text is ids as decimal numbers with spaces between, as synthetic data has them; the last id ends a document."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size, self.eos = vocab_size, vocab_size - 1

    def encode(self, text: str) -> list[int]:
        words = text.split()
        if bad := [word for word in words if not (word.isascii() and word.isdigit() and int(word) < self.vocab_size)]:
            raise ConfigError(f"{bad[0]!r}: not an id of synthetic data; give numbers 0 to {self.vocab_size - 1} and spaces.")
        return [int(word) for word in words]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def to_json(self) -> str:
        return json.dumps({"format": _OWN_FORMAT, "kind": "ids", "vocab_size": self.vocab_size})


class JsonTokenizer(Tokenizer):
    """A tokenizer.json of the `tokenizers` library."""

    def __init__(self, text: str, path: Path | str = "tokenizer.json") -> None:
        import tokenizers

        try:
            self._inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises bare Exception
            raise _unreadable(Path(path), error) from error
        self._inner.encode_special_tokens = True
        self._inner.no_padding()
        self._inner.no_truncation()
        vocab = self._inner.get_vocab(with_added_tokens=True)
        if not vocab:
            raise ConfigError(f"{path}: the tokenizer has no tokens; give a trained tokenizer.json.")
        self._text = text
        self.vocab_size = max(vocab.values()) + 1
        self.eos = _end_of_document(Path(path), vocab)

    def encode(self, text: str) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_documents(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        tail = [] if self.eos is None else [self.eos]
        encoded = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(one.ids + tail, dtype=np.int64) for one in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._inner.decode([int(i) for i in ids], skip_special_tokens=False))

    def to_json(self) -> str:
        return self._text


def _end_of_document(path: Path, vocab: dict[str, int]) -> int | None:
    """The token that `tokenizer_config.json` beside the file names, else the first well-known one that the vocabulary has."""
    names: list[Any] = list(_END_NAMES)
    beside = path.parent / "tokenizer_config.json"
    if beside.is_file():
        try:
            named = json.loads(beside.read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError) as error:
            raise _unreadable(beside, error) from error
        names.insert(0, named.get("content") if isinstance(named, dict) else named)
    return next((vocab[name] for name in names if isinstance(name, str) and name in vocab), None)


def train_bpe(texts: Iterable[str], vocab_size: int) -> JsonTokenizer:
    """Byte-level BPE (Sennrich et al., arXiv:1508.07909; bytes as in GPT-2) of exactly vocab_size tokens, or fewer where
    the texts have no more pairs that occur twice. The same texts give the same tokenizer, on any number of threads."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < BPE_MIN_VOCAB:
        raise ConfigError(
            f"data.tokenizer_vocab={vocab_size}: a bpe vocabulary holds the 256 bytes and an end token; "
            f"set model.vocab={BPE_MIN_VOCAB} or more."
        )
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    bpe.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return JsonTokenizer(bpe.to_str())


def named_tokenizer(name: str) -> Tokenizer | None:
    """`bytes`, or the file of a tokenizer.json; None for `bpe`, which has to be trained. Raises ConfigError."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "bpe":
        return None
    if not name or not Path(name).expanduser().exists():
        raise ConfigError(f"data.tokenizer={name}: no such file; give bytes, bpe or the path of a tokenizer.json.")
    return Tokenizer.load(name)
