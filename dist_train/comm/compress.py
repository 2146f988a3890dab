"""What a reduction or a gather may do to its bytes: how the gradients and weights of one bucket travel.

What a rank sends in a reduce-scatter of Ψ elements over N ranks, in bytes ÷ Ψ(N-1)/N, and what is lost:

    Exact(dtype)    4, or 2 in 16 bits   nothing in fp32; in 16 bits each addend is rounded, on some backends each partial sum
    Bf16Wire        2                    one rounding of each addend to bf16; they add up in fp32
    Int8Blocks      1 + 4/256            up to half a step of its block from each addend
    TopK(fraction)  8 · fraction         nothing in the end: what is not sent now is sent later

An all-reduce sends twice that; that of `TopK` N times it. All add up in fp32 and in rank order (`Exact`: as the backend does), so
every rank has the same bits. A gradient that is not finite arrives as one that is not. A group of size 1 loses nothing and sends
nothing. Tensors may have any strides; nothing has happened to them before `Handle.wait`. The host waits for no device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dist_train.comm.collectives import Collectives, Handle, receiving
from dist_train.mesh.mesh import Group
from dist_train.ops.quantise import int8_decode_, int8_encode, take_largest_
from dist_train.ops.reduce import accumulate_


class Wire(Protocol):
    """How the gradients of one bucket travel, fp32 or 16-bit floats. It may keep state, so each bucket has its own."""

    def reduce_scatter(self, comm: Collectives, out: Tensor, x: Tensor, group: Group) -> Handle:
        """Sum `x` (group.size · n elements) over the group; `out` (n elements) receives this rank's slice."""
        ...

    def all_reduce(self, comm: Collectives, x: Tensor, group: Group) -> Handle:
        """Sum `x` (a multiple of group.size elements) over the group, in place."""
        ...

    def residual(self) -> Tensor | None:
        """What this rank still owes: fp32, as long as the bucket, part of a checkpoint; None where nothing is kept.

        It is always the same tensor, so a restored value is written into it. It carries the factor of the gradients: who
        changes the loss scale multiplies the residual likewise. Its sum over ranks is what counts.
        """
        ...

    def settle(self, skipped: Tensor) -> None:
        """End a step: keep what its reductions did to the residual, or where `skipped` (a scalar on the device) > 0 undo it."""
        ...


class WireRecipe(Protocol):
    """A kind of wire; `bind` makes the one of a bucket of `numel` elements."""

    def bind(self, numel: int, device: torch.device) -> Wire: ...


class WeightWire(Protocol):
    """How weights are gathered. It keeps no state."""

    def all_gather(self, comm: Collectives, out: Tensor, x: Tensor, group: Group) -> Handle:
        """`out` (group.size · n elements) receives every rank's `x` (n elements) in group order, the same bits on every rank.

        `x` may be a slice of `out`, which then takes the values that the others see. Where those are rounded, the weights that
        the optimizer updates must lie elsewhere.
        """
        ...


class _Stateless:
    def residual(self) -> Tensor | None:
        return None

    def settle(self, skipped: Tensor) -> None:
        pass


@dataclass(frozen=True)
class Exact(_Stateless):
    """The backend's own sum, in `dtype`. In bf16 some backends round at every hop."""

    dtype: torch.dtype = torch.float32

    def bind(self, numel: int, device: torch.device) -> Wire:
        return self

    def reduce_scatter(self, comm: Collectives, out: Tensor, x: Tensor, group: Group) -> Handle:
        if group.size == 1 or (x.dtype == self.dtype and out.dtype == self.dtype):
            return comm.reduce_scatter(out, x, group)
        part = torch.empty_like(out, dtype=self.dtype)
        return Handle(comm.reduce_scatter(part, x.to(self.dtype), group), lambda: _write(out, part))

    def all_reduce(self, comm: Collectives, x: Tensor, group: Group) -> Handle:
        if group.size == 1 or x.dtype == self.dtype:
            return comm.all_reduce(x, group)
        cast = x.to(self.dtype)
        return Handle(comm.all_reduce(cast, group), lambda: _write(x, cast))


