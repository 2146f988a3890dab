"""Interfaces, names and ports: which way gloo and NCCL would go to another host, and what to set where that is the wrong one."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dist_train.launcher.checkup.check import BAD, OK, WARN, Check

_SIOCGIFCONF, _SIOCGIFFLAGS = 0x8912, 0x8913
_IFF_UP, _IFF_LOOPBACK, _IFF_RUNNING = 0x1, 0x8, 0x40
VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "podman", "lxc")  # bridges inside this machine
MEETING_PORTS = (20000, 31999)  # where ranks of srun and mpirun meet (environment.py)


@dataclass(frozen=True)
class Interface:
    name: str
    address: str  # IPv4
    up: bool = True
    loopback: bool = False

    @property
    def reaches_others(self) -> bool:
        return self.up and not self.loopback and not self.name.startswith(VIRTUAL)


def interfaces() -> list[Interface]:
    """Every IPv4 address of this host, in the kernel's order."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        space = array.array("B", bytes(64 * 1024))
        request = struct.pack("iL", len(space), space.buffer_info()[0])
        (length,) = struct.unpack("iL", fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, request))[:1]
        found = []
        for at in range(0, length, 40):  # struct ifreq
            entry = space[at : at + 40].tobytes()
            name, address = entry[:16].split(b"\0", 1)[0].decode(), socket.inet_ntoa(entry[20:24])
            asked = struct.pack("16sH22x", name.split(":")[0].encode(), 0)
            (flags,) = struct.unpack("16xH22x", fcntl.ioctl(any_socket.fileno(), _SIOCGIFFLAGS, asked))
            up = flags & _IFF_UP != 0 and flags & _IFF_RUNNING != 0
            found.append(Interface(name, address, up, flags & _IFF_LOOPBACK != 0))
    return found


def gloo_takes(found: list[Interface], host_addresses: list[str], env: Mapping[str, str]) -> Interface | None:
    """The interface that gloo binds: the named one, else that of the host's own name, else loopback."""
    wanted = env.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if wanted:
        return next((each for each in found if each.name == wanted), None)
    for address in host_addresses:
        for each in found:
            if each.address == address or (each.loopback and address.startswith("127.")):
                return each
    return next((each for each in found if each.loopback), None)


def nccl_takes(found: list[Interface], env: Mapping[str, str]) -> Interface | None:
    """The interface of NCCL's sockets: by NCCL_SOCKET_IFNAME (prefixes; = exact, ^ not), else ib*, others, docker*, loopback."""
    rule = env.get("NCCL_SOCKET_IFNAME", "")
    up = [each for each in found if each.up]
    if rule:
        names = rule.lstrip("^=").split(",")
        exact, refused = "=" in rule[:2], rule.startswith("^")
        matching = [each for each in up if any(each.name == n if exact else each.name.startswith(n) for n in names)]
        return next((each for each in up if (each in matching) != refused), None)
    kinds = (
        [each for each in up if each.name.startswith("ib")],
        [each for each in up if not each.loopback and not each.name.startswith("docker")],
        [each for each in up if each.name.startswith("docker")],
        up,
    )
    return next((each for kind in kinds for each in kind), None)


def leads_to(peer: str, found: list[Interface]) -> Interface | None:
    """The interface by which the kernel would send to `peer` (a name or address); None where there is no way or no such name."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))  # sends nothing
            address = probe.getsockname()[0]
    except OSError:
        return None
    return next((each for each in found if each.address == address or (each.loopback and address.startswith("127."))), None)


def addresses_of(name: str) -> list[str]:
    """IPv4 addresses of a host name, in the resolver's order; empty when it has none."""
    try:
        entries = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))


