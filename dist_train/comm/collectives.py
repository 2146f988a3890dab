"""The only file that names torch.distributed collectives.

Every call takes the `Group` it runs over and returns a `Handle`; nothing has happened to the tensors before
`Handle.wait()`. A group of size 1 is the identity. Tensors may have any strides: where the backend needs contiguous
memory a copy travels and the result is written back, so the caller's tensor always holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dist_train.mesh.mesh import Group

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# torch 2.13 renamed these two and warns about the names that 2.11 has alone.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handle:
    """A collective in flight. `wait` blocks the host (CPU) or the current stream (CUDA) until its tensors are final.

    `then` runs once when the work is done; where it returns another handle that one is waited for too. `advance` goes only as
    far as starting it, so that the second halves of several collectives travel at once.
    """

    __slots__ = ("_next", "_then", "_work")

    def __init__(self, work: Any = None, then: Callable[[], Handle | None] | None = None) -> None:
        self._work, self._then = work, then
        self._next: Handle | None = None

    def advance(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None
        if self._then is not None:
            then, self._then = self._then, None
            self._next = then()

    def wait(self) -> None:
        self.advance()
        if self._next is not None:
            self._next.wait()
            self._next = None


class Recorder(Protocol):
    """Sees every collective before it starts (`comm/trace.py`)."""

    def __call__(self, op: str, group: Group, tensor: Tensor) -> None: ...


class Collectives:
    """Collectives over a mesh's groups; `recorder` sees each call (traffic counts, watchdog, traces)."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder

    def all_reduce(self, x: Tensor, group: Group, op: str = "sum") -> Handle:
        """Reduce `x` (any shape) over the group, in place. `op` is sum, max or min."""
        if group.size == 1 or x.numel() == 0:
            return Handle()
        self._record("all_reduce", group, x)
        flat, back = _in_place(x)
        if op != "sum" or group.size == 2 or not _is_gloo(group) or flat.numel() % group.size:
            return Handle(dist.all_reduce(flat, _OPS[op], group=group.process_group, async_op=True), back)
        # gloo adds in an order of its own. The same slices as in `reduce_scatter`, added in the same order and gathered, take
        # the bytes of a ring and give each element the same bits. (Two addends have but one order.)
        part = _slices(flat, group)[group.index]
        return Handle(_exchange_and_add(part, flat, group), lambda: Handle(_gather(flat, part, group), back))

    def reduce_scatter(self, out: Tensor, x: Tensor, group: Group) -> Handle:
        """Sum `x` (group.size · n elements) over the group; `out` (n elements) receives this rank's slice."""
        if group.size == 1:
            return Handle(then=lambda: _write(out, x))
        self._record("reduce_scatter", group, x)
        source = x.contiguous()
        if _is_gloo(group):
            return _exchange_and_add(out, source, group)
        target, back = receiving(out)
        return Handle(_reduce_scatter(target, source, group=group.process_group, async_op=True), back)

    def all_gather(self, out: Tensor, x: Tensor, group: Group) -> Handle:
        """`out` (group.size · n elements) receives every rank's `x` (n elements) in group order; `x` may be a slice of it."""
        if group.size == 1:
            return Handle(then=lambda: _write(out, x))
        self._record("all_gather", group, out)
        target, back = receiving(out)
        return Handle(_gather(target, x.contiguous(), group), back)

    def all_to_all(self, out: Tensor, x: Tensor, group: Group) -> Handle:
        """Slice i of `x` goes to rank i of the group; `out` receives one slice from each, in group order."""
        if group.size == 1:
            return Handle(then=lambda: _write(out, x))
        self._record("all_to_all", group, x)
        target, back = receiving(out)
        return Handle(_exchange(target, x.contiguous(), group), back)

    def broadcast(self, x: Tensor, group: Group, source: int = 0) -> Handle:
        """`x` becomes that of the group's rank `source`, in place."""
        if group.size == 1 or x.numel() == 0:
            return Handle()
        self._record("broadcast", group, x)
        flat, back = _in_place(x)
        return Handle(dist.broadcast(flat, group.ranks[source], group=group.process_group, async_op=True), back)

    def send(self, x: Tensor, group: Group, to: int) -> Handle:
        """`x` (contiguous) to the group's rank `to`. It must stay as it is until the handle was waited for."""
        self._record("send", group, x)
        return Handle(_link(group).send([x], to, 0))

    def receive(self, out: Tensor, group: Group, source: int) -> Handle:
        """The next tensor that the group's rank `source` sends here, into `out` (contiguous, of its shape and dtype)."""
        return Handle(_link(group).recv([out], source, 0))

    def rotate(self, out: Tensor, x: Tensor, group: Group) -> Handle:
        """`x` goes to the group's next rank, from the last one to the first; `out` receives what the rank before sends.

        Both are contiguous and must stay as they are until the handle was waited for. Counted as a send.
        """
        if group.size == 1:
            return Handle(then=lambda: _write(out, x))
        self._record("send", group, x)
        return Handle(_turn(out, x, group))

    def meet(self, place: str, word: str, group: Group, patience: timedelta) -> list[str] | None:
        """Every rank's word at a place where nobody met before, in group order; None when some rank did not come in time.

        It goes through the store that the ranks found each other by, so it cannot mix with a collective in which others wait.
        """
        if group.size == 1:
            return [word]
        store = dist.distributed_c10d._get_default_store()
        keys = [f"{place}/{rank}" for rank in group.ranks]
        store.set(keys[group.index], word)
        try:
            store.wait(keys, patience)
        except dist.DistNetworkError:
            raise  # the store is gone, and so is the run
        except RuntimeError:  # a timeout; which class it has depends on the kind of store
            return None
        return [store.get(key).decode() for key in keys]

    def barrier(self, group: Group) -> None:
        """Return once every rank of the group has come here."""
        if group.size > 1:
            dist.barrier(group=group.process_group)

    def all_gather_object(self, value: Any, group: Group) -> list[Any]:
        """Every rank's small host object, in group order. The ranks of one run trust each other: the objects are pickled."""
        if group.size == 1:
            return [value]
        found: list[Any] = [None] * group.size
        dist.all_gather_object(found, value, group=group.process_group)
        return found

    def broadcast_object(self, value: Any, group: Group, source: int = 0) -> Any:
        """The small host object of the group's rank `source`."""
        if group.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=group.ranks[source], group=group.process_group)
        return box[0]

    def _record(self, op: str, group: Group, tensor: Tensor) -> None:
        if self.recorder is not None:
            self.recorder(op, group, tensor)


