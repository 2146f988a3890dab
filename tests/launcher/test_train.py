"""`dist-train train` from outside: one folder, one exit code, and nothing left where nothing could run."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from dist_train.cli.main import main
from dist_train.config import compose
from tests.launcher.jobs import CLI, Job, job, run

TOY = [
    *("model.layers=1", "model.hidden=16", "model.heads=2", "model.kv_heads=2", "model.ffn=16", "model.vocab=53"),
    *("data=synthetic", "data.synthetic_documents=64", "train.seq_len=12", "train.global_batch=8", "train.micro_batch=2"),
    *("train.eval_every=0", "checkpoint.every=0", "observe.sample_tokens=0", "observe.tensorboard=false", "launch.device=cpu"),
    *("launch.timeout_seconds=30", "launch.grace_seconds=20"),
]


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [f"data.cache_dir={tmp_path_factory.getbasetemp() / 'tokens'}"]


def steps(run_dir: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def rank_pid(running: Job, rank: int) -> int:
    """The process of this rank: its environment says so."""
    for pid in running.alive():
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        if f"RANK={rank}".encode() in words and b"dist_train.launcher.rank" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError(f"no process of rank {rank}")


def wait_for_steps(running: Job, run_dir: Path, count: int = 3) -> None:
    until = time.monotonic() + 120
    while not (run_dir / "metrics.jsonl").exists() or len(steps(run_dir)) < count:
        assert running.process.poll() is None and time.monotonic() < until, running.text()
        time.sleep(0.05)


def test_F36_all_ranks_share_the_one_folder_whose_name_was_resolved_once(tmp_path: Path, cache: list[str]) -> None:
    odd = "a=b, [c] d"
    code, text = run(
        tmp_path, "train", *TOY, *cache, "mesh.dp=2", "train.steps=3", f"observe.sample_prompt='{odd}'",
        "run.dir=out/${now:%H-%M-%S-%f}", seconds=100,
    )  # fmt: skip
    assert code == 0, text
    (folder,) = (tmp_path / "out").iterdir()
    assert steps(folder) == [1, 2, 3]
    assert compose.load(folder / "config.yaml").observe.sample_prompt == odd
    assert (folder / "logs" / "rank_00001.log").exists()
    assert (folder / "summary.json").exists()
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("output_")] == ["out"]


def test_F36_each_job_of_a_multirun_has_a_folder_of_its_own(tmp_path: Path, cache: list[str]) -> None:
    code, text = run(tmp_path, "train", "-m", *TOY, *cache, "train.steps=2", "optim.lr=0.1,0.2", seconds=100)
    assert code == 0, text
    folders = sorted((tmp_path / "runs").iterdir())
    assert sorted(compose.load(folder / "config.yaml").optim.lr for folder in folders) == [0.1, 0.2]
    assert [steps(folder) for folder in folders] == [[1, 2], [1, 2]]
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("output_")] == ["runs"]


def test_jobs_of_a_multirun_in_one_given_folder_have_the_subfolder_of_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[tuple[str | None, float]] = []
    monkeypatch.setattr("dist_train.cli.train.train", lambda config: seen.append((config.run.dir, config.optim.lr)) or 0)
    assert main(["train", "-m", "optim.lr=0.1,0.2", "run.dir=sw"]) == 0
    assert main(["train", "optim.lr=0.3", "run.dir=sw"]) == 0
    assert seen == [("sw/0", 0.1), ("sw/1", 0.2), ("sw", 0.3)]


def test_a_second_command_in_the_folder_of_a_running_one_is_refused(tmp_path: Path, cache: list[str]) -> None:
    command = ["train", *TOY, *cache, "run.dir=run"]
    with job(tmp_path, *command, "train.steps=100000") as running:
        wait_for_steps(running, tmp_path / "run")
        assert running.text().startswith(f"run folder: {tmp_path / 'run'}\n")
        before = (tmp_path / "run" / "config.yaml").read_text()
        code, text = run(tmp_path, *command, "train.steps=3")
        assert code == 2
        assert text == (
            f"dist-train train: run.dir=run: in use by process {running.process.pid} on host {socket.gethostname()}; "
            "wait for its end, or set another run.dir.\n"
        )
        assert (tmp_path / "run" / "config.yaml").read_text() == before
        running.process.kill()
        running.wait_until_gone()
    code, text = run(tmp_path, *command, "train.steps=3", "observe.progress=false")
    assert code == 0, text
    assert f"run folder: {tmp_path / 'run'}\n" in text
    assert text.splitlines()[-1] == f"finished: {tmp_path / 'run'}  (text from it: dist-train generate run)"


@pytest.mark.parametrize("command", [["train", "--help"], ["train", "--cfg", "job"], ["launch", "--help"], ["--help"]])
def test_a_reader_that_has_gone_ends_a_command_without_a_word(tmp_path: Path, command: list[str]) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    env = {**os.environ, "PYTHONUNBUFFERED": ""}  # argparse itself swallows the error of an unbuffered write
    done = subprocess.run([*CLI, *command], cwd=tmp_path, env=env, stdout=writes, stderr=subprocess.PIPE, timeout=60)
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cfg", "bogus"], "invalid choice: 'bogus'"),
        (["--nope"], "unrecognized arguments: --nope. All options"),
        (["foo"], "foo: not understood; what is to change is given as KEY=VALUE"),
        (["train.stepz=3"], "Did you mean train.steps?"),
        (["train.steps=many"], "train.steps=many"),
        (["train.steps=0", "optim.lr=-1"], "optim.lr=-1"),
        (["mesh.dp=3", "train.global_batch=8"], "set train.global_batch=12"),
        (["data=text", "data.path=missing.txt"], "missing.txt"),
        (["run.dir=output/below"], "run.dir=output/below"),
    ],
)
def test_U08_what_cannot_run_is_refused_with_2_and_leaves_nothing_behind(
    tmp_path: Path,
    cache: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output").write_text("a file")
    assert main(["train", *TOY, *cache, *arguments]) == 2
    shown = capsys.readouterr().err
    assert words in shown and "Traceback" not in shown
    assert shown.startswith("dist-train train: ") and "usage:" not in shown
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_F35_a_port_in_use_is_refused_before_anything_is_made(tmp_path: Path, cache: list[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, text = run(tmp_path, "train", *TOY, *cache, f"launch.port={port}")
    assert code == 2 and f"port {port}" in text
    assert all(path.name.startswith("output_") for path in tmp_path.iterdir())


@pytest.mark.parametrize("told", ["launcher", "rank 1"])
def test_F33_F37_a_run_told_to_stop_saves_where_it_stands_and_ends_with_75(tmp_path: Path, cache: list[str], told: str) -> None:
    run_dir = tmp_path / "run"
    with job(tmp_path, "train", *TOY, *cache, "mesh.dp=2", "run.dir=run", "train.steps=100000") as running:
        wait_for_steps(running, run_dir)
        os.kill(running.process.pid if told == "launcher" else rank_pid(running, 1), signal.SIGTERM)
        assert running.wait(60) == 75, running.text()
        running.wait_until_gone(1)
        assert f"run.dir={run_dir}" in running.text()
    assert (run_dir / "checkpoints" / f"step_{len(steps(run_dir)):08d}" / "manifest.json").exists()


def test_a_run_goes_on_in_its_folder_unless_told_never_to(tmp_path: Path, cache: list[str]) -> None:
    command = ["train", *TOY, *cache, "run.dir=run"]
    for until in (2, 4):
        code, text = run(tmp_path, *command, f"train.steps={until}")
        assert code == 0, text
        assert steps(tmp_path / "run") == list(range(1, until + 1))
    code, text = run(tmp_path, *command, "train.steps=6", "checkpoint.resume=never")
    assert code == 2 and "run.dir=run" in text and "checkpoint.resume=never" in text
    assert len(steps(tmp_path / "run")) == 4


def test_F29_U12_a_killed_rank_is_named_and_a_restart_goes_on_from_the_last_checkpoint(tmp_path: Path, cache: list[str]) -> None:
    run_dir = tmp_path / "run"
    command = ["train", *TOY, *cache, "mesh.dp=2", "run.dir=run", "train.steps=100000", "checkpoint.every=2"]
    with job(tmp_path, *command, "launch.max_restarts=1") as running:
        wait_for_steps(running, run_dir)
        first = rank_pid(running, 1)
        os.kill(first, signal.SIGKILL)
        killed = time.monotonic()
        before = len(steps(run_dir))
        wait_for_steps(running, run_dir, before + 20)
        assert time.monotonic() - killed < 40
        second = rank_pid(running, 1)
        assert second != first
        os.kill(second, signal.SIGKILL)
        assert running.wait(60) == 137, running.text()
        running.wait_until_gone(1)
        assert "rank 1 was killed by SIGKILL (often out of memory)" in running.text()
    found = steps(run_dir)
    assert found == list(range(1, len(found) + 1)), "no step is missing or written twice"


@pytest.mark.parametrize("by", ["torchrun", "srun"])
def test_F36_ranks_that_another_launcher_started_join_and_share_one_folder(tmp_path: Path, cache: list[str], by: str) -> None:
    command = ["train", *TOY, *cache, "mesh.dp=2", "train.steps=3"]
    if by == "torchrun":
        code, text = run(tmp_path, "launch", "--ranks", "2", sys.executable, *CLI[1:], *command)
        assert code == 0, text
    else:
        slurm = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "MASTER_ADDR": "127.0.0.1"}
        with ExitStack() as stack:
            env = [{**slurm, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in (0, 1)]
            tasks = [stack.enter_context(job(tmp_path, *command, env={**each})) for each in env]
            assert [task.wait() for task in tasks] == [0, 0], [task.text() for task in tasks]
            assert [task.text().count("dist-train generate runs/") for task in tasks] == [1, 0]
            assert [task.text().count("run folder: ") for task in tasks] == [1, 0]
    (folder,) = (tmp_path / "runs").iterdir()
    assert steps(folder) == [1, 2, 3]
    assert (folder / "logs" / "rank_00001.log").exists()


def test_every_joined_rank_ends_with_2_and_one_of_them_says_why(tmp_path: Path) -> None:
    code, text = run(tmp_path, "launch", "--ranks", "2", sys.executable, *CLI[1:], "train", *TOY, "train.global_batch=3")
    assert code == 2
    assert "[rank 0] dist-train train: train.global_batch=3" in text
    assert "[rank 1]" not in text
    assert not (tmp_path / "runs").exists()


def test_a_command_that_cannot_go_on_with_a_run_changes_nothing_of_it(tmp_path: Path, cache: list[str]) -> None:
    base = [*TOY, *cache, "train.steps=2", "run.dir=run"]
    code, text = run(tmp_path, "train", *base, seconds=100)
    assert code == 0, text

    def files() -> dict[Path, bytes]:  # the lock names whoever tried last
        return {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file() and path.name != ".lock"}

    before = files()
    for override, words in [("model.hidden=32", "has shape"), ("checkpoint.resume=nowhere", "no checkpoint there")]:
        code, text = run(tmp_path, "train", *base, override)
        assert code == 2 and words in text and "Traceback" not in text, text
    assert files() == before
    code, text = run(tmp_path, "train", *TOY, *cache, "checkpoint.resume=nowhere", "run.dir=other")
    assert code == 2 and not (tmp_path / "other").exists(), text
