"""Gradients of weights that are computed when their owner asks, not in backward (zero-bubble pipelines, arXiv:2401.10241)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from torch import Tensor, nn


class WeightGradients:
    """A queue of products that backward left out. Until they are taken, what they multiply stays in memory."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[nn.Parameter, Callable[[], Tensor]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, parameter: nn.Parameter, compute: Callable[[], Tensor]) -> None:
        self._waiting.append((parameter, compute))

    def take(self, count: int | None = None) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """(parameter, its gradient) of the `count` oldest (None: all), each computed when it is its turn; at most what waits now.

        A parameter that was used several times comes several times, and its gradients add up.
        """
        for _ in range(len(self._waiting) if count is None else min(count, len(self._waiting))):
            parameter, compute = self._waiting.popleft()
            yield parameter, compute()


def deliver(queue: WeightGradients | None, parameter: nn.Parameter, compute: Callable[[], Tensor]) -> Tensor | None:
    """The gradient for autograd: now, or None where a queue takes it for later."""
    if queue is None:
        return compute()
    queue.put(parameter, compute)
    return None
