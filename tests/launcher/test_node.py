"""One launcher on each node: where it finds its place, that it trains the curve of one node, and how all of them end."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from dist_train.cli.main import main
from dist_train.config import check
from dist_train.config.compose import ConfigError, compose
from dist_train.launcher import peers as peers_module
from dist_train.launcher.environment import NodePlace, Place, detect_node, node_of_step
from dist_train.launcher.node import run_node
from dist_train.launcher.peers import Peers
from dist_train.launcher.remote import free_port
from tests.launcher.jobs import Job, job, run
from tests.launcher.test_train import TOY, rank_pid, steps, wait_for_steps

NODE = {"DIST_TRAIN_NODES": "4", "DIST_TRAIN_NODE_RANK": "1", "DIST_TRAIN_RENDEZVOUS": "h1:29500"}
LOST = ["launch.lost_seconds=3"]


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [f"data.cache_dir={tmp_path_factory.getbasetemp() / 'tokens'}"]


def nodes(stack: ExitStack, folder: Path, count: int, *command: str) -> list[Job]:
    where = f"127.0.0.1:{free_port()}"
    places = [dict(zip(NodePlace.VARIABLES, (str(count), str(node), where))) for node in range(count)]
    command = ("train", *TOY, f"launch.nodes={count}", *command)
    return [stack.enter_context(job(folder, *command, env={**place})) for place in places]


def test_the_place_of_a_node_is_three_variables() -> None:
    assert detect_node(NODE) == NodePlace(1, 4, "h1", 29500)
    assert detect_node({**NODE, "DIST_TRAIN_RENDEZVOUS": "[fd00::1]:80"}) == NodePlace(1, 4, "fd00::1", 80)
    assert detect_node({"SLURM_JOB_ID": "7"}) is None


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("DIST_TRAIN_NODES", None, "not set"),
        ("DIST_TRAIN_NODES", "two", "must be a number"),
        ("DIST_TRAIN_NODES", "0", "at least one"),
        ("DIST_TRAIN_NODE_RANK", "-1", "must be a number"),
        ("DIST_TRAIN_NODE_RANK", "4", "from 0 to DIST_TRAIN_NODES-1 = 3"),
        ("DIST_TRAIN_RENDEZVOUS", "h1", "HOST:PORT"),
        ("DIST_TRAIN_RENDEZVOUS", ":29500", "HOST:PORT"),
        ("DIST_TRAIN_RENDEZVOUS", "h1:70000", "HOST:PORT"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused_by_the_name_of_its_variable(name: str, value: str | None, words: str) -> None:
    env = {key: text for key, text in {**NODE, name: value}.items() if text is not None}
    with pytest.raises(ConfigError, match=f"{name}.*{words}"):
        detect_node(env)


def test_a_step_with_one_task_a_node_is_a_step_of_nodes_when_there_are_more_ranks_than_tasks() -> None:
    place = Place("srun", 1, 2, 0, None, "h1", 20001)
    step = {"SLURM_STEP_NUM_NODES": "2"}
    assert node_of_step(step, place, 2, 4) == NodePlace(1, 2, "h1", 20001)
    assert node_of_step(step, place, 2, 2) is None, "one rank a node: the tasks are the ranks"
    assert node_of_step(step, Place("srun", 1, 4, 0, None, "h1", 20001), 2, 4) is None, "a task a rank"
    assert node_of_step({"SLURM_STEP_NUM_NODES": "1"}, place, 2, 4) is None, "two tasks on one node"
    assert node_of_step(step, Place("mpirun", 1, 2, 0, None, "h1", 20001), 2, 4) is None


def test_several_nodes_are_refused_where_one_is_started_and_the_ways_are_named() -> None:
    config = compose(["launch.nodes=2", "mesh.dp=2"])
    assert check.check(config, 2) == []
    (problem,) = check.one_node(config)
    for way in ("launch.kind=ssh", "dist-train submit", "srun", "mpirun", "torchrun"):
        assert way in str(problem)
    assert "launch.nodes=2" in str(check.check(compose(["launch.nodes=2", "mesh.dp=3", "train.global_batch=6"]), 3)[0])


def test_two_nodes_train_the_curve_of_one(tmp_path: Path, cache: list[str]) -> None:
    command = [*cache, "mesh.dp=2", "train.steps=4"]
    code, text = run(tmp_path, "train", *TOY, *command, "run.dir=one")
    assert code == 0, text
    with ExitStack() as stack:
        jobs = nodes(stack, tmp_path, 2, *command, "run.dir=two")
        assert [each.wait() for each in jobs] == [0, 0], [each.text() for each in jobs]
        assert [each.text().count("run folder: ") for each in jobs] == [1, 0]
        for each in jobs:
            each.wait_until_gone()
    curves = [[json.loads(line)["loss"] for line in (tmp_path / name / "metrics.jsonl").open()] for name in ("one", "two")]
    assert curves[0] == curves[1]
    assert sorted(path.name for path in (tmp_path / "two" / "logs").iterdir()) == [f"rank_{rank:05d}.log" for rank in range(2)]


def test_F29_all_nodes_start_again_together_and_end_with_the_code_of_who_failed(tmp_path: Path, cache: list[str]) -> None:
    with ExitStack() as stack:
        command = [*cache, "mesh.dp=2", "run.dir=run", "train.steps=100000", "checkpoint.every=2", "launch.max_restarts=1"]
        jobs = nodes(stack, tmp_path, 2, *command)
        wait_for_steps(jobs[0], tmp_path / "run", 6)
        os.kill(rank_pid(jobs[1], 1), signal.SIGKILL)
        wait_for_steps(jobs[0], tmp_path / "run", len(steps(tmp_path / "run")) + 20)
        os.kill(rank_pid(jobs[1], 1), signal.SIGKILL)
        assert [each.wait(60) for each in jobs] == [137, 137], [each.text() for each in jobs]
        for each in jobs:
            each.wait_until_gone(1)
        assert f"node 1 ({socket.gethostname()}) ended first: rank 1 was killed by SIGKILL" in jobs[0].text()
        assert "rank 1 was killed by SIGKILL" in jobs[1].text()
    found = steps(tmp_path / "run")
    assert found == list(range(1, len(found) + 1)), "no step is missing or written twice"


def test_F33_F37_a_signal_to_one_launcher_stops_all_nodes_after_saving(tmp_path: Path, cache: list[str]) -> None:
    with ExitStack() as stack:
        jobs = nodes(stack, tmp_path, 2, *cache, "mesh.dp=2", "run.dir=run", "train.steps=100000")
        wait_for_steps(jobs[0], tmp_path / "run")
        jobs[1].process.send_signal(signal.SIGUSR1)
        assert [each.wait(60) for each in jobs] == [75, 75], [each.text() for each in jobs]
    assert (tmp_path / "run" / "checkpoints" / f"step_{len(steps(tmp_path / 'run')):08d}" / "manifest.json").exists()


def test_F32_a_node_that_is_silent_is_lost_and_ends_the_others(tmp_path: Path, cache: list[str]) -> None:
    dead = 0  # who hosts the store (tests/cluster cuts off the others)
    with ExitStack() as stack:
        jobs = nodes(stack, tmp_path, 2, *cache, *LOST, "mesh.dp=2", "run.dir=run", "train.steps=100000")
        wait_for_steps(jobs[0], tmp_path / "run")
        for pid in jobs[dead].alive():
            os.kill(pid, signal.SIGSTOP)  # silent, with every connection open, as behind a dead link
        assert jobs[1 - dead].wait(80) == 74, jobs[1 - dead].text()
        jobs[1 - dead].wait_until_gone(1)
        assert f"node {dead} ({socket.gethostname()}) was lost" in jobs[1 - dead].text()
        for pid in jobs[dead].alive():
            os.kill(pid, signal.SIGCONT)
        assert jobs[dead].wait(80) != 0
        jobs[dead].wait_until_gone(1)


def test_F32_a_node_whose_connections_are_reset_is_lost_too(tmp_path: Path, cache: list[str]) -> None:
    """Its peers' ranks end first, with an error of their own: the connection was closed."""
    with ExitStack() as stack:
        jobs = nodes(stack, tmp_path, 2, *cache, *LOST, "mesh.dp=2", "run.dir=run", "train.steps=100000")
        wait_for_steps(jobs[0], tmp_path / "run")
        for pid in jobs[1].alive():
            os.kill(pid, signal.SIGKILL)
        assert jobs[0].wait(80) == 74, jobs[0].text()
        assert f"node 1 ({socket.gethostname()}) was lost" in jobs[0].text() and "rank 0 failed" not in jobs[0].text()


