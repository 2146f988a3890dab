"""Several ranks under the doctor: who is missing, deaf, slow or different is named, and nobody waits for ever."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import time
import uuid
import xml.etree.ElementTree
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from dist_train.cli.main import main
from dist_train.config.compose import ConfigError
from dist_train.launcher.checkup import allocation, check, compare, links, meeting, picture
from dist_train.launcher.checkup.check import BAD, OK, WARN, Check
from dist_train.launcher.checkup.links import Link, clock_offsets, rounds
from dist_train.launcher.checkup.machine import Report
from dist_train.launcher.checkup.meeting import Allocation
from tests.launcher import jobs
from tests.ranks import run_ranks

VERSIONS = {"torch": "2.13.0", "numpy": "2.0"}


def report(host: str, versions: dict[str, str] = VERSIONS, env: dict[str, str] | None = None, **more) -> Report:
    return Report(host, versions, ["cpu: x86_64, 8 cores", "cuda:0: H100, 80 GiB"], env or {}, [], {"cpu": 100.0}, **more)


def sound(ranks: int = 4, per_host: int = 2) -> Allocation:
    """An allocation without a fault."""
    found = Allocation(ranks, 30.0)
    found.hosts = {rank: f"n{rank // per_host}" for rank in range(ranks)}
    found.reports = {rank: report(host) for rank, host in found.hosts.items()}
    found.links = [Link(a, b, 1e9, 1e9, 5e-5, 0.0, 5e-5) for a in range(ranks) for b in range(a + 1, ranks)]
    return found


def said(found: Allocation, job_hosts: list[str] | None = None) -> str:
    return "\n".join(check.lines(compare.compare(found, job_hosts)))


def test_a_sound_allocation_has_nothing_but_ok():
    checks = compare.compare(sound())
    assert {each.state for each in checks} == {OK}
    assert {"ranks", "versions", "environment", "devices", "clocks", "links between hosts", "links within a host"} <= {
        each.name for each in checks
    }


def test_missing_ranks_are_named_with_their_likely_hosts():
    found = sound()
    del found.hosts[3], found.reports[3]
    found.links = [each for each in found.links if each.b != 3]
    assert "bad   ranks" in said(found) and "rank 3 did not come in 30 s (on which host is not known" in said(found)
    assert "rank 3 did not come in 30 s (of host n1, by" in said(found, ["n0.cluster", "n1"])
    assert compare.likely_host(3, found, ["n1", "n0"]) == "", "those who came sit elsewhere"
    assert compare.likely_host(3, found, ["n0", "n1", "n2"]) == ""
    assert compare.scheduled_hosts({"SLURM_STEP_NODELIST": "n[0-1]"}) == ["n0", "n1"]
    assert compare.scheduled_hosts({"SLURM_JOB_NODELIST": "n[0-"}) == []


@pytest.mark.parametrize(
    "change, state, text",
    [
        ({"versions": {**VERSIONS, "torch": "2.11.0"}}, BAD, "torch  2.13.0 on most; 2.11.0 on rank 2 (n1)"),
        ({"versions": {**VERSIONS, "numpy": "1.0"}}, WARN, "numpy  2.0 on most; 1.0 on rank 2 (n1)"),
        ({"versions": {"torch": "2.13.0"}}, WARN, "not set on rank 2 (n1)"),
        ({"environment": {"NCCL_ALGO": "Ring"}}, WARN, "NCCL_ALGO  not set on most; Ring on rank 2 (n1)"),
        ({"environment": {"SLURM_PROCID": "2", "CUDA_VISIBLE_DEVICES": "1"}}, OK, ""),
        ({"devices": ["cpu: x86_64, 8 cores"]}, WARN, "1 × H100, 80 GiB on most; CPU only on rank 2 (n1)"),
        ({"sees_run_dir": False}, BAD, "rank 2 (n1) sees none of what rank 0 writes there"),
        ({"gflops": {"cpu": 40.0}}, WARN, "rank 2 (n1): cpu reaches 40 GFLOP/s, the median is 100"),
        ({"checks": [Check("open files", BAD, "64", "ulimit")]}, BAD, "rank 2 (n1): 64"),
    ],
)
def test_a_rank_that_differs_is_named(change, state, text):
    found = sound()
    found.reports[2] = dataclasses.replace(found.reports[2], **change)
    assert check.worst(compare.compare(found)) == state
    assert text in re.sub(r"  +", "  ", said(found))


def test_a_slow_rank_is_named_once_and_a_slow_link_by_both_its_ends():
    found = sound(6, 1)
    found.links = [dataclasses.replace(each, b_to_a=2e7) if each.b == 4 else each for each in found.links]
    found.links = [dataclasses.replace(each, a_to_b=2e7) if each.a == 4 else each for each in found.links]
    assert re.search(r"warn  slow rank +rank 4 \(n4\) sends 50 times slower than the median: 20 MB/s", said(found))
    assert "slow link" not in said(found) and "receives" not in said(found)
    found = sound(6, 1)
    found.links[0] = dataclasses.replace(found.links[0], a_to_b=2e7)
    assert "from rank 0 (n0) to rank 1 (n1): 20 MB/s, the median is 1.0 GB/s" in said(found) and "slow rank" not in said(found)
    found.links[0] = dataclasses.replace(found.links[0], a_to_b=4e8)
    assert check.worst(compare.compare(found)) == OK, "two and a half times slower is within the spread of links"
    two = sound(2, 1)
    two.links = [Link(0, 1, 1e9, 2.5e6, 5e-5, 0.0, 5e-5)]
    assert "rank 1 (n1) sends 400 times slower" in said(two) and check.worst(compare.compare(two)) == WARN


def test_a_link_that_failed_is_bad_and_that_of_a_silent_rank_is_said_once():
    found = sound(4, 1)
    found.failed[1, 2] = "connection refused"
    assert "bad   link" in said(found) and "rank 1 (n1) and rank 2 (n2): connection refused" in said(found)
    found.silent[2] = meeting.MEASURE
    assert "rank 2 on n2 did not come back" in said(found) and "refused" not in said(found)


def test_clocks_are_compared_by_the_chain_with_the_least_error_and_only_what_is_sure_is_said():
    found = sound(3, 1)
    found.links = [
        Link(a, b, 1e9, 1e9, 1e-4, offset, error)
        for a, b, offset, error in ((0, 1, 2.0, 0.01), (1, 2, -100.0, 0.01), (0, 2, 5.0, 9.0))
    ]
    offsets = clock_offsets(found.links, 0)
    assert offsets[0] == (0.0, 0.0) and offsets[1] == (2.0, 0.01) and offsets[2] == pytest.approx((-98.0, 0.02))
    assert "warn  clocks" in said(found) and "rank 1 on n1 is 2.0 s ahead of rank 0, ±10 ms" in said(found)
    assert "bad   clocks" in said(found) and "rank 2 on n2 is 98.0 s behind rank 0" in said(found)
    found.links = [Link(0, 1, 1e9, 1e9, 1e-4, 2.0, 3.0)]
    assert "ok    clocks" in said(found)


@pytest.mark.parametrize("ranks, per_host", [(2, 1), (5, 1), (8, 2), (6, 6), (9, 3), (16, 4)])
def test_rounds_hold_every_pair_once_and_no_host_twice(ranks, per_host):
    hosts = {rank * 3: f"n{rank // per_host}" for rank in range(ranks)}
    plan = rounds(hosts, 10_000)
    pairs = [pair for each in plan for pair in each]
    assert len(pairs) == len(set(pairs)) == ranks * (ranks - 1) // 2 and all(a < b for a, b in pairs)
    for each in plan:
        busy = [host for pair in each for host in {hosts[rank] for rank in pair}]
        assert len(busy) == len(set(busy))
    assert rounds(hosts, 1) == plan[:1]


def test_the_picture_and_the_table_hold_every_link():
    found = sound(4, 2)
    found.hosts[3] = "n1<&>"
    found.links[0] = dataclasses.replace(found.links[0], a_to_b=2.5e7)
    found.failed[1, 3] = "no answer"
    found.links = [each for each in found.links if (each.a, each.b) != (1, 3)]
    text = "\n".join(picture.table(found))
    assert text.count("failed") == 2 and text.count("1.0 GB/s") == 9 and text.count("25 MB/s") == 1
    root = xml.etree.ElementTree.fromstring(picture.heat_map(found))
    titles = [each.text for each in root.iter("{http://www.w3.org/2000/svg}title")][1:]
    assert len(titles) == 12 and "0 n0 to 1 n0: 25 MB/s 50 µs" in titles and "3 n1<&> to 1 n0: failed " in titles
    assert [picture.colour(ratio) for ratio in (0.01, 0.1, 1, 10)] == ["#c25510", "#c25510", "#f6f1e6", "#0b4f8a"]
    many = sound(20, 1)
    many.links[5] = dataclasses.replace(many.links[5], b_to_a=1e6)
    assert picture.table(many)[2].split() == ["6", "n6", "0", "n0", "1", "MB/s"]
    xml.etree.ElementTree.fromstring(picture.heat_map(many))
    alone = sound(2, 1)
    alone.links, alone.failed = [], {(0, 1): "no answer"}
    assert "no link was measured" in picture.heat_map(alone)


def test_ranks_are_written_as_ranges():
    for ranks, text in (([3], "rank 3"), ([2, 0, 1], "ranks 0-2"), ([0, 1, 2, 5, 7, 8], "ranks 0-2, 5, 7-8")):
        assert compare.ranks_text(ranks) == text


def _meet(mesh, comm, at: str, deaf: int, seconds: float, how: str):
    """Ranks 0 and 1 as they should be, with rank 2 as the test wants it."""
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False) if mesh.rank == 0 else None
    port = comm.all_gather_object(server.port if server else 0, mesh.world)[0]
    client = server or dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30))
    store = dist.PrefixStore(f"attempt{at}", client)

    def look(peer: str, first: bool) -> Report:
        if mesh.rank == deaf and how == "no report":
            raise InterruptedError
        torch = "2.11.0" if mesh.rank == deaf and how == "other version" else "2.13.0"
        return report(f"h{mesh.rank}", {"torch": torch})

    def measured(*arguments):
        if mesh.rank == deaf and how == "no measurement":
            raise InterruptedError
        clock = (lambda: time.time_ns() + 7_000_000_000) if mesh.rank == deaf and how == "clock" else time.time_ns
        return links.measure(*arguments, clock=clock)

    meeting.measure = measured
    try:
        if mesh.rank == 0:
            found = meeting.lead(store, mesh.world.size, "127.0.0.1", look, None, seconds)
            return [found.silent, found.failed, len(found.links), "\n".join(check.lines(compare.compare(found)))]
        if mesh.rank != deaf or how != "never started":
            meeting.attend(store, mesh.rank, "127.0.0.1", look, seconds)
    except InterruptedError:
        pass
    finally:
        meeting.measure = links.measure
        comm.barrier(mesh.world)
    return None


@pytest.mark.parametrize(
    "how, silent, count, text",
    [
        ("sound", {}, 3, "3 of 3 came"),
        ("other version", {}, 3, "2.13.0 on most; 2.11.0 on rank 2"),
        ("clock", {}, 3, "is 7.0 s ahead of rank 0"),
        ("never started", {2: meeting.CAME}, 1, "rank 2 did not come in"),
        ("no report", {2: meeting.REPORT}, 1, "came, and then did not report"),
        ("no measurement", {2: meeting.MEASURE}, 1, "did not come back from the measurement"),
    ],
)
def test_U03_three_ranks_meet_and_the_odd_one_is_named(how, silent, count, text):
    seconds = 20.0 if not silent else 2.0
    found = run_ranks(3, _meet, uuid.uuid4().hex, 2, seconds, how, timeout=60.0)[0]
    assert found[0] == silent and found[2] == count and text in found[3]
    assert set(found[1]) <= {(0, 2), (1, 2)}


@pytest.mark.parametrize(
    "env, seat",
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "9"}, allocation.Seat(1, 4, "a", 9)),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a", "MASTER_PORT": "9"}, None),
        ({"DIST_TRAIN_NODES": "2", "DIST_TRAIN_NODE_RANK": "1", "DIST_TRAIN_RENDEZVOUS": "h1:9"}, allocation.Seat(1, 2, "h1", 9)),
        ({"DIST_TRAIN_NODES": "1", "DIST_TRAIN_NODE_RANK": "0", "DIST_TRAIN_RENDEZVOUS": "h1:9"}, None),
    ],
)
def test_the_seat_among_others_is_read_from_the_environment(env, seat):
    assert allocation.find_seat(env) == seat


def test_a_seat_without_an_address_says_what_to_set():
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        allocation.find_seat({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"})


@pytest.mark.parametrize(
    "words, text",
    [
        (["--ranks", "0"], "at least 1"),
        (["--timeout", "0"], "more than 0"),
        (["--timeout", "inf"], "more than 0"),
        (["--svg", "x.svg"], "add --ranks 4"),
        (["--ranks", "2", "--peer", "n2"], "for one process"),
    ],
)
def test_arguments_that_make_no_sense_are_exit_code_2(words, text, capsys):
    assert main(["doctor", *words]) == 2 and text in capsys.readouterr().err


def test_ranks_of_the_launcher_find_each_other(tmp_path):
    files = ["--svg", "links.svg", "--json", "all.json", "--run-dir", "runs"]
    code, out = jobs.run(tmp_path, "launch", "--ranks", "2", *_doctor(), *files, "--timeout", "60", seconds=110)
    assert code == 0, out
    assert "2 of 2 came" in out and "from \\ to" in out and out.count("Check-up of") == 1
    assert (tmp_path / "links.svg").read_text().startswith("<svg") and not (tmp_path / "runs").exists()
    assert len(json.loads((tmp_path / "all.json").read_text())["links"]) == 1
    assert not list(tmp_path.glob(".doctor_*"))


def _doctor() -> list[str]:
    return [str(Path(allocation.__file__).parents[2] / "cli" / "main.py"), "doctor"]


def test_U03_a_stopped_rank_is_named_and_does_not_outlive_the_doctor(tmp_path):
    with jobs.job(tmp_path, "doctor", "--ranks", "3", "--timeout", "7") as running:
        until = time.monotonic() + 60
        while not (pids := [pid for pid in running.alive() if b"RANK=2\0" in _environment(pid)]):
            assert time.monotonic() < until, running.text()
            time.sleep(0.02)
        os.kill(pids[0], signal.SIGSTOP)
        assert running.wait(100) == 1, running.text()
        assert re.search(r"bad   ranks .*ranks? [0-9, -]*2 did not come in 7 s", running.text())
        running.wait_until_gone()


def _environment(pid: int) -> bytes:
    try:
        return b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def test_a_rank_that_finds_nobody_says_so_and_leaves(tmp_path):
    with partial(jobs.job, tmp_path)(
        "doctor", "--timeout", "1", env={"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    ) as running:
        assert running.wait(60) == 1
        assert "rank 1" in running.text() and "rank 0 was not reached at 127.0.0.1:9 in 1 s" in running.text()
