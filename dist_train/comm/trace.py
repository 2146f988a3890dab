"""Collectives that tell: what was called, over which axis, how many bytes."""

from __future__ import annotations

import time
from collections import Counter

from torch import Tensor

from dist_train.comm.collectives import Collectives, Handle
from dist_train.mesh.mesh import Group

# Bytes that one rank sends for a tensor of S bytes over N ranks, by ring or by exchange of slices.
_SENT = {
    "all_reduce": lambda size, ranks: 2 * size * (ranks - 1) / ranks,
    "reduce_scatter": lambda size, ranks: size * (ranks - 1) / ranks,
    "all_gather": lambda size, ranks: size * (ranks - 1) / ranks,
    "all_to_all": lambda size, ranks: size * (ranks - 1) / ranks,
    "broadcast": lambda size, ranks: size * (ranks - 1) / ranks,
    "send": lambda size, ranks: size,
}


class TrafficCounter:
    """A recorder that counts calls and bytes sent per rank, by (collective, axis)."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.bytes: Counter[tuple[str, str]] = Counter()
        self.active = True

    def __call__(self, op: str, group: Group, tensor: Tensor) -> None:
        if not self.active:
            return
        self.calls[op, group.axis] += 1
        self.bytes[op, group.axis] += round(_SENT[op](tensor.numel() * tensor.element_size(), group.size))

    def per_step(self, steps: int) -> dict[str, dict[str, float]]:
        """`{"all_reduce/dp": {"calls": …, "bytes": …}}`, divided by the number of steps."""
        return {
            f"{op}/{axis}": {"calls": self.calls[op, axis] / max(steps, 1), "bytes": self.bytes[op, axis] / max(steps, 1)}
            for op, axis in sorted(self.calls)
        }

    def reset(self) -> None:
        self.calls.clear()
        self.bytes.clear()


class DelayedCollectives(Collectives):
    """Each all-reduce ends `seconds()` late: shows that results do not depend on timing, and stands in for a slow link."""

    def __init__(self, seconds, recorder=None) -> None:  # type: ignore[no-untyped-def]
        super().__init__(recorder)
        self.seconds = seconds

    def all_reduce(self, x: Tensor, group: Group, op: str = "sum") -> Handle:
        due = time.monotonic() + self.seconds()
        inner = super().all_reduce(x, group, op)

        def finish() -> None:
            time.sleep(max(0.0, due - time.monotonic()))
            inner.wait()

        return Handle(then=finish)
