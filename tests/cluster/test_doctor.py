"""The doctor over two hosts with addresses of their own: a slow link and one that is down are named by rank and host."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.cluster.conftest import DIST_TRAIN
from tests.cluster.hosts import Hosts


def place(node: int) -> dict[str, str]:
    return {"DIST_TRAIN_NODES": "2", "DIST_TRAIN_NODE_RANK": str(node), "DIST_TRAIN_RENDEZVOUS": "h1:29555"}


def test_a_slow_link_is_named_by_the_rank_that_sends_over_it(two_hosts: Hosts, tmp_path: Path) -> None:
    shaped = two_hosts.run(2, ["tc", *"qdisc add dev eth0 root tbf rate 40mbit burst 64k latency 200ms".split()])
    assert shaped.returncode == 0, shaped
    command = [*DIST_TRAIN, "doctor", "--timeout", "45", "--run-dir", str(tmp_path / "run")]
    other = two_hosts.start(2, command, tmp_path / "other", place(1))
    told = two_hosts.run(1, [*command, "--svg", "links.svg", "--json", "all.json"], 120, place(0), cwd=tmp_path)
    assert told.returncode == 0 and other.wait(20) == 0, told.stdout + told.stderr + (tmp_path / "other").read_text()
    assert "2 of 2 came, on h1, h2" in told.stdout
    assert re.search(r"warn +slow rank +rank 1 \(h2\) sends \d+ times slower than the median", told.stdout), told.stdout
    assert re.search(r"ok +gloo goes by +eth0 10\.77\.0\.1; to 10\.77\.0\.2 leads eth0", told.stdout), told.stdout
    (link,) = json.loads((tmp_path / "all.json").read_text())["links"]
    assert 2.5e6 < link["b_to_a"] < 8e6 < link["a_to_b"], "40 Mbit/s are 5 MB/s"
    assert (tmp_path / "links.svg").exists()


def test_U03_a_host_whose_link_is_down_is_deaf_and_named(two_hosts: Hosts, tmp_path: Path) -> None:
    two_hosts.link(2, up=False)
    command = [*DIST_TRAIN, "doctor", "--timeout", "8"]
    other = two_hosts.start(2, command, tmp_path / "other", place(1))
    told = two_hosts.run(1, command, 90, place(0), cwd=tmp_path)
    assert told.returncode == 1, told.stdout + told.stderr
    assert re.search(r"bad +ranks +1 of 2 came, on h1; rank 1 did not come in 8 s", told.stdout), told.stdout
    assert other.wait(60) == 1
    assert "rank 1 (h2): rank 0 was not reached at h1:29555" in (tmp_path / "other").read_text()
    two_hosts.wait_until_gone()
