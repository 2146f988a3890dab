"""Two hosts on one machine, joined by a link of a given rate: two network namespaces and a pair of veth devices.

The namespaces have no name. Each belongs to the rank that stepped into it and goes, with its end of the cable, when that rank
ends, however it ends: there is nothing to clean up and nothing to collide with. Needs root and Debian's iproute2.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess

DEVICE = "eth0"
_CLONE_NEWNET = 0x40000000


def missing() -> str:
    """What keeps this machine from having links; empty when nothing does."""
    programs = [name for name in ("ip", "tc", "unshare") if shutil.which(name) is None]
    if programs:
        return f"--link needs {', '.join(programs)}: install iproute2 and util-linux."
    trial = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", *_shape(100).split()]
    done = subprocess.run(trial, capture_output=True, text=True)
    if done.returncode:
        return f"--link makes network namespaces and shapes traffic in them: run it as root. ({done.stderr.strip()})"
    return ""


def step_aside() -> None:
    """Move this thread, and those that it starts from now on, into a network namespace of its own."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace of its own for this rank")


def lay_cable(one: int, other: int) -> None:
    """Join the namespaces of two processes that have stepped aside."""
    _run(f"ip link add {DEVICE} netns {one} type veth peer name {DEVICE} netns {other}")


def plug_in(host: int, rate_mbit: float) -> None:
    """In its namespace: give this host (0 or 1) an address on the cable, and what it sends the rate."""
    _run("ip link set lo up")
    _run(f"ip addr add 10.77.0.{host + 1}/24 dev {DEVICE}")
    _run(f"ip link set {DEVICE} up")
    _run(f"tc qdisc add dev {DEVICE} root {_shape(rate_mbit)}")
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE


def _shape(rate_mbit: float) -> str:
    return f"tbf rate {rate_mbit}mbit burst 256k latency 100ms"


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"{command}: {done.stderr.strip()}")
