"""launch.kind=ssh over two hosts with a real sshd on each: the same training as on one host, and every way to end it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import DIST_TRAIN, TOY
from tests.cluster.hosts import MARK, Hosts

LONG = "train.steps=1000000"


class Site:
    """Two hosts that can be reached by ssh from the first, and a folder that both see."""

    def __init__(self, hosts: Hosts, folder: Path, cache: str) -> None:
        self.hosts, self.folder = hosts, folder
        over_ssh = ["launch.kind=ssh", "launch.hostfile=hosts", f"launch.ssh_command=[ssh,-F,{folder}/ssh]"]
        self.command = [*DIST_TRAIN, "train", *TOY, cache, *over_ssh, "run.dir=run", "launch.lost_seconds=10"]
        self._sshd()

    def _sshd(self) -> None:
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{self.folder}/{name}"], check=True)
        os.makedirs("/run/sshd", exist_ok=True)
        (self.folder / "sshd").write_text(
            f"HostKey {self.folder}/host\nAuthorizedKeysFile {self.folder}/user.pub\nStrictModes no\nUsePAM no\nPidFile none\n"
            f"PermitRootLogin prohibit-password\nSetEnv {MARK}={self.hosts.mark}\n"
        )
        (self.folder / "ssh").write_text(
            f"IdentityFile {self.folder}/user\nUserKnownHostsFile /dev/null\nStrictHostKeyChecking no\nLogLevel ERROR\n"
            "BatchMode yes\nConnectTimeout 10\nServerAliveInterval 3\nServerAliveCountMax 3\n"
        )
        for number in (1, 2):
            self.hosts.start(
                number, [str(shutil.which("sshd")), "-D", "-e", "-f", f"{self.folder}/sshd"], self.folder / f"sshd{number}"
            )
            ready = ["ssh", "-F", f"{self.folder}/ssh", f"h{number}", "true"]
            until = time.monotonic() + 20
            while (found := self.hosts.run(1, ready)).returncode != 0:
                assert time.monotonic() < until, found
                time.sleep(0.1)
        self.before = set(self.hosts.processes())

    def start(self, steps: str, ranks: int = 1) -> subprocess.Popen[bytes]:
        """With so many ranks on each host."""
        (self.folder / "hosts").write_text(f"h1 slots={ranks}\nroot@h2 slots={ranks}  # the second\n")
        return self.hosts.start(1, [*self.command, steps, f"mesh.dp={2 * ranks}"], self.folder / "output", cwd=self.folder)

    def said(self) -> str:
        return (self.folder / "output").read_text(errors="replace")

    def losses(self) -> dict[int, float]:
        file = self.folder / "run" / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return {row["step"]: row["loss"] for row in map(json.loads, lines)}

    def wait_for_step(self, step: int, process: subprocess.Popen[bytes], seconds: float = 120) -> None:
        until = time.monotonic() + seconds
        while max(self.losses(), default=0) < step:
            assert process.poll() is None and time.monotonic() < until, self.said()
            time.sleep(0.1)

    def starter(self, process: subprocess.Popen[bytes]) -> int:
        """`process` is what entered the host; it has become the starter by exec, as far as shells do that."""
        assert b"dist_train.cli.main" in Path(f"/proc/{process.pid}/cmdline").read_bytes()
        return process.pid

    def wait_until_gone(self, seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while left := set(self.hosts.processes()) - self.before:
            told = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left if Path(f"/proc/{pid}").exists()]
            assert time.monotonic() < until, f"{told}\n{self.said()}"
            time.sleep(0.2)


@pytest.fixture
def site(two_hosts: Hosts, tmp_path: Path, cache: str) -> Iterator[Site]:
    yield Site(two_hosts, tmp_path, cache)


def test_two_hosts_of_two_ranks_have_the_losses_of_one_process(site: Site, cache: str) -> None:
    process = site.start("train.steps=6", ranks=2)
    assert process.wait(180) == 0, site.said()
    assert f"finished: {site.folder}/run" in site.said()
    logs = sorted(path.name for path in (site.folder / "run" / "logs").iterdir())
    assert logs == [f"rank_0000{rank}.log" for rank in range(4)]
    site.wait_until_gone(20)
    over_ssh = site.losses()
    shutil.rmtree(site.folder / "run")
    alone = site.hosts.run(1, [*DIST_TRAIN, "train", *TOY, cache, "train.steps=6", "run.dir=run"], 120, cwd=site.folder)
    assert alone.returncode == 0, alone
    assert over_ssh == pytest.approx(site.losses(), rel=1e-5) and len(over_ssh) == 6


def test_F33_a_signal_to_the_starter_saves_and_a_resumed_starter_that_is_killed_leaves_no_orphans(site: Site) -> None:
    process = site.start(LONG)
    site.wait_for_step(3, process)
    os.kill(site.starter(process), signal.SIGUSR1)
    assert process.wait(90) == 75, site.said()
    assert "stopped after saving" in site.said()
    site.wait_until_gone(20)
    saved = max(int(path.name.removeprefix("step_")) for path in (site.folder / "run" / "checkpoints").glob("step_*"))
    process = site.start(LONG)
    site.wait_for_step(saved + 2, process)
    os.kill(site.starter(process), signal.SIGKILL)
    process.wait(10)
    site.wait_until_gone(60)


def test_F32_a_host_that_dies_ends_the_job_and_is_named(site: Site) -> None:
    process = site.start(LONG)
    site.wait_for_step(3, process)
    site.hosts.kill(2)
    assert process.wait(120) not in (0, 2, 75), site.said()
    assert "h2" in site.said() and "was lost" in site.said()
    site.wait_until_gone(20)


def test_a_host_that_is_not_there_is_named(site: Site) -> None:
    site.hosts.link(2, up=False)
    process = site.start("train.steps=2")
    assert process.wait(90) == 2, site.said()
    assert "hosts:2: host h2 cannot be used: ssh ended with 255" in site.said()
    site.wait_until_gone(20)
