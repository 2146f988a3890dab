"""Stopping: every signal to the launcher reaches the ranks as SIGTERM, they save, and nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dist_train.launcher import guard
from tests.launcher.jobs import job, script

SAVES = """
import os, signal, subprocess, sys, time
def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1.0)
    print("saved")
    sys.exit({code})
signal.signal(signal.SIGTERM, save)
child = "import time, signal; signal.signal(15, signal.SIG_IGN); print('child', flush=True); time.sleep(100)"
subprocess.Popen([sys.executable, "-c", child])
print("ready", os.getpid(), flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_F32_F33_ranks_save_on_a_signal_to_the_launcher_which_ends_with_75(tmp_path: Path, name: str) -> None:
    with job(tmp_path, "launch", "--ranks", "2", script(tmp_path, SAVES.format(code=75))) as running:
        running.wait_for("ready", 2)
        running.wait_for("child", 2)
        running.process.send_signal(getattr(signal, name))
        assert running.wait(15) == 75
        assert running.text().count("saved") == 2
        running.wait_until_gone(1)


def test_F37_a_second_signal_while_ranks_save_changes_nothing(tmp_path: Path) -> None:
    with job(tmp_path, "launch", "--ranks", "2", script(tmp_path, SAVES.format(code=75))) as running:
        running.wait_for("ready", 2)
        running.process.terminate()
        time.sleep(0.4)
        running.process.terminate()
        assert running.wait(15) == 75
        assert running.text().count("saved") == 2


def test_F33_ranks_that_end_with_0_when_told_to_stop_are_no_success(tmp_path: Path) -> None:
    with job(tmp_path, "launch", "--ranks", "2", script(tmp_path, SAVES.format(code=0))) as running:
        running.wait_for("ready", 2)
        running.process.terminate()
        assert running.wait(15) == 143
        assert "stopped by SIGTERM" in running.text()


def test_F33_one_rank_alone_is_told_to_stop_and_the_job_ends_with_75(tmp_path: Path) -> None:
    with job(tmp_path, "launch", "--ranks", "2", script(tmp_path, SAVES.format(code=75))) as running:
        running.wait_for("ready", 2)
        line = next(line for line in running.text().splitlines() if line.startswith("[rank 1] ready"))
        os.kill(int(line.split()[-1]), signal.SIGTERM)
        assert running.wait(15) == 75
        assert running.text().count("saved") == 2


def test_F32_ranks_that_do_not_listen_are_killed_after_the_grace(tmp_path: Path) -> None:
    text = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    with job(tmp_path, "launch", "--ranks", "2", "--grace", "1", script(tmp_path, text)) as running:
        running.wait_for("ready", 2)
        running.process.send_signal(signal.SIGINT)
        assert running.wait(10) == 130
        running.wait_until_gone(1)


def test_F32_a_second_interrupt_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    text = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"
    with job(tmp_path, "launch", "--ranks", "2", "--grace", "40", script(tmp_path, text)) as running:
        running.wait_for("ready", 2)
        running.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        running.process.send_signal(signal.SIGINT)
        assert running.wait(10) == 130


def test_F32_nothing_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    with job(tmp_path, "launch", "--ranks", "2", script(tmp_path, SAVES.format(code=75))) as running:
        running.wait_for("ready", 2)
        running.wait_for("child", 2)
        running.process.kill()
        assert running.wait(5) == -signal.SIGKILL
        running.wait_until_gone(10)
        assert "saved" not in running.text()


def test_F32_a_rank_whose_launcher_died_before_it_began_does_not_begin(tmp_path: Path) -> None:
    environment = {**os.environ, guard.LAUNCHER: "1" if os.getpid() != 1 else "2"}
    command = [sys.executable, "-I", "-S", guard.__file__, sys.executable, "-c", "print('began')"]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=10)
    assert done.returncode == 137
    assert done.stdout == b""
