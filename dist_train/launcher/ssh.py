"""`launch.kind=ssh`: the same command on every host of a hostfile, as one node agent each (`launcher/node.py`).

One ssh per host runs `launcher/remote.py`; it is told over its standard input what to start, and the end of that input is the
end of the job there. So nothing is left on any host, however this process dies.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import ipaddress
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, TextIO

from dist_train.config import check
from dist_train.config.compose import ConfigError
from dist_train.config.schema import Config, LaunchConfig
from dist_train.launcher import remote
from dist_train.launcher.hosts import Host, read_hostfile
from dist_train.launcher.report import LOST, OK, PREEMPTED, exit_code

REACH_SECONDS = 60.0  # in which every host must have answered
SSH_FAILED = 255  # ssh's own exit code, also when the connection breaks
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
AFTER_GRACE_SECONDS = 10.0  # for what a node agent does when its ranks have ended
CLOSING_SECONDS = 10.0  # what ssh itself may need to end
SLACK_SECONDS = 60.0  # beyond the seconds of the config, for agents to end each other before they are told to
_SHOWN_LINES = 20
_POLL_SECONDS = 0.05


def start(config: Config, argv: Sequence[str]) -> int:
    """Run `dist-train train ARGV` on the hosts of `launch.hostfile`; the exit code of the job.

    That is the first failing rank's; 75 when it was stopped and saved; 74 when hosts were lost and no other code is known. Stop
    signals to this process reach all hosts. Raises ConfigError for a hostfile or config that is wrong, before any host is
    asked, and for a host that cannot be reached, by name. Call it from the main thread: it handles signals.
    """
    hosts = read_hostfile(Path(config.launch.hostfile).expanduser())
    slots = slots_of(hosts, config.launch)
    launch = dataclasses.replace(config.launch, nodes=len(hosts), ranks_per_node=slots)
    config = dataclasses.replace(config, launch=launch)
    if slots or config.mesh.dp > 0:  # otherwise the hosts' devices decide, which only they can count
        check.require(config, check.world_size(config, 0))
    return Starter(hosts, launch, agent_argv(argv, len(hosts), slots)).run()


def slots_of(hosts: Sequence[Host], launch: LaunchConfig) -> int:
    """Ranks on each host: what the hostfile says, else `launch.ranks_per_node`. Raises ConfigError where they disagree."""
    if launch.nodes not in (1, len(hosts)):
        rule = f"the hostfile {launch.hostfile} has {len(hosts)} hosts"
        raise ConfigError(f"launch.nodes={launch.nodes}: {rule}; leave launch.nodes out, or correct the file.")
    first = hosts[0]
    for host in hosts[1:]:
        if host.slots != first.slots:
            counts = f"slots={host.slots} and {first.place} slots={first.slots}".replace("slots=None", "no slots")
            told = f"{host.place}: {host.name} has {counts}"
            raise ConfigError(f"{told}; every host starts the same number of ranks: give all lines the same slots=N.")
        if _is_loopback(first.name) and not _is_loopback(host.name):
            told = f"{first.place}: {first.name} is where the ranks of {host.name} would look for rank 0"
            raise ConfigError(f"{told}; write the name by which the other hosts know it.")
    if first.slots and launch.ranks_per_node not in (0, first.slots):
        told = f"launch.ranks_per_node={launch.ranks_per_node}: {first.place} says slots={first.slots}"
        raise ConfigError(f"{told}; leave launch.ranks_per_node out, or correct the file.")
    return first.slots or launch.ranks_per_node


def agent_argv(argv: Sequence[str], nodes: int, ranks_per_node: int) -> list[str]:
    """The program of every host: this command with the size of the job, put where hydra looks for overrides."""
    from hydra._internal.utils import get_args_parser

    size = [f"launch.nodes={nodes}"] + ([f"launch.ranks_per_node={ranks_per_node}"] if ranks_per_node else [])
    overrides = get_args_parser().parse_args(list(argv)).overrides
    end = len(argv) - list(reversed(argv)).index(overrides[-1]) if overrides else len(argv)
    return [sys.executable, "-m", "dist_train.cli.main", "train", *argv[:end], *size, *argv[end:]]


def ssh_argv(ssh_command: Sequence[str], host: Host) -> list[str]:
    """What is run here for a host. The words behind its name are all that the host's login shell sees."""
    words = ["exec", sys.executable, "-I", "-S", str(Path(remote.__file__).resolve())]
    return [*ssh_command, host.login, shlex.join(words)]


def forwarded(env: Mapping[str, str], patterns: Sequence[str]) -> dict[str, str]:
    """The variables whose names match one of these, `NCCL_*` and the like."""
    return {name: value for name, value in env.items() if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)}


