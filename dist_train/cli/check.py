"""`dist-train check shapes`: what one micro-batch of a configuration holds, before anything runs."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from dist_train.model.shapes import TensorFacts, Traced

HELP = """usage: dist-train check shapes [hydra overrides]

shapes   print every activation, parameter and gradient of one micro-batch: module, shape, dtype and bytes.
         The real model runs under fake tensors, so the largest preset needs no memory.

examples
  dist-train check shapes model=llama_7b train.micro_batch=1 train.seq_len=2048 precision=bf16
  dist-train check shapes model.layers=2 model.vocab=53
"""
PIPED_WIDTH = 160  # columns when the output is no terminal, so that nothing is cut


def main(argv: list[str]) -> int:
    """Exit code 0; 2 without a command. Raises ConfigError."""
    if not argv or any(word in ("-h", "--help") for word in argv):
        print(HELP, end="")
        return 0 if argv else 2
    if argv[0] != "shapes":
        from dist_train.config.compose import ConfigError

        raise ConfigError(f"dist-train check {argv[0]}: no such command; give shapes.")
    show_shapes(argv[1:])
    return 0


def show_shapes(overrides: list[str]) -> None:
    """Print the tables of `trace_shapes`. Raises ConfigError."""
    from rich.console import Console

    from dist_train.config.compose import compose
    from dist_train.model.shapes import trace_shapes

    config = compose(overrides)
    shapes = trace_shapes(config)
    console = Console() if sys.stdout.isatty() else Console(width=PIPED_WIDTH)
    rows = f"{config.train.micro_batch} x {config.train.seq_len} tokens, {config.precision.compute}"
    _print(console, f"Activations of one micro-batch: {rows}", "module", shapes.activations)
    _print(console, f"Parameters: {sum(_elements(row) for row in shapes.parameters):,}", "parameter", shapes.parameters)
    console.print("Activations are listed whether or not backward keeps them; remat decides that.", highlight=False)


def _print(console: Console, title: str, kind: str, rows: list[Traced]) -> None:
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_footer=True)
    gradients = [row.gradient for row in rows if row.gradient is not None]
    for header, total in ((kind, sum(row.value.bytes for row in rows)), ("gradient", sum(g.bytes for g in gradients))):
        table.add_column(header, "total" if header == kind else "", no_wrap=True)
        if header == kind:
            table.add_column("shape", no_wrap=True)
        table.add_column("dtype", no_wrap=True)
        table.add_column("bytes", f"{total:,}", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.name, *_cells(row.value), *(_cells(row.gradient) if row.gradient else ("-", "", "")))
    console.print(table)


def _cells(facts: TensorFacts) -> tuple[str, str, str]:
    return " x ".join(map(str, facts.shape)) or "scalar", str(facts.dtype).removeprefix("torch."), f"{facts.bytes:,}"


def _elements(row: Traced) -> int:
    return math.prod(row.value.shape)
