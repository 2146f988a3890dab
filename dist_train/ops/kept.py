"""Results that selective recompute keeps although they are more than one operation: a product and what ranks exchange for it.

What autograd functions make this way in forward is not made again, so that recompute neither multiplies nor communicates twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import Tensor


class Keeper:
    """Runs a region in forward, and once more in its recompute with what it made the first time."""

    def __init__(self) -> None:
        self._results: deque[list[Tensor]] = deque()
        self._again = False

    def run(self, region: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        way = self._give if self._again else self._keep
        self._again = True
        token = _way.set(way)
        try:
            return region(*args, **kwargs)
        finally:
            _way.reset(token)

    # (Aliases: what a function returns becomes part of its graph, and would keep that alive.)
    def _keep(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        results = make()
        self._results.append([result.detach() for result in results])
        return results

    def _give(self, make: Callable[[], list[Tensor]]) -> list[Tensor]:
        return [result.detach() for result in self._results.popleft()]


def kept(make: Callable[[], list[Tensor]]) -> list[Tensor]:
    """`make()`, or in a recompute what it gave in forward. To be called in the forward of an autograd function."""
    return _way.get()(make)


_way: ContextVar[Callable[[Callable[[], list[Tensor]]], list[Tensor]]] = ContextVar("kept", default=lambda make: make())
