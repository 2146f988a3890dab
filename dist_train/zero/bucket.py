"""One flat bucket of parameters: its tensors, and how gradients pass through it.

Tensors (all flat, all of `layout.numel` elements; names as everywhere in this package):

    param       what the module sees: a view into `full`
    full        compute-dtype buffer of the bucket's parameters
    master      what the optimizer updates: `full` itself where the dtypes agree, else a wider copy
    grad_full   gradients: accumulated over micro-batches here, then reduced over data ranks in place

Phases: ACCUMULATING (grad_full holds this rank's own sum) → REDUCING (it belongs to a collective) → REDUCED (it holds the
sum over ranks). A backward that follows a reduction within one step opens another round: what is reduced already is set
aside in `grad_done` and added back at the end, so the sum is right however a training loop calls us.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from dist_train.comm.collectives import Collectives, Handle
from dist_train.mesh.mesh import Group
from dist_train.zero.layout import BucketLayout
from dist_train.zero.policy import Precision


class Phase(enum.Enum):
    ACCUMULATING = "accumulating"
    REDUCING = "reducing"
    REDUCED = "reduced"


class ParamBucket:
    """Owns the memory of its parameters from construction on; `complete` is called when every gradient has arrived."""

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[nn.Parameter],
        precision: Precision,
        group: Group,
        comm: Collectives,
        complete: Callable[[ParamBucket], None],
    ) -> None:
        self.layout, self.params, self.precision = layout, list(params), precision
        self._group, self._comm, self._complete = group, comm, complete
        device, compute = params[0].device, precision.compute or params[0].dtype
        self.full = torch.zeros(layout.numel, dtype=compute, device=device)
        wide = compute != precision.master
        self.master = torch.zeros(layout.numel, dtype=precision.master, device=device) if wide else self.full
        for param, initial, view in zip(self.params, self._views(self.master), self._views(self.full), strict=True):
            initial.copy_(param.detach())  # the master keeps what the cast to the compute dtype would lose
            param.data = view
        self._comm.broadcast(self.master, group).wait()
        self.publish()

        self.grad_full = torch.zeros(layout.numel, dtype=precision.grad, device=device)
        self.grad_done: Tensor | None = None
        self._grad_views = self._views(self.grad_full)
        self.phase, self._fresh, self._handle = Phase.ACCUMULATING, True, Handle()
        self._missing = len(self.params)  # gradients still to come in this backward
        for param in self.params:
            param.register_post_accumulate_grad_hook(self._arrived)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat[slot.start : slot.stop].view(slot.shape) for slot in self.layout.slots]

    @property
    def is_complete(self) -> bool:
        """True once the running backward has delivered, and `collect` taken, every gradient."""
        return self._missing == 0

    def _arrived(self, _param: Tensor) -> None:
        self._missing -= 1
        if self._missing == 0:
            # A parameter may have come twice (reentrant recompute); then another is still on its way.
            self._missing = sum(param.grad is None for param in self.params)
            if self._missing == 0:
                self.collect()
                self._complete(self)

    def begin(self) -> None:
        """Before a backward: expect every gradient again, and open another round if the last one was reduced."""
        self._missing = len(self.params)
        if self.phase is not Phase.ACCUMULATING:
            self.wait()
            if self.grad_done is None:
                self.grad_done = self.grad_full.clone()
            else:
                self.grad_done += self.grad_full
            self.phase, self._fresh = Phase.ACCUMULATING, True

    def collect(self) -> list[str]:
        """Move the parameters' gradients into `grad_full`; the names of those that got none (they count as zero)."""
        assert self.phase is Phase.ACCUMULATING, "grad_full belongs to a collective"
        present = [param.grad for param in self.params if param.grad is not None]
        views, missing = self._grad_views, []
        if len(present) < len(self.params):
            missing = [at for at, param in enumerate(self.params) if param.grad is None]
            views = [view for at, view in enumerate(views) if at not in missing]
            if self._fresh:
                torch._foreach_zero_([self._grad_views[at] for at in missing])
        if present and self._fresh:
            torch._foreach_copy_(views, present)
        elif present:
            torch._foreach_add_(views, present)
        for param in self.params:
            param.grad = None
        self._fresh, self._missing = False, 0
        return [self.layout.slots[at].name for at in missing]

    def reduce(self) -> None:
        """Start summing `grad_full` over data ranks."""
        assert self.phase is Phase.ACCUMULATING
        self.phase = Phase.REDUCING
        if self.precision.reduce == self.precision.grad:
            self._handle = self._comm.all_reduce(self.grad_full, self._group)
        else:
            wire = self.grad_full.to(self.precision.reduce)
            work = self._comm.all_reduce(wire, self._group)

            def finish() -> None:
                work.wait()
                self.grad_full.copy_(wire)

            self._handle = Handle(finish=finish)

    def wait(self) -> None:
        """Return when `grad_full` holds the sum over data ranks."""
        self._handle.wait()
        self.phase = Phase.REDUCED

    def finish(self) -> None:
        """After the last backward of a step: every round's reduced gradients are in `grad_full`."""
        self.wait()
        if self.grad_done is not None:
            self.grad_full += self.grad_done
            self.grad_done = None

    def publish(self) -> None:
        """Show the module what the optimizer made of `master`, and start the next step's accumulation."""
        if self.master is not self.full:
            self.full.copy_(self.master)
        self.phase, self._fresh = Phase.ACCUMULATING, True

    def tensors(self) -> dict[str, list[Tensor]]:
        """The tensors held now, by kind, each memory counted once."""
        return {
            "parameters": [self.full],
            "masters": [] if self.master is self.full else [self.master],
            "gradients": [self.grad_full] + ([] if self.grad_done is None else [self.grad_done]),
        }
