"""A rank fails: the job ends soon, with that rank's code, and says which rank, why, and its last words."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from dist_train.launcher import report
from tests.launcher.jobs import job, run, script

ONE_FAILS = """
import os, sys, time
if os.environ["RANK"] == "1":
    print("the last words", file=sys.stderr)
    {deed}
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("deed", "code", "words"),
    [
        ("sys.exit(7)", 7, "failed with exit code 7"),
        ("raise ValueError('what went wrong')", 1, "ValueError: what went wrong"),
        ("os.kill(os.getpid(), 9)", 137, "killed by SIGKILL (often out of memory)"),
        ("os.kill(os.getpid(), 11)", 139, "killed by SIGSEGV"),
    ],
)
def test_F29_U12_the_job_ends_with_the_code_of_the_rank_that_failed(tmp_path: Path, deed: str, code: int, words: str) -> None:
    found, text = run(tmp_path, "launch", "--ranks", "2", script(tmp_path, ONE_FAILS.format(deed=deed)))
    assert found == code
    message = text[text.index("dist-train:") :]
    assert "rank 1 " in message and "rank 0" not in message
    assert words in message
    assert "the last words" in message


def test_F29_a_syntax_error_is_shown_with_its_line(tmp_path: Path) -> None:
    code, text = run(tmp_path, "launch", "--ranks", "2", script(tmp_path, "x = (\n"))
    assert code == 1
    assert "SyntaxError" in text and "dist-train: rank " in text


def test_F29_a_missing_script_is_refused_before_any_rank_starts(tmp_path: Path) -> None:
    code, text = run(tmp_path, "launch", "--ranks", "2", "missing.py", seconds=10)
    assert code == 2
    assert text == "dist-train launch: missing.py: no such file; give the path of a Python file or the name of a program.\n"


def test_F29_a_rank_that_dies_right_after_the_launcher_looked_is_seen_the_next_time(tmp_path: Path) -> None:
    text = """
import os, sys
from dist_train.cli.main import main
from dist_train.launcher.agent import Agent

look = Agent._note_ends

def look_and_kill(agent, group):
    look(agent, group)
    if not agent._ended:
        pid = agent._pcontext.pids()[1]
        os.kill(pid, 9)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

Agent._note_ends = look_and_kill
sys.exit(main(["launch", "--ranks", "2", "sleep", "60"]))
"""
    found = subprocess.run([sys.executable, script(tmp_path, text)], cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=60)
    assert found.returncode == 137, found.stderr
    assert "rank 1 was killed by SIGKILL" in found.stderr


def test_F32_siblings_that_ignore_SIGTERM_and_children_of_ranks_are_gone_within_seconds(tmp_path: Path) -> None:
    text = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print("ready", flush=True)
while os.environ["RANK"] != "3" or not os.path.exists("go"):
    time.sleep(0.02)
sys.exit(1)
"""
    with job(tmp_path, "launch", "--ranks", "4", script(tmp_path, text)) as running:
        running.wait_for("ready", 4)
        assert len(running.alive()) >= 9, "a launcher, four ranks and a child of each"
        (tmp_path / "go").touch()
        started = time.monotonic()
        assert running.wait(20) == 1
        assert time.monotonic() - started < 10
        running.wait_until_gone(1)
        assert "rank 3 failed with exit code 1" in running.text()


@pytest.mark.parametrize(("code", "attempts"), [(1, 2), (2, 1), (75, 1)])
def test_a_failure_is_tried_again_but_not_bad_input_nor_a_preemption(tmp_path: Path, code: int, attempts: int) -> None:
    text = f"import os, sys; print('attempt', os.environ['TORCHELASTIC_RESTART_COUNT']); sys.exit({code})"
    found, said = run(tmp_path, "launch", "--max-restarts", "1", script(tmp_path, text))
    assert found == code
    assert said.count("[rank 0] attempt") == attempts


def test_a_job_whose_second_attempt_ends_well_has_ended_well(tmp_path: Path) -> None:
    text = "import os, sys; sys.exit(1 - int(os.environ['TORCHELASTIC_RESTART_COUNT']))"
    assert run(tmp_path, "launch", "--ranks", "2", "--max-restarts", "1", script(tmp_path, text))[0] == 0


def test_U12_every_status_has_words_and_a_code_of_the_shell() -> None:
    assert report.exit_code(-9) == 137 and report.exit_code(7) == 7
    assert report.meaning(-7) == "was killed by SIGBUS (often a full /dev/shm or a file cut short under a memory map)"
    assert report.meaning(-64) == "was killed by SIGRTMAX"
    assert report.meaning(-200) == "was killed by signal 200"
    assert report.meaning(75) == "failed with exit code 75 (stopped after saving; start it again to resume)"
