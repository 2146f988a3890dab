"""`dist-train submit` and the scripts of launch/slurm on a real Slurm of four nodes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.conftest import DIST_TRAIN, ROOT, TOY
from tests.cluster.slurm import Slurm, slurm

STEPS = 150
JOB = ["launch.nodes=2", "mesh.dp=4", f"train.steps={STEPS}", "checkpoint.every=25", "launch.lost_seconds=8"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with slurm(4, tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.fixture
def submit(cluster: Slurm, tmp_path: Path, cache: str):
    def call(*overrides: str, path: str = os.environ["PATH"]) -> str:
        done = cluster.run("env", f"PATH={path}", *DIST_TRAIN, "submit", *TOY, cache, *overrides, cwd=tmp_path)
        assert done.returncode == 0, done
        return done.stdout.strip()

    return call


def curve(run_dir: Path) -> list[tuple[int, float]]:
    if not (run_dir / "metrics.jsonl").exists():
        return []
    lines = [line for line in (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [(found["step"], found["loss"]) for found in map(json.loads, lines)]


def output(run_dir: Path) -> str:
    return "\n".join(path.read_text(errors="replace") for path in sorted(run_dir.glob("slurm-*.out")))


def rank_3(cluster: Slurm, job: str) -> int:
    """The process of rank 3, of a launcher or a task of its own."""
    for pid in cluster.hosts.processes():
        try:
            words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue  # it ended just now
        by_launcher = b"RANK=3" in words and b"dist_train.launcher.rank" in command
        if f"SLURM_JOB_ID={job}".encode() in words and (by_launcher or b"SLURM_PROCID=3" in words and b"dist_train" in command):
            return pid
    raise AssertionError("no process of rank 3")


@contextmanager
def halted(cluster: Slurm, job: str, run_dir: Path, steps: int) -> Iterator[int]:
    """After so many steps rank 3 stands still, and all ranks with it, until something has been done to the job."""
    until = time.monotonic() + 100
    while len(curve(run_dir)) < steps:
        assert time.monotonic() < until, f"{cluster.job(job)}\n{output(run_dir)}"
        time.sleep(0.02)
    pid = rank_3(cluster, job)
    os.kill(pid, signal.SIGSTOP)
    try:
        yield pid
    finally:
        try:
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            pass


def finished(cluster: Slurm, job: str, run_dir: Path, restarts: int, seconds: float = 120.0) -> list[tuple[int, float]]:
    found = cluster.wait(job, seconds=seconds)
    assert (found["JobState"], found["ExitCode"], found["Restarts"]) == ("COMPLETED", "0:0", str(restarts)), output(run_dir)
    steps = curve(run_dir)
    assert [step for step, _ in steps] == list(range(1, STEPS + 1)), "no step is missing or written twice"
    return steps


@pytest.fixture(scope="module")
def uninterrupted(cluster: Slurm, tmp_path_factory: pytest.TempPathFactory, cache: str) -> list[tuple[int, float]]:
    """Two nodes of two ranks, one task a node, which nothing disturbs."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    done = cluster.run(*DIST_TRAIN, "submit", *TOY, cache, *JOB, "run.dir=run", cwd=folder)
    assert done.returncode == 0, done
    steps = finished(cluster, done.stdout.strip(), folder / "run", restarts=0)
    assert sorted(path.name for path in (folder / "run" / "logs").iterdir()) == [f"rank_{rank:05d}.log" for rank in range(4)]
    assert "run folder: " in output(folder / "run") and "finished: " in output(folder / "run")
    return steps


@pytest.mark.parametrize("template", sorted((ROOT / "launch" / "slurm").glob("*.sbatch")), ids=lambda path: path.stem)
def test_slurm_takes_every_template(cluster: Slurm, template: Path) -> None:
    done = cluster.run("sbatch", "--test-only", str(template), cwd=ROOT)
    assert done.returncode == 0 and " to start at " in done.stderr, done


