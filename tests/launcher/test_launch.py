"""`dist-train launch`: arguments, environment, ports and output of the ranks."""

from __future__ import annotations

import json
import os
import socket
import stat
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launcher.jobs import job, run, script

SHOW = """
import json, os, sys
print(json.dumps({"argv": sys.argv[1:], "omp": os.environ.get("OMP_NUM_THREADS"), "rank": os.environ["RANK"],
                  "world": os.environ["WORLD_SIZE"], "leaked": [k for k in os.environ if k.startswith("DIST_TRAIN_L")]}))
"""
ODD = ["a b", "--x=a b", "", "-4C", "$HOME", "*", "two\nlines", "é", "$$", "${local_rank}", "--", "--help", '"quoted"', "\\"]


def shown(text: str) -> list[dict]:
    found = [json.loads(line.partition("] ")[2]) for line in text.splitlines() if "{" in line]
    return sorted(found, key=lambda each: each["rank"])


def test_F31_arguments_reach_each_rank_byte_for_byte(tmp_path: Path) -> None:
    code, text = run(tmp_path, "launch", "--ranks=2", script(tmp_path, SHOW), *ODD)
    assert code == 0
    found = shown(text)
    assert [each["argv"] for each in found] == [ODD, ODD]
    assert [(each["rank"], each["world"]) for each in found] == [("0", "2"), ("1", "2")]
    assert [each["leaked"] for each in found] == [[], []]


@pytest.mark.parametrize("given", [None, "3", "1"])
def test_U11_threads_are_shared_out_unless_the_user_has_said(tmp_path: Path, given: str | None) -> None:
    code, text = run(tmp_path, "launch", "--ranks", "2", script(tmp_path, SHOW), env={"OMP_NUM_THREADS": given})
    assert code == 0
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))
    assert [each["omp"] for each in shown(text)] == [given or share] * 2


MEET = """
import os
from datetime import timedelta
from torch.distributed import PrefixStore, TCPStore
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, timedelta(seconds=20))
store = PrefixStore(attempt, store)
store.set(os.environ["RANK"], "here")
store.get(str(1 - int(os.environ["RANK"])))
print("met in attempt", attempt)
"""


def test_F35_two_jobs_at_once_meet_each_at_its_own_port(tmp_path: Path) -> None:
    name = script(tmp_path, MEET)
    with ExitStack() as stack:
        jobs = [stack.enter_context(job(tmp_path, "launch", "--ranks", "2", name)) for _ in range(2)]
        assert [each.wait(80) for each in jobs] == [0, 0], [each.text() for each in jobs]
        assert [each.text().count("met") for each in jobs] == [2, 2]


def test_two_nodes_meet_and_meet_again_after_a_failure_on_one(tmp_path: Path) -> None:
    again = """
import sys, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(1 if os.environ["RANK"] == "1" else time.sleep(1) or 3)
"""
    name = script(tmp_path, MEET + again)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["launch", "--nodes", "2", "--rdzv", meeting, "--max-restarts", "1", "--node-rank"]
    with ExitStack() as stack:
        nodes = [stack.enter_context(job(tmp_path, *command, str(rank), name)) for rank in (0, 1)]
        assert [node.wait(60) for node in nodes] == [0, 0], [node.text() for node in nodes]
        assert [node.text().count("met in attempt 1") for node in nodes] == [1, 1]


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_F35_a_port_in_use_is_named_at_once(tmp_path: Path, address: str) -> None:
    with socket.socket() as taken:
        taken.bind((address, 0))
        taken.listen()
        port = taken.getsockname()[1]
        started = time.monotonic()
        code, text = run(tmp_path, "launch", "--port", str(port), script(tmp_path, SHOW))
        assert time.monotonic() - started < 40  # and not when a rendezvous of minutes has failed
    assert code == 2
    assert f"port {port}: cannot be used" in text and "another process listens on it" in text
    assert "argv" not in text


def test_a_given_port_that_is_free_is_used(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    name = script(tmp_path, "import os; print('port', os.environ['MASTER_PORT'])")
    assert run(tmp_path, "launch", "--port", str(port), name) == (0, f"[rank 0] port {port}\n")


def test_output_is_shown_in_whole_lines_and_kept_in_private_files(tmp_path: Path) -> None:
    text = """
import os, sys, time
for _ in range(20):
    for part in ("rank ", os.environ["RANK"], " says a", " line\\n"):
        os.write(1, part.encode())
        time.sleep(0.004)
os.write(2, b"no end of line")
"""
    code, said = run(tmp_path, "launch", "--ranks", "2", "--log-dir", "kept", script(tmp_path, text))
    assert code == 0
    for rank in (0, 1):
        assert said.splitlines().count(f"[rank {rank}] rank {rank} says a line") == 20
        assert f"[rank {rank}] no end of line\n" in said
        assert (tmp_path / f"kept/rank_0000{rank}.out").read_text() == f"rank {rank} says a line\n" * 20
        assert stat.S_IMODE((tmp_path / f"kept/rank_0000{rank}.err").stat().st_mode) == 0o600
    assert len(said.splitlines()) == 42
    assert stat.S_IMODE((tmp_path / "kept").stat().st_mode) == 0o700


def test_any_program_on_the_path_can_be_started(tmp_path: Path) -> None:
    assert run(tmp_path, "launch", "echo", "a  b") == (0, "[rank 0] a  b\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ranks", "0", "x.py"], "--ranks 0"),
        (["--nodes", "2", "x.py"], "give --rdzv HOST:PORT"),
        (["--nodes", "2", "--rdzv", "h:1", "--port", "5", "x.py"], "--port 5"),
        (["--nodes", "2", "--rdzv", "h:1", "--max-restarts", "1", "x.py"], "give --node-rank"),
        (["no-such-program-anywhere"], "no such program"),
        (["--rank", "2", "x.py"], "unrecognized arguments: --rank"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, arguments: list[str], words: str) -> None:
    code, text = run(tmp_path, "launch", *arguments, seconds=15)
    assert code == 2
    assert words in text and "Traceback" not in text
