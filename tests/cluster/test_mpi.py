"""mpirun of Open MPI and MPICH: training on one host and on two, how a failure ends the job, what becomes of argv."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import DIST_TRAIN, TOY
from tests.cluster.hosts import Hosts
from tests.launcher.test_argv import DUMP, WORDS

OPEN_MPI = ["mpirun", "--oversubscribe", "--bind-to", "none"]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
FAIL = """
import os, sys, time
from pathlib import Path
from dist_train.launcher import environment, join
def train(run_dir, started_here):
    if os.environ["RANK"] == "1":
        print("the words of rank 1", file=sys.stderr, flush=True)
        return 7
    time.sleep(60)
    Path("waited").touch()
def prepare():
    Path("run/logs").mkdir(parents=True, exist_ok=True)
    return Path("run").resolve()
join.guarded = train
sys.exit(join.join(environment.detect(os.environ, os.getppid()), prepare, 30.0))
"""


@pytest.fixture(scope="session", autouse=True)
def mpi4py() -> None:
    if importlib.util.find_spec("mpi4py") is None or shutil.which("mpirun") is None:
        pytest.fail("needs mpi4py and Debian's openmpi-bin: run `make test-cluster`, which installs them")


@pytest.fixture(scope="session")
def mpich(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment in which `mpiexec` is MPICH's, from its Python package, and mpi4py finds its library."""
    folder = tmp_path_factory.mktemp("mpich")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--ignore-installed",
        "--prefix",
        str(folder),
        "mpich==5.0.2",
    ]
    subprocess.run(command, check=True, timeout=200)
    return {"PATH": f"{folder}/bin:{os.environ['PATH']}", "LD_LIBRARY_PATH": f"{folder}/lib"}


def run(
    folder: Path, argv: list[str], env: dict[str, str] | None = None, seconds: float = 150
) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI", "PMI", "MASTER", "RANK", "WORLD"))}
    env = {**clean, **AS_ROOT, "OMP_NUM_THREADS": "1", **(env or {})}
    return subprocess.run(
        argv,
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        stdin=subprocess.DEVNULL,
        timeout=seconds,
    )


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, cache: str) -> list[float]:
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("alone")
    done = run(folder, [*DIST_TRAIN, "train", *TOY, cache, "train.steps=4", "run.dir=run"])
    assert done.returncode == 0, done
    return losses(folder / "run")


def test_four_ranks_of_open_mpi_have_the_losses_of_one_process(tmp_path: Path, cache: str, alone: list[float]) -> None:
    command = [*OPEN_MPI, "-n", "4", *DIST_TRAIN, "train", *TOY, cache, "mesh.dp=4", "train.steps=4", "run.dir=run"]
    done = run(tmp_path, command)
    assert done.returncode == 0, done
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5)


def test_two_ranks_of_mpich_have_the_losses_of_one_process(
    tmp_path: Path, cache: str, alone: list[float], mpich: dict[str, str]
) -> None:
    command = ["mpiexec", "-n", "2", *DIST_TRAIN, "train", *TOY, cache, "mesh.dp=2", "train.steps=4", "run.dir=run"]
    done = run(tmp_path, command, mpich)
    assert done.returncode == 0, done
    assert losses(tmp_path / "run") == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("by", ["openmpi", "mpich"])
def test_F32_a_rank_that_fails_ends_the_job_with_its_code_and_its_words(by: str, tmp_path: Path, request) -> None:
    (tmp_path / "fail.py").write_text(FAIL)
    env = request.getfixturevalue("mpich") if by == "mpich" else None
    done = run(tmp_path, [*(OPEN_MPI if env is None else ["mpiexec"]), "-n", "3", sys.executable, "fail.py"], env)
    assert done.returncode == 7, done
    assert not (tmp_path / "waited").exists()  # the others were ended
    assert "rank 1 failed with exit code 7" in done.stderr and "the words of rank 1" in done.stderr, done


@pytest.mark.parametrize("by", ["openmpi", "mpich"])
def test_a_config_that_is_wrong_is_told_once_with_code_2(by: str, tmp_path: Path, request) -> None:
    env = request.getfixturevalue("mpich") if by == "mpich" else None
    start = [*(OPEN_MPI if env is None else ["mpiexec"]), "-n", "2"]
    done = run(tmp_path, [*start, *DIST_TRAIN, "train", "mesh.dp=2", "train.micro_batch=0"], env)
    assert done.returncode == 2, done
    assert done.stderr.count("train.micro_batch=0: at least 1") == 1 and "frame #" not in done.stderr, done


@pytest.mark.parametrize("by", ["openmpi", "mpich"])
def test_F31_every_word_arrives(by: str, tmp_path: Path, request) -> None:
    env = request.getfixturevalue("mpich") if by == "mpich" else None
    start = [*(OPEN_MPI if env is None else ["mpiexec"]), "-n", "1"]
    done = run(tmp_path, [*start, sys.executable, "-I", "-S", "-c", DUMP, *WORDS], env)
    assert done.returncode == 0 and done.stdout.split("\0")[:-1] == WORDS, done


def test_F33_two_hosts_find_each_other_by_mpi_and_USR1_to_mpirun_saves(two_hosts: Hosts, tmp_path: Path, cache: str) -> None:
    """mpirun enters the other host by what stands for ssh, and nothing in the environment says where rank 0 is."""
    agent = tmp_path / "enter"
    enter = shlex.join(two_hosts.inside(2, ["sh", "-c"]))
    agent.write_text(f'#!/bin/sh\n[ "$1" = h2 ] || exit 9\nshift\nexec {enter} "$*"\n')
    agent.chmod(0o755)
    tcp = ["--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"]
    start = [*OPEN_MPI, "--host", "h1:1,h2:1", "-n", "2", "--mca", "plm_rsh_agent", str(agent), *tcp]
    command = [*start, *DIST_TRAIN, "train", *TOY, cache, "mesh.dp=2", "train.steps=1000000", "run.dir=run"]
    process = two_hosts.start(1, command, tmp_path / "output", env=AS_ROOT, cwd=tmp_path)
    metrics, until = tmp_path / "run" / "metrics.jsonl", time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert process.poll() is None and time.monotonic() < until, (tmp_path / "output").read_text()
        time.sleep(0.1)
    assert len(two_hosts.processes(2)) >= 1
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 75, (tmp_path / "output").read_text()
    assert "stopped after saving" in (tmp_path / "output").read_text()
    assert list((tmp_path / "run" / "checkpoints").glob("step_*"))
    two_hosts.wait_until_gone()