@pytest.mark.parametrize(
    ("overrides", "words"),
    [(["slurm.partition=nope"], "invalid partition"), (["slurm.constraint=v100"], "invalid feature")],
)
def test_what_slurm_refuses_is_said_in_its_words_and_leaves_nothing(
    cluster: Slurm, tmp_path: Path, cache: str, overrides: list[str], words: str
) -> None:
    done = cluster.run(*DIST_TRAIN, "submit", *TOY, cache, "run.dir=run", *overrides, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith("dist-train submit: sbatch refused the job: "), done
    assert words in done.stderr.lower(), done
    assert not (tmp_path / "run").exists()


def test_F33_F37_a_preempted_job_saves_is_requeued_and_trains_the_same_curve(
    cluster: Slurm, submit, tmp_path: Path, uninterrupted: list[tuple[int, float]]
) -> None:
    job = submit(*JOB, "run.dir=run")
    with halted(cluster, job, tmp_path / "run", 10):
        asked = ["-p", "high", "-N4", "--exclusive", "-o", "/dev/null"]
        important = cluster.ask("sbatch", "--parsable", *asked, "--wrap", "sleep 1")
    assert cluster.wait(important)["JobState"] == "COMPLETED"
    assert finished(cluster, job, tmp_path / "run", restarts=1) == uninterrupted
    assert output(tmp_path / "run").count("stopped after saving") == 1


def test_F33_F37_the_signal_before_the_time_limit_with_a_task_a_rank(
    cluster: Slurm, submit, tmp_path: Path, uninterrupted: list[tuple[int, float]]
) -> None:
    job = submit(*JOB, "run.dir=run", "slurm.tasks=rank", "slurm.time=1:00:00", "slurm.gpus_per_node=2")
    with halted(cluster, job, tmp_path / "run", 10):
        assert cluster.job(job)["NumTasks"] == "4"
        cluster.ask("scancel", "--signal=USR1", job)  # to the steps and not to the script, as --signal=USR1@300
    assert finished(cluster, job, tmp_path / "run", restarts=1) == uninterrupted


def test_a_cancelled_job_saves_and_does_not_come_back(cluster: Slurm, submit, tmp_path: Path) -> None:
    job = submit(*JOB, "run.dir=run")
    with halted(cluster, job, tmp_path / "run", 3):
        cluster.ask("scancel", job)
    until = time.monotonic() + 60
    while cluster.run("squeue", "-h", "-j", job).stdout.strip():
        assert time.monotonic() < until
        time.sleep(0.2)
    time.sleep(2)
    assert cluster.job(job)["JobState"] == "CANCELLED" and cluster.job(job)["Restarts"] == "0"
    assert (tmp_path / "run" / "checkpoints" / f"step_{curve(tmp_path / 'run')[-1][0]:08d}" / "manifest.json").exists()


def test_a_job_that_loses_a_node_goes_on_without_it(
    cluster: Slurm, submit, tmp_path: Path, uninterrupted: list[tuple[int, float]]
) -> None:
    job = submit(*JOB, "run.dir=run")
    with halted(cluster, job, tmp_path / "run", 30):
        lost = int(cluster.ask("scontrol", "show", "hostnames", cluster.job(job)["NodeList"]).split()[1][1:])
        assert lost != 1, "slurmctld is there"
        cluster.hosts.link(lost, up=False)
    try:
        assert finished(cluster, job, tmp_path / "run", restarts=1, seconds=200) == uninterrupted
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in cluster.hosts.processes(lost)]
        assert not any(b"dist_train" in command for command in commands), "what is behind the dead link has ended too"
    finally:
        cluster.hosts.kill(lost)
        cluster.hosts.link(lost, up=True)
        cluster.start_node(lost)
    cluster.wait_for_nodes()


@pytest.mark.parametrize("tasks", ["node", "rank"])
def test_F29_the_code_of_the_rank_that_failed_is_the_job_s(cluster: Slurm, submit, tmp_path: Path, tasks: str) -> None:
    job = submit(*JOB, "run.dir=run", f"slurm.tasks={tasks}")
    with halted(cluster, job, tmp_path / "run", 3) as pid:
        os.kill(pid, signal.SIGKILL)
    found = cluster.wait(job, seconds=150)
    assert (found["JobState"], found["ExitCode"]) == ("FAILED", "137:0"), output(tmp_path / "run")


def test_a_sweep_is_an_array_with_a_folder_for_each_job(cluster: Slurm, submit, tmp_path: Path) -> None:
    odd = "a b, [c]=$HOME"
    job = submit("-m", "optim.lr=0.1,0.2", "run.dir='sw 100%'", "train.steps=3", f"observe.sample_prompt='{odd}'")
    for number in (0, 1):
        until = time.monotonic() + 90
        run_dir = tmp_path / "sw 100%" / str(number)
        while "finished: " not in output(run_dir):
            assert time.monotonic() < until, output(run_dir)
            time.sleep(0.2)
        config = (run_dir / "config.yaml").read_text()
        assert f"lr: 0.{number + 1}\n" in config and odd in config
        assert [path.name for path in run_dir.glob("slurm-*")] == [f"slurm-{job}_{number}.out"]


def test_F30_the_head_node_is_found_where_there_is_no_scontrol(cluster: Slurm, submit, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sbatch", "srun", "timeout"):
        (programs / name).symlink_to(str(shutil.which(name)))
    job = submit("launch.nodes=2", "mesh.dp=4", "train.steps=3", "run.dir=run", path=str(programs))
    found = cluster.wait(job)
    assert (found["JobState"], len(curve(tmp_path / "run"))) == ("COMPLETED", 3), output(tmp_path / "run")


def test_U03_the_doctor_sees_every_host_of_an_allocation(cluster: Slurm, tmp_path: Path) -> None:
    done = cluster.run("srun", "-N2", "-n2", *DIST_TRAIN, "doctor", "--timeout", "30", cwd=tmp_path, seconds=90)
    assert re.search(r"ok +ranks +2 of 2 came, on h1, h2", done.stdout) and done.returncode == 0, done
