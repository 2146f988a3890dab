"""Which module needs which buckets, and when: the order of gathers and releases at stage 3.

A *unit* is a module whose parameters are gathered together: each element of an outermost `nn.ModuleList` (a transformer's
blocks), and otherwise each module that holds parameters itself. Hooks on the unit gather its buckets before its forward and
before its backward. After its forward they are released; after its backward the engine releases each bucket when its last
gradient has landed. The order of use is recorded, and a pass that follows it has the next unit's gather started before
it waits for its own.

A tied parameter lies in the bucket of the first unit that holds it and is gathered for the other one as well. Recompute runs
forward hooks in the middle of a backward; a bucket that backward still needs (`_in_backward`) is not released by them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dist_train.zero.bucket import ParamBucket, Residence
from dist_train.zero.order import GatherOrder

# Containers are never called, so no hook of theirs ever runs: what they hold belongs to the module around them.
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
# These read the parameters of their children without calling them.
_WHOLE = (nn.MultiheadAttention,)


def users_of_parameters(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """For each parameter the qualified names of the units that use it, the first being the one whose bucket holds it.

    Units come in order of registration.
    """
    users: dict[nn.Parameter, list[str]] = {}

    def walk(part: nn.Module, name: str, unit: str, inside: bool) -> None:
        if not inside and not isinstance(part, _CONTAINERS):
            unit = name
        for param in part.parameters(recurse=False):
            if unit not in users.setdefault(param, []):
                users[param].append(unit)
        for key, child in part.named_children():
            block = isinstance(part, nn.ModuleList) and not isinstance(child, _CONTAINERS)
            path = f"{name}.{key}" if name else key
            whole = block or isinstance(child, _WHOLE)
            walk(child, path, path if whole and not inside else unit, inside or whole)

    walk(module, "", "", False)
    return users


def wait_before_use(module: nn.Module, buckets: dict[str, list[ParamBucket]]) -> None:
    """At stages 1 and 2: a unit's forward begins when what the last step published to it is there."""

    def waits(needed: list[ParamBucket]) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            for bucket in needed:
                bucket.ensure_full()

        return hook

    for name, needed in buckets.items():
        module.get_submodule(name).register_forward_pre_hook(waits(needed))


@dataclass
class _Unit:
    module: nn.Module
    buckets: list[ParamBucket] = field(default_factory=list)


class UnitHooks:
    """Gathers and releases the buckets of units as a module runs."""

    def __init__(self, module: nn.Module, buckets: dict[str, list[ParamBucket]], order: GatherOrder) -> None:
        """`buckets`: what each unit needs, by its qualified name in `module`. `order` is told of each gather."""
        self._agreed = order
        self._units = [_Unit(module.get_submodule(name), needed) for name, needed in buckets.items()]
        self._orders: dict[int, list[int]] = {}  # units in the order of the last whole forward, by the unit that it began with
        self._running: list[int] = []  # the forward that runs now
        self._told = False  # passes are announced
        self._in_backward: set[ParamBucket] = set()
        module.register_forward_pre_hook(lambda _module, _inputs: self._start())
        for index, unit in enumerate(self._units):
            unit.module.register_forward_pre_hook(self._before_forward(index))
            unit.module.register_forward_hook(self._after_forward(index))

    def begin_pass(self, training: bool) -> None:
        """Until the next call all forwards and backwards are one pass; without a call each forward begins one."""
        self._told = True
        self._agreed.begin(training)

    def _start(self) -> None:
        """A forward of the module begins: what the last one that began alike did is what to expect."""
        if self._in_backward:
            return
        if not self._told:
            self._agreed.begin(torch.is_grad_enabled())
        if self._running:
            self._end_forward()
            self._release_all()

    def _end_forward(self) -> None:
        if self._running:
            self._orders[self._running[0]], self._running = self._running, []

    def _gather(self, index: int, then: int | None) -> None:
        for at in (index, then):
            if at is not None:
                for bucket in self._units[at].buckets:
                    if bucket.residence is Residence.SHARDED:
                        self._agreed.next(bucket.number)
                        bucket.gather()
        for bucket in self._units[index].buckets:
            bucket.ensure_full()

    def _before_forward(self, index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any) -> None:
            if self._in_backward:  # recompute: nothing new to record, and no order to follow
                return self._gather(index, None)
            place = len(self._running)
            self._running.append(index)
            expected = self._orders.get(self._running[0], [])[place : place + 2]
            return self._gather(index, expected[1] if len(expected) == 2 and expected[0] == index else None)

        return hook

    def _after_forward(self, index: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            for bucket in self._units[index].buckets:
                if bucket not in self._in_backward:
                    bucket.release()
            if torch.is_grad_enabled() and not self._in_backward:
                place = len(self._running) - 1
                for leaf in tree_leaves(output):
                    if isinstance(leaf, Tensor) and leaf.requires_grad:
                        leaf.register_hook(self._before_backward(index, self._running[0], place))

        return hook

    def _before_backward(self, index: int, first: int, place: int) -> Callable[[Tensor], None]:
        def hook(_grad: Tensor) -> None:
            order = self._running if self._running[:1] == [first] else self._orders.get(first, [])
            before = order[place - 1] if 0 < place <= len(order) else None
            self._in_backward.update(self._units[index].buckets)
            self._gather(index, before)

        return hook

    def done(self, bucket: ParamBucket) -> None:
        """The bucket's last gradient has landed: backward needs its parameters no more."""
        self._in_backward.discard(bucket)
        bucket.release()

    def end_backward(self) -> None:
        """Release what no gradient released: frozen and unused parameters, and what was gathered ahead in vain."""
        self._in_backward.clear()
        self._end_forward()
        self._release_all()

    def _release_all(self) -> None:
        for unit in self._units:
            for bucket in unit.buckets:
                if bucket.residence is Residence.GATHERING:
                    bucket.ensure_full()
                bucket.release()
