"""What a process did, read from outside of any engine: bytes sent, memory allocated, Python calls, collectives."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

_BYTES_SENT = 200  # offset in Linux's struct tcp_info (since 4.19): payload, with what was sent again; then how much that was


def bytes_sent() -> int:
    """Bytes that this process has written to the TCP connections it has open, counted by the kernel, each once."""
    total = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(descriptor))) as found:
                if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
                    info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT + 16)
                    sent, again = struct.unpack_from("=QQ", info, _BYTES_SENT)
                    total += sent - again
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return total


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


_mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33
if _mallinfo2 is not None:
    _mallinfo2.restype = _Mallinfo2


def bytes_allocated() -> int | None:
    """Bytes that malloc has given out: on a CPU every tensor, whoever holds it, and hardly anything else of that size."""
    if _mallinfo2 is None:
        return None
    info = _mallinfo2()
    return info.uordblks + info.hblkhd


def calls(function: Callable[[], Any]) -> int:
    """Python and C calls that `function` makes in this thread."""
    found = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


def collectives_and_peak(function: Callable[[], Any]) -> tuple[dict[str, int], int | None]:
    """Collectives that `function` starts, by name, whoever calls them; and the most bytes allocated after any torch operation.

    (Not at every call: where engines make a million of them, asking malloc each time takes minutes.)
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        peak = 0

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            space, _, name = operation._schema.name.partition("::")
            if space in ("c10d", "_c10d_functional") and name not in ("wait_tensor", "recv_"):  # each has a send
                found[name.strip("_")] += 1
            result = operation(*args, **(kwargs or {}))
            self.peak = max(self.peak, bytes_allocated() or 0)
            return result

    found: Counter[str] = Counter()
    with Watching() as watching:
        function()
    return dict(found), watching.peak or None
