"""A batch as text that a person can check: the documents of each row, and which tokens the loss counts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from dist_train.data.rows import IGNORED
from dist_train.data.tokenizer import Tokenizer


def render_rows(batch: Any, tokenizer: Tokenizer, rows: int = 2, width: int = 400) -> str:
    """The first rows of a `MicroBatch` or `RowBlock`, decoded, at most `width` characters per document.

    Every document is one paragraph: the loss counts the tokens after the first, each predicted from those before it. The
    mask line has the lengths of its runs, in tokens whose next token is counted or not: `mask: 12 counted, 1 not, 3 counted`.
    """
    tokens, labels, documents = (x[:rows].tolist() for x in (batch.tokens_BT, batch.labels_BT, batch.documents_BT))
    return "\n".join(_row(b, tokens[b], labels[b], documents[b], tokenizer, width) for b in range(len(tokens)))


def _row(b: int, tokens: Sequence[int], labels: Sequence[int], documents: Sequence[int], tokenizer: Tokenizer, width: int) -> str:
    live = sum(label != IGNORED for label in labels)
    lines = [f"row {b}: {len(tokens)} tokens, {live} counted in the loss"]
    for document in sorted(set(documents)):
        places = [t for t, owner in enumerate(documents) if owner == document]
        counted = sum(labels[t] != IGNORED for t in places)
        if document and not counted and not any(tokens[t] for t in places) and places[-1] == len(tokens) - 1:
            lines.append(f"  padding, {len(places)} tokens")
            continue
        lines.append(
            f"  document {document}, {len(places)} tokens, {counted} counted: {_shorten(_text(tokens, places, tokenizer), width)}"
        )
    runs = [f"{len([*run])} {word}" for word, run in groupby("not" if label == IGNORED else "counted" for label in labels)]
    lines.append("  mask: " + _shorten(", ".join(runs), width))
    return "\n".join(lines)


def _text(tokens: Sequence[int], places: Sequence[int], tokenizer: Tokenizer) -> str:
    return repr(tokenizer.decode([tokens[t] for t in places]))


def _shorten(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width // 2]} … {text[-width // 2 :]}"
