"""Hosts h1..hN (10.77.0.1..N) as network namespaces on a bridge, each with its own hostname; they share files and processes.

    with hosts(2) as up:
        up.run(1, ["hostname"])          # h1
        up.link(2, up=False)             # h2 can be reached no more

Needs root and Debian's iproute2 and util-linux. Only one such network exists at a time: a lock says whose turn it is.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

NAMES, SWITCH, BRIDGE = "/run/netns", "sw", "br77"
MARK = "DIST_TRAIN_TEST_HOSTS"  # in the environment of everything that runs on the hosts
_ETC = Path("/etc/netns")
_LOCK = "/tmp/dist_train_hosts.lock"
_ENTER = 'h=$0; hostname "$h"; for f in hosts nsswitch.conf; do mount --bind "/etc/netns/$h/$f" "/etc/$f"; done; exec "$@"'


class Hosts:
    """The hosts of one test. Numbers are from 1, as in their names."""

    def __init__(self, count: int) -> None:
        self.count, self.mark = count, uuid.uuid4().hex
        self.names = [f"h{number}" for number in range(1, count + 1)]

    def inside(self, number: int, argv: list[str]) -> list[str]:
        """The command that runs `argv`, byte for byte, on host `number`; /sys stays as it is (`ip netns exec` changes it)."""
        name = f"h{number}"
        return ["nsenter", f"--net={NAMES}/{name}", "unshare", "--uts", "--mount", "sh", "-c", _ENTER, name, *argv]

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """What programs on a host should find: no launcher's variables of the test's own surroundings, and the mark."""
        ours = ("SLURM", "OMPI", "PMI", "RANK", "WORLD", "LOCAL", "MASTER", "DIST_TRAIN")
        env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        return {**env, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: self.mark, **(more or {})}

    def run(
        self, number: int, argv: list[str], seconds: float = 60.0, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run to the end; code, output and errors. What runs longer is killed and raises TimeoutExpired."""
        return subprocess.run(
            self.inside(number, argv), env=self.environment(env), cwd=cwd, timeout=seconds, capture_output=True, text=True,
            errors="replace", stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def start(
        self, number: int, argv: list[str], output: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.Popen[bytes]:
        """Start in the background, output and errors into a file."""
        with output.open("wb") as file:
            return subprocess.Popen(
                self.inside(number, argv), env=self.environment(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def link(self, number: int, up: bool) -> None:
        """Plug the cable of this host in, or out of the switch: nothing is refused or reset, packets are just gone."""
        _ip("-n", SWITCH, "link", "set", f"e{number}", "up" if up else "down")

    def processes(self, number: int | None = None) -> list[int]:
        """Living processes that these tests started: on host `number`, else on any."""
        inode = None if number is None else os.stat(f"{NAMES}/h{number}").st_ino
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"{MARK}={self.mark}".encode() in (folder / "environ").read_bytes().split(b"\0")
                if marked and (inode is None or os.stat(folder / "ns" / "net").st_ino == inode):
                    if (folder / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                        found.append(int(folder.name))
            except OSError:
                continue
        return found

    def kill(self, number: int | None = None, sig: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to everything that was started on host `number`, else on all hosts."""
        for pid in self.processes(number):
            try:
                os.kill(pid, sig)
            except ProcessLookupError:
                pass

    def wait_until_gone(self, seconds: float = 20.0, number: int | None = None) -> None:
        """No process is left, or AssertionError names what is."""
        until = time.monotonic() + seconds
        while left := self.processes(number):
            assert time.monotonic() < until, f"still there after {seconds} s: {[_command(pid) for pid in left]}"
            time.sleep(0.1)


@contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Bring up `count` hosts; at the end everything on them is killed and they are taken down, also what a killed run left."""
    with open(_LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.set_inheritable(lock.fileno(), False)
        _down()
        up = Hosts(count)
        try:
            _up(up)
            yield up
        finally:
            for _ in range(3):  # a process may have been starting another
                up.kill()
                time.sleep(0.05)
            _down()


def _up(up: Hosts) -> None:
    _ip("netns", "add", SWITCH)
    _ip("-n", SWITCH, "link", "set", "lo", "up")
    _ip("-n", SWITCH, "link", "add", BRIDGE, "type", "bridge")
    _ip("-n", SWITCH, "link", "set", BRIDGE, "up")
    table = "127.0.0.1 localhost\n" + "".join(f"10.77.0.{number} {name}\n" for number, name in enumerate(up.names, 1))
    for number, name in enumerate(up.names, 1):
        _ip("netns", "add", name)
        _ip("link", "add", f"e{number}", "netns", SWITCH, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("-n", SWITCH, "link", "set", f"e{number}", "master", BRIDGE, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        _ip("-n", name, "link", "set", "eth0", "up")
        (_ETC / name).mkdir(parents=True, exist_ok=True)
        (_ETC / name / "hosts").write_text(table)
        (_ETC / name / "nsswitch.conf").write_text("hosts: files\npasswd: files\ngroup: files\nshadow: files\n")


def _down() -> None:
    """Every host there is, ours or of a run that was killed, with the processes in it."""
    for name in [path.name for path in Path(NAMES).glob("*")] if Path(NAMES).is_dir() else []:
        if name == SWITCH or (name[:1] == "h" and name[1:].isdigit()):
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
            for pid in found:
                try:
                    os.kill(int(pid), signal.SIGKILL)
                except ProcessLookupError:
                    pass
            _ip("netns", "del", name)
            shutil.rmtree(_ETC / name, ignore_errors=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stdout=sys.stderr, timeout=30)


def _command(pid: int) -> str:
    try:
        return f"{pid} {Path(f'/proc/{pid}/cmdline').read_bytes().replace(bytes(1), b' ').decode(errors='replace')[:200]}"
    except OSError:
        return f"{pid} (gone)"