class _Coded(_Stateless):
    """Slices travel encoded to their owners, who decode and add them in fp32, in rank order.

    An all-reduce then encodes the sums and gathers them; their owner too takes the decoded ones.
    """

    def encode(self, rows: Tensor) -> Tensor:
        """(R, n) floats → (R, m) of the wire's dtype."""
        raise NotImplementedError

    def decode(self, coded: Tensor, out: Tensor, add: bool = False) -> None:
        """(R, m) of the wire's dtype → `out` (R, n) floats, contiguous; with `add` they are added to it."""
        raise NotImplementedError

    def bind(self, numel: int, device: torch.device) -> Wire:
        return self

    def reduce_scatter(self, comm: Collectives, out: Tensor, x: Tensor, group: Group) -> Handle:
        if group.size == 1:
            return comm.reduce_scatter(out, x, group)
        received, handle = self._exchange(comm, x, group)
        return Handle(handle, lambda: _write(out, self._sum(received, out.numel())))

    def all_reduce(self, comm: Collectives, x: Tensor, group: Group) -> Handle:
        if group.size == 1:
            return comm.all_reduce(x, group)
        received, handle = self._exchange(comm, x, group)
        return Handle(handle, lambda: self.gather(comm, x, self._sum(received, x.numel() // group.size), group))

    def gather(self, comm: Collectives, out: Tensor, x: Tensor, group: Group) -> Handle:
        """Every rank's `x` (n elements), encoded and decoded, into `out` (group.size · n elements) on all of them."""
        coded = self.encode(x.reshape(1, -1))
        gathered = coded.new_empty(group.size, coded.shape[1])

        def finish() -> None:
            target, back = receiving(out)
            self.decode(gathered, target.view(group.size, -1))
            if back is not None:
                back()

        return Handle(comm.all_gather(gathered, coded, group), finish)

    def _exchange(self, comm: Collectives, x: Tensor, group: Group) -> tuple[Tensor, Handle]:
        coded = self.encode(_slices(x, group))
        received = torch.empty_like(coded)
        return received, comm.all_to_all(received, coded, group)

    def _sum(self, received: Tensor, n: int) -> Tensor:
        total = received.new_empty(1, n, dtype=torch.float32)
        self.decode(received[:1], total)
        for coded in received[1:].split(1):
            self.decode(coded, total, add=True)
        return total


@dataclass(frozen=True)
class Bf16Wire(_Coded):
    """bf16 on the wire, fp32 in the sum: half the bytes for one rounding of each addend, however many ranks there are.

    A rounding moves a value by at most 2⁻⁸ of itself. An all-reduce rounds the sum once more.
    """

    fused: bool = True

    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(torch.bfloat16)

    def decode(self, coded: Tensor, out: Tensor, add: bool = False) -> None:
        if add:
            accumulate_([out], [coded], self.fused)
        else:
            out.copy_(coded)


@dataclass(frozen=True)
class Int8Blocks(_Coded):
    """Symmetric int8 in blocks of neighbours, each with an fp32 scale: ZeRO++ qgZ (arXiv:2306.10209), in one hop.

    scale = largest magnitude of the block ÷ 127; code = x ÷ scale to the nearest, ties to even: an element moves by at most
    scale ÷ 2. An all-reduce encodes the sums once more. A block of zeros has scale 0. A block with a value that is not finite
    decodes to nothing finite. A row on the wire is the bytes of its ⌈n ÷ block⌉ scales, then its n codes.
    """

    block: int = 256
    fused: bool = True

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block={self.block}: a block has at least one element; set 256.")

    def encode(self, rows: Tensor) -> Tensor:
        return int8_encode(rows, self.block, self.fused)

    def decode(self, coded: Tensor, out: Tensor, add: bool = False) -> None:
        int8_decode_(coded, out, self.block, add, self.fused)


@dataclass(frozen=True)
class TopK:
    """Each rank sends the largest of what it owes, and owes the rest: sparse gradients with error feedback.

    (Deep Gradient Compression, arXiv:1712.01887, without its momentum correction; Sparsified SGD with Memory, arXiv:1809.07599.)
    From each destination's slice go the `fraction`, one at least, with the largest magnitude of gradient + residual: fp32 values
    and int32 places. What stays becomes the residual. A value that is not finite counts as the largest, so it goes at once, and
    the step that is skipped for it leaves the residual as it was. A rank alone sends everything, also a residual that came
    with a checkpoint. Memory: 4 bytes an element, and as many again between a reduction and `settle`.
    What waited arrives at once: with momentum a small fraction needs a lower learning rate, or diverges.
    """

    fraction: float = 0.01
    fused: bool = True

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ValueError(f"fraction={self.fraction}: is the part of the gradient that is sent; set it above 0 and at most 1.")

    def bind(self, numel: int, device: torch.device) -> Wire:
        return _SparseWire(self.fraction, numel, device, self.fused)


class _SparseWire:
    def __init__(self, fraction: float, numel: int, device: torch.device, fused: bool) -> None:
        self._fraction, self._fused = fraction, fused
        self._residual = torch.zeros(numel, dtype=torch.float32, device=device)
        self._pending: Tensor | None = None  # the residual as the running step leaves it

    def residual(self) -> Tensor | None:
        return self._residual

    def settle(self, skipped: Tensor) -> None:
        if self._pending is not None:
            self._residual.copy_(torch.where(skipped > 0, self._residual, self._pending))
            self._pending = None

    def reduce_scatter(self, comm: Collectives, out: Tensor, x: Tensor, group: Group) -> Handle:
        if group.size == 1:
            return self._send_all(out, x)
        sent = self._largest(x, group)
        received = torch.empty_like(sent)
        by_rank = received[:, None]
        return Handle(comm.all_to_all(received, sent, group), lambda: _write(out, _sum_sparse(by_rank, out.numel())))

    def all_reduce(self, comm: Collectives, x: Tensor, group: Group) -> Handle:
        if group.size == 1:
            return self._send_all(x, x)
        sent = self._largest(x, group)
        received = sent.new_empty(group.size**2, *sent.shape[1:])
        by_rank = received.view(group.size, *sent.shape)
        return Handle(comm.all_gather(received, sent, group), lambda: _write(x, _sum_sparse(by_rank, x.numel() // group.size)))

    def _owe(self, x: Tensor) -> Tensor:
        """Residual + x, in memory that becomes the pending residual."""
        if self._pending is None:
            self._pending = self._residual + x.reshape(-1)
        else:
            self._pending += x.reshape(-1)
        return self._pending

    def _largest(self, x: Tensor, group: Group) -> Tensor:
        """Take the largest of each slice from what is owed: (N, 2, k) int32, the bits of k fp32 values and their places."""
        owed = _slices(self._owe(x), group)
        count = min(owed.shape[1], max(1, round(self._fraction * owed.shape[1])))
        return take_largest_(owed, count, self._fused)  # (not owed - sent, which is NaN where that was not finite)

    def _send_all(self, out: Tensor, x: Tensor) -> Handle:
        whole = self._owe(x)
        self._pending = torch.zeros_like(whole)
        return Handle(then=lambda: _write(out, whole))


@dataclass(frozen=True)
class ExactWeights:
    """Weights travel as they are."""

    def all_gather(self, comm: Collectives, out: Tensor, x: Tensor, group: Group) -> Handle:
        return comm.all_gather(out, x, group)


@dataclass(frozen=True)
class Int8Weights:
    """Weights travel as `Int8Blocks` (ZeRO++ qwZ, arXiv:2306.10209); their owner too sees what the others see."""

    block: int = 256
    fused: bool = True

    def __post_init__(self) -> None:
        Int8Blocks(self.block)

    def all_gather(self, comm: Collectives, out: Tensor, x: Tensor, group: Group) -> Handle:
        if group.size == 1:
            return comm.all_gather(out, x, group)
        return Int8Blocks(self.block, self.fused).gather(comm, out, x, group)


def _slices(x: Tensor, group: Group) -> Tensor:
    """(N, n): the slices of `x` by the rank that owns them; a view where `x` is contiguous."""
    if x.numel() % group.size:
        raise ValueError(f"{x.numel()} elements: not a multiple of the {group.size} ranks that reduce them; pad to a multiple.")
    return x.reshape(group.size, -1)


def _sum_sparse(received: Tensor, n: int) -> Tensor:
    """(ranks, slices, 2, k) as `_largest` makes them → their sum, fp32 (slices · n).

    One rank names no element twice, so adding rank by rank gives each element its addends in rank order on every device.
    """
    slices = received.shape[1]
    starts = n * torch.arange(slices, device=received.device)[:, None]
    total = received.new_zeros(slices * n, dtype=torch.float32)
    for values, places in ((sent[:, 0].view(torch.float32), sent[:, 1]) for sent in received):
        total.index_add_(0, (places + starts).flatten(), values.flatten())
    return total


def _write(target: Tensor, flat: Tensor) -> None:
    target.copy_(flat.view(target.shape))
