"""The hosts on which the other cluster tests stand."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from tests.cluster.hosts import Hosts


def test_hosts_have_names_and_addresses_reach_each_other_and_can_be_cut_off(two_hosts: Hosts, tmp_path: Path) -> None:
    shown = two_hosts.run(2, ["sh", "-c", 'hostname; getent hosts h1; echo "$1"', "sh", "a  b\n$HOME"])
    assert shown.stdout.split("\n") == ["h2", "10.77.0.1       h1", "a  b", "$HOME", ""], shown
    listening = "import socket; s = socket.create_server(('h1', 5000)); s.accept()[0].sendall(b'hello'); input()"
    server = two_hosts.start(1, ["python3", "-c", f"{listening}"], tmp_path / "server")
    connect = ["python3", "-c", "import socket; print(socket.create_connection(('h1', 5000), 2).recv(9))"]
    until = time.monotonic() + 20
    while (answer := two_hosts.run(2, connect)).returncode != 0:
        assert time.monotonic() < until, answer
    assert answer.stdout == "b'hello'\n"
    two_hosts.link(2, up=False)
    assert two_hosts.run(2, connect).returncode != 0
    two_hosts.link(2, up=True)
    server.wait(20)  # (no input)
    sleeper = two_hosts.start(2, ["sleep", "100"], tmp_path / "sleeper")
    while not two_hosts.processes(2):
        time.sleep(0.05)
    two_hosts.kill(2)
    assert sleeper.wait(10) == -9
    two_hosts.wait_until_gone()
    assert "sw" in subprocess.run(["ip", "netns"], capture_output=True, text=True).stdout