class Connection:
    """One ssh. What host 0 says is shown here as it comes, of the others the last lines are kept."""

    def __init__(self, host: Host, command: list[str], shown: bool) -> None:
        self.host, self.command, self.shown = host, command, shown
        self.hello: dict[str, int] | None = None
        self.ended = 0.0  # when its end was noticed
        self._lines: deque[str] = deque(maxlen=_SHOWN_LINES)
        try:
            # A session of its own: a Ctrl-C for the starter must not break the connection over which it is passed on.
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            told = f"launch.ssh_command={list(command[:-2])}: cannot be started ({error.strerror})"
            raise ConfigError(f"{told}; install ssh, or name a program that takes the same arguments.") from error
        assert self._process.stdout is not None and self._process.stderr is not None
        self._readers = [
            threading.Thread(target=self._read, args=(self._process.stdout, sys.stdout), daemon=True),
            threading.Thread(target=self._read, args=(self._process.stderr, sys.stderr), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def status(self) -> int | None:
        """How ssh ended, None while it runs."""
        status = self._process.poll()
        if status is not None and not self.ended:
            self.ended = time.monotonic()
        return status

    def last_lines(self) -> list[str]:
        """The last that was said, once it has ended."""
        for reader in self._readers if self.status is not None else ():
            reader.join(1.0)
        return [line for line in self._lines if line]

    def send(self, message: dict[str, object]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):
            pass  # it has ended, which `status` will say

    def hang_up(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass

    def kill(self) -> None:
        if self.status is None:
            self._process.kill()
            self._process.wait()

    def _read(self, source: IO[bytes], sink: TextIO) -> None:
        for line in source:
            if self.hello is None and line.startswith(remote.HELLO):
                self.hello = json.loads(line[len(remote.HELLO) :])
            elif self.hello is not None and self.shown:
                try:
                    sink.buffer.write(line)
                    sink.flush()
                except OSError:
                    pass  # the terminal or the pipe is gone: the run goes on
            else:
                self._lines.append(line.decode(errors="replace").rstrip())


class Starter:
    """One job on these hosts: reach all, tell all what to start, pass signals on, and see all of them end."""

    def __init__(self, hosts: Sequence[Host], launch: LaunchConfig, argv: Sequence[str]) -> None:
        self._hosts, self._launch, self._argv = hosts, launch, list(argv)
        self._end_seconds = launch.grace_seconds + AFTER_GRACE_SECONDS
        self._connections: list[Connection] = []
        self._signals: deque[int] = deque()  # that came and were not passed on yet

    def run(self) -> int:
        before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
        for number in STOP_SIGNALS:
            if number != signal.SIGHUP or before[number] != signal.SIG_IGN:  # nohup
                signal.signal(number, self._on_signal)
        try:
            for node, host in enumerate(self._hosts):
                self._connections.append(Connection(host, ssh_argv(self._launch.ssh_command, host), shown=node == 0))
            self._reach()
            if self._signals:
                return 128 + self._signals[0]
            self._tell()
            self._watch()
            return self._conclude()
        finally:
            self._close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _reach(self) -> None:
        until = time.monotonic() + REACH_SECONDS
        while waiting := [one for one in self._connections if one.hello is None]:
            if self._signals:
                return
            for one in waiting:
                if one.status is not None:
                    raise _unreachable(one, f"ssh ended with {one.status}")
                if time.monotonic() > until:
                    raise _unreachable(one, f"no answer in {REACH_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)

    def _tell(self) -> None:
        first = self._connections[0]
        assert first.hello is not None
        name = first.host.name
        where = f"[{name}]" if ":" in name else name
        for node, one in enumerate(self._connections):
            place = {
                "DIST_TRAIN_NODES": str(len(self._connections)),
                "DIST_TRAIN_NODE_RANK": str(node),
                "DIST_TRAIN_RENDEZVOUS": f"{where}:{self._launch.port or first.hello['port']}",
            }
            env = forwarded(os.environ, self._launch.forward_env) | place
            job = {"cwd": os.getcwd(), "env": env, "argv": self._argv, "end_seconds": self._end_seconds}
            one.send(job)

    def _watch(self) -> None:
        """Until every ssh has ended. Agents end each other; what does not end in time is asked to, and then cut off."""
        patience = self._launch.lost_seconds + self._launch.grace_seconds + SLACK_SECONDS
        steps = [(patience, Connection.hang_up), (self._end_seconds + CLOSING_SECONDS, Connection.kill)]
        due: float | None = None
        while [one for one in self._connections if one.status is None]:  # (asks each, which notes when it ended)
            while self._signals:
                number = self._signals.popleft()
                for one in self._connections:
                    one.send({"signal": number})
            if due is None and any(one.status not in (None, OK) for one in self._connections):
                due = time.monotonic() + steps[0][0]
            if due is not None and time.monotonic() > due:
                for one in self._connections:
                    steps[0][1](one)
                steps = steps[1:] or steps
                due = time.monotonic() + steps[0][0]
            time.sleep(_POLL_SECONDS)

    def _conclude(self) -> int:
        ended = sorted(self._connections, key=lambda one: one.ended)
        codes = [one.status for one in ended if one.status not in (OK, SSH_FAILED, -signal.SIGKILL)]
        lost = [one for one in ended if one.status in (SSH_FAILED, -signal.SIGKILL)]
        for one in lost:
            why = (one.last_lines() or ["its connection broke"])[-1]
            _say(f"dist-train: host {one.host.name} ({one.host.place}) was lost: {why}")
        code = codes[0] if codes else LOST if lost else OK
        assert code is not None
        if code not in (OK, PREEMPTED):
            told: set[str] = set()  # agents agree on what failed first, and each says it
            for one in [one for one in ended if not one.shown and one not in lost]:
                fresh = [line for line in one.last_lines() if line not in told]
                told.update(fresh)
                for line in fresh:
                    _say(f"[{one.host.name}] {line}")
        return exit_code(code)

    def _close(self) -> None:
        for one in self._connections:
            one.hang_up()
        until = time.monotonic() + CLOSING_SECONDS
        while any(one.status is None for one in self._connections) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
        for one in self._connections:
            one.kill()


def _unreachable(one: Connection, how: str) -> ConfigError:
    said = one.last_lines()
    told = f"{one.host.place}: host {one.host.name} cannot be used: {how}" + (f": {said[-1]}" if said else "")
    return ConfigError(f"{told}; see that `{shlex.join([*one.command[:-1], 'true'])}` works without a question.")


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