def network(peer: str = "", env: Mapping[str, str] = os.environ) -> list[Check]:
    """Everything of this file; `peer`: a host of the same job, "" where there is none."""
    found, own = interfaces(), addresses_of(socket.gethostname())
    way = leads_to(peer, found) if peer else None
    taken = {"gloo": gloo_takes(found, own, env), "NCCL": nccl_takes(found, env)}
    listed = ", ".join(f"{each.name} {each.address}{'' if each.up else ' (down)'}" for each in found)
    return [
        Check("interfaces", OK if found else BAD, listed or "none", "" if found else "bring one up: ip link set lo up"),
        *(interface_choice(library, taken[library], way, found, peer) for library in taken),
        own_name(socket.gethostname(), own, bool(peer), env),
        *ports(),
    ]


def interface_choice(library: str, takes: Interface | None, way: Interface | None, found: list[Interface], peer: str) -> Check:
    """`way`: the interface that leads to the peer, None without a peer or a way to it."""
    name, variable = f"{library} goes by", f"{library.upper()}_SOCKET_IFNAME"
    others = [each for each in found if each.reaches_others]
    better = way or (others[0] if others else None)
    export = f"export {variable}={better.name} on every host" if better and better is not takes else ""
    if takes is None:
        return Check(name, BAD, f"nothing: {variable} names no interface that is up", export or f"unset {variable}")
    value = f"{takes.name} {takes.address}"
    if peer and way is None:
        remedy = f"see whether the name and the route are right: getent hosts {peer}; ip route get {peer}"
        return Check(name, BAD, f"{value}; no way to {peer}", remedy)
    if way is not None:
        value += f"; to {peer} leads {way.name}"
        if takes.loopback and not way.loopback:
            return Check(name, BAD, f"{value}: others cannot reach it", export)
        return Check(name, OK if takes.name == way.name or way.loopback else WARN, value, export)
    if others and takes not in others:
        kind = "loopback" if takes.loopback else "a bridge inside this machine"
        return Check(name, WARN, f"{value}, {kind}: enough for one host", f"for several hosts {export}")
    return Check(name, OK, value)


def own_name(host: str, addresses: list[str], needed: bool, env: Mapping[str, str]) -> Check:
    """Whether others could be told this name, and gloo bind it. `needed`: there are other hosts."""
    value = f"{host} is {', '.join(addresses) or 'not known to the resolver'}"
    outside = [each for each in addresses if not ipaddress.ip_address(each).is_loopback]
    if outside:
        return Check("own name", OK, value)
    remedy = f"give {host} its address in /etc/hosts or DNS"
    state = BAD if needed and not env.get("GLOO_SOCKET_IFNAME") else WARN
    return Check("own name", state, value, remedy if needed else f"for several hosts {remedy}, or set GLOO_SOCKET_IFNAME")


def ports() -> list[Check]:
    low, high = _range(Path("/proc/sys/net/ipv4/ip_local_port_range"))
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
            trial.bind(("", 0))
    except OSError as error:
        remedy = "end what holds them (ss -tan), or widen net.ipv4.ip_local_port_range"
        return [Check("free ports", BAD, f"none: {error.strerror}", remedy)]
    return [port_range(low, high, _used(low, high))]


def port_range(low: int, high: int, used: int) -> Check:
    value = f"{low}-{high} are handed out, {used} of them in use"
    if used > (high - low + 1) / 2:
        return Check("free ports", WARN, value, "groups of many ranks need thousands: see who holds them with ss -tan")
    if low <= MEETING_PORTS[1]:
        rule = f"ranks under srun and mpirun meet at a port of {MEETING_PORTS[0]}-{MEETING_PORTS[1]}, which may be taken then"
        return Check("free ports", WARN, value, f'{rule}: sysctl net.ipv4.ip_local_port_range="32768 60999", or set MASTER_PORT')
    return Check("free ports", OK, value)


def _range(path: Path) -> tuple[int, int]:
    try:
        low, high = map(int, path.read_text().split())
    except (OSError, ValueError):
        return 32768, 60999  # Linux's own
    return low, high


def _used(low: int, high: int) -> int:
    """Local ports in this range that a TCP socket holds."""
    held = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        held |= {int(row.split()[1].rpartition(":")[2], 16) for row in rows}
    return sum(low <= port <= high for port in held)
