"""Results that selective recompute keeps although they are more than one operation: a product and what ranks exchange for it.

What autograd functions make this way in forward is not made again, so that recompute neither multiplies nor communicates twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor


class Keeper:
    """What one region made in forward, in order, until its recompute has taken it."""

    def __init__(self) -> None:
        self._results: deque[list[Tensor]] = deque()

    @contextmanager
    def keeping(self) -> Iterator[None]:
        with _set(lambda make: self._keep(make())):
            yield

    @contextmanager
    def giving(self) -> Iterator[None]:
        with _set(lambda make: [result.detach() for result in self._results.popleft()]):
            yield

    def _keep(self, results: list[Tensor]) -> list[Tensor]:
        # (An alias: what a function returns becomes part of its graph, and would keep that alive.)
        self._results.append([result.detach() for result in results])
        return results


def kept(make: Callable[[], list[Tensor]]) -> list[Tensor]:
    """`make()`, or in a recompute what it gave in forward. To be called in the forward of an autograd function."""
    return _way.get()(make)


_way: ContextVar[Callable[[Callable[[], list[Tensor]]], list[Tensor]]] = ContextVar("kept", default=lambda make: make())


@contextmanager
def _set(way: Callable[[Callable[[], list[Tensor]]], list[Tensor]]) -> Iterator[None]:
    token = _way.set(way)
    try:
        yield
    finally:
        _way.reset(token)