def test_what_node_0_refuses_is_said_once_and_ends_all_with_2(tmp_path: Path, cache: list[str]) -> None:
    with ExitStack() as stack:
        jobs = nodes(stack, tmp_path, 2, *cache, "mesh.dp=2", "train.global_batch=3", "run.dir=run")
        assert [each.wait(60) for each in jobs] == [2, 2], [each.text() for each in jobs]
        assert "train.global_batch=3" in jobs[0].text() and jobs[1].text() == ""
    assert not (tmp_path / "run").exists()


def test_nodes_that_do_not_come_are_named_by_number(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(peers_module, "_GONE_SECONDS", 0.5)
    launch = dataclasses.replace(compose([]).launch, timeout_seconds=1.0)
    assert run_node(NodePlace(0, 4, "127.0.0.1", free_port()), launch, lambda: (Path("/nowhere"), ()), 1) == 74
    assert re.search(r"3 of 4 nodes did not come to 127.0.0.1:.* counted from 0: 1, 2, 3;", capsys.readouterr().err)


def test_a_node_that_finds_no_node_0_ends_with_74_and_says_where_it_looked(capsys: pytest.CaptureFixture[str]) -> None:
    launch = dataclasses.replace(compose([]).launch, timeout_seconds=1.0)
    place = NodePlace(1, 2, "127.0.0.1", free_port())
    assert run_node(place, launch, lambda: (Path("/nowhere"), ()), 1) == 74
    words = f"node 1 ({socket.gethostname()}) did not reach node 0 at 127.0.0.1:{place.port} in 1 s"
    assert words in capsys.readouterr().err


def test_the_environment_and_launch_nodes_must_agree(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in NODE.items():
        monkeypatch.setenv(name, value)
    assert main(["train", *TOY]) == 2
    assert "launch.nodes=1: the environment says that 4 nodes were started; set launch.nodes=4" in capsys.readouterr().err


def test_the_failure_that_is_nobodys_victim_is_the_first() -> None:
    """Node 1 tells at once; node 0, whose rank wrote that a connection was closed, is heard after it."""
    port = free_port()
    own = [TCPStore("127.0.0.1", port, None, node == 0, wait_for_workers=False) for node in (0, 1)]
    peers = [Peers(store, node, 2, 60.0, 1.0) for node, store in enumerate(own)]
    for node, store in enumerate(own):
        store.set(f"beat{node}", "0")
    for each in peers:
        each.met(["a", "b"])
    peers[0].report(0, 1, told=True)
    time.sleep(0.2)
    peers[1].report(3, -9, told=False)
    found = [each.settled() for each in peers]
    assert [(each.node, each.host, each.rank, each.status) for each in found if each] == [(1, "b", 3, -9)] * 2
    with ThreadPoolExecutor() as pool:
        assert list(pool.map(Peers.leave, peers, (1, 137))) == [137, 137]
