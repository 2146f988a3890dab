"""How the layers of a transformer are shared by tensor-parallel ranks: a table beside the model.

Each row names a layer, the style in which its ranks share it, and the state of its input and output on the tensor axis. Rows
come in the order in which values flow, so what one layer gives must be what the next one takes. Nothing here knows of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from torch import nn

from dist_train.model.transformer import Transformer


class State(Enum):
    """What the ranks of a tensor group hold of one activation."""

    COPY = "replicated"  # the same values on every rank
    TOKENS = "split along tokens"  # all tokens in a line, padded to a multiple of the ranks, an equal run on each
    FEATURES = "split along features"  # every token; features (or heads) of this rank alone
    PARTIAL = "a partial sum"  # every token and feature, to be added up over ranks


# The styles, and what each can make of what.
STYLES: dict[str, frozenset[tuple[State, State]]] = {
    # Linear layers that read one input, each cut along its outputs.
    "column": frozenset({(State.COPY, State.FEATURES), (State.TOKENS, State.FEATURES)}),
    # A linear layer cut along its inputs; products are summed over ranks.
    "row": frozenset({(State.FEATURES, State.COPY), (State.FEATURES, State.TOKENS)}),
    # A table cut along the vocabulary, looked up by token.
    "embedding": frozenset({(State.COPY, State.COPY), (State.COPY, State.TOKENS)}),
    # A whole table on every rank, looked up by position.
    "positions": frozenset({(State.COPY, State.COPY), (State.TOKENS, State.TOKENS)}),
    # Logits or loss, cut along the vocabulary.
    "head": frozenset({(State.COPY, State.COPY), (State.TOKENS, State.COPY)}),
    # A layer that works on each place alone, with whole weights on every rank: a norm, of the stream or of heads.
    "local": frozenset((state, state) for state in (State.COPY, State.TOKENS, State.FEATURES)),
    # The same without weights, but with random draws, which differ between ranks that hold different places.
    "random": frozenset((state, state) for state in (State.COPY, State.TOKENS, State.FEATURES)),
}


@dataclass(frozen=True)
class Layer:
    """A row of the table. `*` in a name stands for each block.

    `cuts`: of linear layers, (name, the field of ModelConfig that counts what may not be cut). A column names the linear layers
    beside it; a row has one entry, with an empty name.
    """

    name: str
    style: str
    takes: State
    gives: State
    cuts: tuple[tuple[str, str], ...] = ()


def tensor_plan(model: Transformer, sequence: bool) -> tuple[Layer, ...]:
    """The table of the parts of a model that are here.

    `sequence`: the residual stream is split along tokens (arXiv:2205.05198), not replicated (arXiv:1909.08053).
    """
    stream = State.TOKENS if sequence else State.COPY
    heads, ffn = State.FEATURES, State.FEATURES
    inner = ("gate", "up") if model.config.family == "llama" else ("up",)
    begin = [Layer("embed", "embedding", State.COPY, stream)]
    if model.config.family == "gpt":
        begin.append(Layer("positions", "positions", stream, stream))
    begin.append(Layer("dropout", "random", stream, stream))
    block = [
        Layer("blocks.*.attention_norm", "local", stream, stream),
        Layer("blocks.*.attention.project", "column", stream, heads, (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"))),
        Layer("blocks.*.attention.core", "random", heads, heads),
        Layer("blocks.*.attention.out", "row", heads, stream, (("", "heads"),)),
        Layer("blocks.*.dropout", "random", stream, stream),
        Layer("blocks.*.mlp_norm", "local", stream, stream),
        Layer("blocks.*.mlp.project", "column", stream, ffn, tuple((name, "ffn") for name in inner)),
        Layer("blocks.*.mlp.down", "row", ffn, stream, (("", "ffn"),)),
    ]
    end = [Layer("norm", "local", stream, stream), Layer("head", "head", stream, State.COPY)]
    return (*(begin if model.begins else ()), *block, *(end if model.ends else ()))


def expand(plan: Sequence[Layer], model: Transformer) -> dict[str, Layer]:
    """Module name → row, in the order in which values flow. Raises ValueError for a plan that does not fit the model."""
    blocks = [f"blocks.{name}" for name, _ in model.blocks.named_children()]
    starred = [row for row in plan if "*" in row.name]
    rows: list[tuple[str, Layer]] = []
    for row in plan:
        if "*" not in row.name:
            rows.append((row.name, row))
        elif row is starred[0]:
            rows += [(each.name.replace("blocks.*", block, 1), each) for block in blocks for each in starred]
    _require_modules(rows, model)
    _require_flow(rows)
    _require_cover(rows, model)
    return dict(rows)


def weighted(name: str, row: Layer) -> Iterable[str]:
    """Names of the modules whose parameters this row is about."""
    if row.style != "column":
        return (name,)
    beside = name.rpartition(".")[0]
    return tuple(f"{beside}.{linear}" for linear, _ in row.cuts)


def _require_modules(rows: list[tuple[str, Layer]], model: nn.Module) -> None:
    known = {name for name, _ in model.named_modules()}
    for name, row in rows:
        for wanted in (name, *weighted(name, row)):
            if wanted not in known:
                raise ValueError(
                    f"tensor plan: {row.name} ({row.style}) matches nothing: the model has no {wanted}; correct the row."
                )


def _require_flow(rows: list[tuple[str, Layer]]) -> None:
    for name, row in rows:
        if row.style not in STYLES:
            raise ValueError(f"tensor plan: {name} has style {row.style!r}; choose one of: {', '.join(STYLES)}.")
        if (row.takes, row.gives) not in STYLES[row.style]:
            able = "; ".join(sorted(f"{takes.value} to {gives.value}" for takes, gives in STYLES[row.style]))
            raise ValueError(
                f"tensor plan: {name} cannot make what is {row.takes.value} into what is {row.gives.value}; "
                f"style {row.style} can make {able}."
            )
    for (name, row), (after, following) in zip(rows, rows[1:], strict=False):
        if row.gives is not following.takes:
            raise ValueError(
                f"tensor plan: {name} gives what is {row.gives.value}, but {after} takes what is {following.takes.value}; "
                "change one of the two rows."
            )


def _require_cover(rows: list[tuple[str, Layer]], model: nn.Module) -> None:
    covered = {module for name, row in rows for module in weighted(name, row)}
    for name, _ in model.named_parameters(remove_duplicate=False):
        if name.rpartition(".")[0] not in covered:
            raise ValueError(f"tensor plan: no row says how ranks share {name}; add one for {name.rpartition('.')[0]}.")