def _link(group: Group) -> Any:
    """Its sends and receives, without the checks that torch's functions make at every call."""
    return group.process_group


def _is_gloo(group: Group) -> bool:
    return dist.get_backend(group.process_group) == "gloo"


# gloo's own gather and exchange work one at a time and stop and go on a slow link; its sends and receives all travel at once,
# from and into the very memory that holds them. (From and to the host alone: for CUDA tensors gloo has no sends.)


def _gather(out: Tensor, x: Tensor, group: Group) -> Any:
    """`x` of every rank into `out`. What it returns has `wait`, as all of these."""
    if not (_is_gloo(group) and x.device.type == "cpu"):
        return _all_gather(out, x, group=group.process_group, async_op=True)
    received, sent = _slices(out, group), x.view(-1)
    return Handle(_swap([sent] * group.size, received, group), lambda: _write(received[group.index], sent))


def _exchange(out: Tensor, x: Tensor, group: Group) -> Any:
    """Slice i of `x` to rank i; into `out` one slice from each."""
    if not (_is_gloo(group) and x.device.type == "cpu"):
        return dist.all_to_all_single(out, x, group=group.process_group, async_op=True)
    received, sent = _slices(out, group), _slices(x, group)
    return Handle(_swap(sent, received, group), lambda: _write(received[group.index], sent[group.index]))


def _exchange_and_add(out: Tensor, x: Tensor, group: Group) -> Handle:
    """The sum of this rank's slices of every `x` into `out`, added in rank order; `out` may be that slice of `x`."""
    # gloo's own reduce-scatter is an all-reduce underneath: twice the bytes.
    sent = _slices(x, group)
    if x.device.type == "cpu":
        others = x.new_empty(group.size - 1, sent[0].numel()).unbind()
        parts: Sequence[Tensor] = [*others[: group.index], sent[group.index], *others[group.index :]]
        return Handle(_swap(sent, parts, group), lambda: _add(out, parts, spare=others[0]))
    exchanged = torch.empty_like(x)
    parts = _slices(exchanged, group)
    return Handle(_exchange(exchanged, x, group), lambda: _add(out, parts, spare=parts[0]))


def _slices(x: Tensor, group: Group) -> Sequence[Tensor]:
    return x.view(group.size, x.numel() // group.size).unbind()


class _Works:
    """Several under way at once."""

    __slots__ = ("_works",)

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _swap(sent: Sequence[Tensor], received: Sequence[Tensor], group: Group) -> _Works:
    """A slice to, and one from, each other rank of a group on the host."""
    peers = [(group.index + step) % group.size for step in range(1, group.size)] if sent[0].numel() else []
    link = _link(group)
    return _Works([link.recv([received[i]], i, 0) for i in peers] + [link.send([sent[i]], i, 0) for i in peers])


def _turn(out: Tensor, x: Tensor, group: Group) -> _Works:
    """A tensor to the next rank of a group and one from the rank before."""
    to, source = (group.index + 1) % group.size, (group.index - 1) % group.size
    if _is_gloo(group):
        link = _link(group)
        return _Works([link.recv([out], source, 0), link.send([x], to, 0)])
    # Posted as one: where ranks post sends and receives one by one, each may wait for the next one's receive.
    sent = dist.P2POp(dist.isend, x, group.ranks[to], group.process_group)
    received = dist.P2POp(dist.irecv, out, group.ranks[source], group.process_group)
    return _Works(dist.batch_isend_irecv([sent, received]))


def _add(out: Tensor, parts: Sequence[Tensor], spare: Tensor) -> None:
    """Σ parts, from first to last, into `out`, which may be one of them; partial sums go into `spare`, the first or second."""
    if len(parts) > 2 and out.element_size() < 4:
        return _write(out, torch.stack(list(parts)).sum(0))  # rounds once
    total = parts[0]
    for part in parts[1:-1]:
        total = torch.add(total, part, out=spare)
    torch.add(total.view(out.shape), parts[-1].view(out.shape), out=out)


def _in_place(x: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
    """Contiguous memory with the values of `x` for a collective to change, and how they come back; `x` itself where it can be."""
    if x.is_contiguous():
        return x, None
    flat = x.contiguous()
    return flat, lambda: _write(x, flat)


def receiving(out: Tensor) -> tuple[Tensor, Callable[[], None] | None]:
    """Contiguous memory for a result, and how it reaches `out`; `out` itself where it can be."""
    if out.is_contiguous():
        return out, None
    target = torch.empty_like(out, memory_format=torch.contiguous_format)
    return target, lambda: _write(out, target)


def _write(target: Tensor, value: Tensor) -> None:
    if target.data_ptr() != value.data_ptr() or target.stride() != value.stride():
        target.copy_(value.view(target.shape))
