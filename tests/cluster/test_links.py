"""Two node agents on two hosts and a cable between them that is pulled: for six seconds, and for ever."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import DIST_TRAIN, TOY
from tests.cluster.hosts import Hosts

DOWN_SECONDS = 6.0
TIMEOUT_SECONDS, LOST_SECONDS, GRACE_SECONDS = 15, 20, 5


def start(hosts: Hosts, folder: Path, *overrides: str) -> list[subprocess.Popen[bytes]]:
    """The same command on both hosts, one rank each."""
    command = [*DIST_TRAIN, "train", *TOY, "launch.nodes=2", "mesh.dp=2", "run.dir=run", *overrides]
    return [
        hosts.start(
            number, command, folder / f"output{number}", cwd=folder,
            env={"DIST_TRAIN_NODES": "2", "DIST_TRAIN_NODE_RANK": str(number - 1), "DIST_TRAIN_RENDEZVOUS": "h1:29400"},
        )
        for number in (1, 2)
    ]  # fmt: skip


def said(folder: Path) -> str:
    return "".join(f"--- h{number}\n{(folder / f'output{number}').read_text(errors='replace')}" for number in (1, 2))


def losses(folder: Path) -> dict[int, float]:
    file = folder / "run" / "metrics.jsonl"
    return {row["step"]: row["loss"] for row in map(json.loads, file.read_text().splitlines() if file.exists() else [])}


def wait_for_step(folder: Path, step: int, processes: list[subprocess.Popen[bytes]], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while max(losses(folder), default=0) < step:
        assert all(process.poll() is None for process in processes) and time.monotonic() < until, said(folder)
        time.sleep(0.05)


def test_a_link_that_is_down_for_six_seconds_changes_nothing(two_hosts: Hosts, tmp_path: Path, cache: str) -> None:
    steps = 400
    processes = start(two_hosts, tmp_path, cache, f"train.steps={steps}", f"launch.lost_seconds={LOST_SECONDS}")
    wait_for_step(tmp_path, 3, processes)
    two_hosts.link(2, up=False)
    time.sleep(DOWN_SECONDS)
    assert max(losses(tmp_path)) < steps  # it was in the middle
    two_hosts.link(2, up=True)
    assert [process.wait(150) for process in processes] == [0, 0], said(tmp_path)
    with_a_cut = losses(tmp_path)
    (tmp_path / "run").rename(tmp_path / "cut")
    short = [*DIST_TRAIN, "train", *TOY, cache, f"train.steps={steps}", "run.dir=run"]
    alone = two_hosts.run(1, short, 150, cwd=tmp_path)
    assert alone.returncode == 0, alone
    assert len(with_a_cut) == steps and with_a_cut == pytest.approx(losses(tmp_path), rel=1e-4)
    two_hosts.wait_until_gone()


def test_a_link_that_stays_down_ends_both_sides_in_bounded_time_and_they_say_why(
    two_hosts: Hosts, tmp_path: Path, cache: str
) -> None:
    limits = {"timeout_seconds": TIMEOUT_SECONDS, "lost_seconds": LOST_SECONDS, "grace_seconds": GRACE_SECONDS}
    processes = start(two_hosts, tmp_path, cache, "train.steps=1000000", *(f"launch.{key}={n}" for key, n in limits.items()))
    wait_for_step(tmp_path, 3, processes)
    two_hosts.link(2, up=False)
    cut = time.monotonic()
    codes = [process.wait(150) for process in processes]
    # (the last minute is what `Peers` gives an agent that cannot end by itself)
    assert time.monotonic() - cut < TIMEOUT_SECONDS + LOST_SECONDS + GRACE_SECONDS + 60 + 15
    assert all(code not in (0, 2, 75) for code in codes), f"{codes}\n{said(tmp_path)}"
    for number in (1, 2):
        words = (tmp_path / f"output{number}").read_text(errors="replace")
        assert "was lost" in words or "imed out" in words or "timeout" in words, said(tmp_path)
    two_hosts.wait_until_gone()
