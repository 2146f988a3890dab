"""Scripts of Slurm: what is asked for, that words arrive as they were, and what each mistake is told. No Slurm is needed."""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dist_train.cli.main import main
from dist_train.config import check
from dist_train.config.compose import ConfigError, compose
from dist_train.config.schema import Config
from dist_train.launcher import slurm

ODD = ["a b", "--x=a b", "", "-4C", "$HOME", "*", "a\nb", "é", "'", '"', "\\", "a\\nb", "\r", "`id`", "!", "\x01f", "a'\n\\'b"]
BASE = ["launch.nodes=2", "mesh.dp=8", "launch.device=cpu", "train.global_batch=16"]


@functools.cache
def base() -> Config:
    return compose(BASE)


def task(arguments: tuple[str, ...] = (), **keys: Any) -> slurm.Task:
    """The base with these keys of `slurm.`"""
    return slurm.Task(dataclasses.replace(base(), slurm=dataclasses.replace(base().slurm, **keys)), list(arguments))


def script(**keys: Any) -> str:
    return slurm.render([task(**keys)], 8, Path("/runs/a"), ["train"], sweep=False)


def options(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_the_options_follow_from_the_config() -> None:
    found = options(script(gpus_per_node="h100:8", time="1-0", partition="gpu", extra=["--nice=5"]))
    assert found == [
        *("--job-name=dist_train", "--output=/runs/a/slurm-%j.out", "--open-mode=append", "--nodes=2", "--ntasks-per-node=1"),
        *("--cpus-per-task=4", "--gpus-per-node=h100:8", "--partition=gpu", "--time=1-0", "--signal=USR1@300"),
        *("--requeue", "--nice=5"),
    ]
    by_rank = options(script(tasks="rank", cpus_per_task=6, exclusive=True, requeue=False))
    assert {"--ntasks-per-node=4", "--cpus-per-task=6", "--exclusive", "--no-requeue"} <= set(by_rank)
    assert not any(option.startswith("--time") for option in by_rank)


@pytest.mark.parametrize("name", ["account", "qos", "reservation", "constraint", "partition"])
def test_each_name_is_an_option(name: str) -> None:
    assert f"--{name}=some" in options(script(**{name: "some"}))
    assert "--mem=7G" in options(script(memory="7G"))


def test_the_watchdog_comes_after_the_signal_and_before_the_limit() -> None:
    assert "watchdog=3525\n" in script(time="1:00:00")
    assert "watchdog=0\n" in script()
    assert "requeue=no\n" in script(requeue=False) and "requeue=yes\n" in script()
    assert "patience=120\n" in script(), "the ranks' grace and a minute and a half"
    assert not any(option.startswith("--signal") for option in options(script(signal_seconds=0)))


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("1:30", 90), ("24:00:00", 86400), ("2-0", 172800), ("1-2:3", 93780), ("1-2:3:4", 93784), ("0", None),
     ("UNLIMITED", None), ("infinite", None)],
)  # fmt: skip
def test_time_limits_are_read_as_slurm_reads_them(time: str, seconds: int | None) -> None:
    assert slurm.seconds(time) == seconds


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("tasks", "gpu", "tasks"),
        *(("time", time, "time") for time in ("1h", "1:2:3:4", "-5", "1-", "10 min", "٣")),
        ("time", "5", "signal_seconds"),
        ("signal_seconds", -1, "signal_seconds"),
        ("signal_seconds", 70000, "signal_seconds"),
        ("memory", "12GB", "memory"),
        ("gpus_per_node", "0", "gpus_per_node"),
        ("gpus_per_node", "eight", "gpus_per_node"),
        ("cpus_per_task", -2, "cpus_per_task"),
        ("partition", "a b", "partition"),
        ("account", "a\nb", "account"),
        ("extra", ["nice=5"], "extra"),
        ("extra", ["--nodes=3"], "extra"),
        ("extra", ["-N3"], "extra"),
        ("extra", ["--output x"], "extra"),
        ("extra", ["--comment=a\nb"], "extra"),
    ],
)
def test_what_slurm_would_not_take_is_refused_by_name(key: str, value: Any, named: str) -> None:
    (problem,) = slurm.problems([task(**{key: value})], 8)
    assert str(problem).startswith(f"slurm.{named}=")


def test_a_job_that_comes_back_may_not_refuse_its_own_folder() -> None:
    never = dataclasses.replace(base(), checkpoint=dataclasses.replace(base().checkpoint, resume="never"))
    (problem,) = slurm.problems([slurm.Task(never, [])], 8)
    assert "slurm.requeue=false" in str(problem)


def test_fewer_gpus_than_ranks_are_refused_where_gpus_are_asked_for() -> None:
    few = task(gpus_per_node="h100:2").config
    few = dataclasses.replace(few, launch=dataclasses.replace(few.launch, device="cuda"))
    (problem,) = slurm.problems([slurm.Task(few, [])], 8)
    assert "set slurm.gpus_per_node=4" in str(problem)
    assert slurm.gpus(few) == 2 and slurm.gpus(base()) == 0


def fake(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(0o755)


def run(folder: Path, text: str, code: int = 0, **env: str) -> subprocess.CompletedProcess[bytes]:
    """The script with an srun that writes its arguments down and ends with `code`, and a scontrol that does too."""
    fake(folder, "srun", f'printf "%s\\0" "$@" >{shlex.quote(str(folder))}/srun.argv; exit {code}')
    state = env.pop("state", "RUNNING")
    log = shlex.quote(str(folder / "scontrol.log"))
    fake(folder, "scontrol", f'echo "$@" >>{log}; [ "$1" = show ] && echo "JobId=7 JobState={state} Reason=None"; exit 0')
    (folder / "job").write_bytes(os.fsencode(text))
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(["bash", str(folder / "job")], env={"PATH": path, "SLURM_JOB_ID": "7", **env}, timeout=30)


def test_F31_every_word_reaches_the_program_byte_for_byte(tmp_path: Path) -> None:
    words = [*ODD, os.fsdecode(b"\xff\xfe")]
    job = task(tuple(words), container=["apptainer", "exec", "my image"])
    text = slurm.render([job], 8, tmp_path, ["dist-train", "train"], sweep=False)
    assert "\r" not in text, "sbatch takes no carriage return"
    assert run(tmp_path, text).returncode == 0
    got = (tmp_path / "srun.argv").read_bytes().split(b"\0")[:-1]
    assert got[got.index(b"--input=none") + 1 :] == [
        *(b"apptainer", b"exec", b"my image", b"dist-train", b"train"), *map(os.fsencode, words)
    ]  # fmt: skip


def test_F36_each_job_of_an_array_has_its_own_words(tmp_path: Path) -> None:
    tasks = [task(("optim.lr=1", "a b")), task(("optim.lr=2",))]
    text = slurm.render(tasks, 8, Path("/runs/100%"), ["train"], sweep=True)
    assert "--array=0-1" in options(text) and "--output=/runs/100%%/%a/slurm-%A_%a.out" in options(text)
    for number, expected in enumerate([b"train\0optim.lr=1\0a b\0", b"train\0optim.lr=2\0"]):
        run(tmp_path, text, SLURM_ARRAY_TASK_ID=str(number))
        assert (tmp_path / "srun.argv").read_bytes().endswith(b"--input=none\0" + expected)
    with pytest.raises(ConfigError, match="one request"):
        slurm.render([task(), task(time="5")], 8, Path("/runs"), ["train"], sweep=True)


@pytest.mark.parametrize(
    ("code", "env", "requeued"),
    [
        (75, {}, True),
        (74, {}, True),
        (74, {"SLURM_RESTART_COUNT": "10"}, False),
        (75, {"SLURM_RESTART_COUNT": "10"}, True),
        (75, {"state": "CANCELLED"}, False),
        (0, {}, False),
        (1, {}, False),
        (137, {}, False),
    ],
)
def test_F33_what_saved_or_lost_a_node_comes_back_and_every_code_is_kept(
    tmp_path: Path, code: int, env: dict[str, str], requeued: bool
) -> None:
    assert run(tmp_path, script(), code, **env).returncode == code
    log = tmp_path / "scontrol.log"
    assert ("requeue 7" in log.read_text().splitlines() if log.exists() else False) == requeued
    if requeued:
        assert run(tmp_path, script(requeue=False), code, **env).returncode == code
        assert log.read_text().splitlines().count("requeue 7") == 1


def test_the_templates_differ_only_in_what_is_to_be_changed_and_never_trap_cont() -> None:
    texts = {path.stem: path.read_text() for path in slurm.templates_dir().glob("*.sbatch")}
    assert sorted(texts) == ["array", "node", "rank"]
    assert len({text.partition(slurm.END)[2] for text in texts.values()}) == 1
    for text in texts.values():
        assert text.startswith("#!/bin/bash\n") and text.count(slurm.BEGIN) == text.count(slurm.END) == 1
        commands = [line for line in text.splitlines() if not line.startswith("#")]
        assert [line.split("#")[0].strip() for line in commands if "trap" in line] == ["trap : TERM USR1"]


@pytest.mark.parametrize("name", ["array", "node", "rank"])
def test_what_a_template_shows_can_run(tmp_path: Path, name: str) -> None:
    text = (slurm.templates_dir() / f"{name}.sbatch").read_text()
    run(tmp_path, text, SLURM_ARRAY_TASK_ID="2")
    words = (tmp_path / "srun.argv").read_text().split("\0")[:-1]
    config = compose(words[words.index("train") + 1 :])
    options_of = dict(option.lstrip("-").partition("=")[::2] for option in options(text))
    assert check.check(config, int(options_of["nodes"]) * int(options_of["gpus-per-node"])) == []
    assert int(options_of["nodes"]) == config.launch.nodes


def submit(folder: Path, *arguments: str) -> int:
    return main(["submit", *BASE, *arguments])


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be in, with an sbatch that keeps what it was given."""
    (tmp_path / "bin").mkdir()
    fake(tmp_path / "bin", "sbatch", f'echo "$@" >{shlex.quote(str(tmp_path))}/asked; echo "12;cluster"')
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_dry_run_prints_the_script_and_makes_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(here, "--dry-run", "run.dir=r x", "optim.lr=0.5") == 0
    shown = capsys.readouterr().out
    assert f'--output="{here}/r x/slurm-%j.out"' in options(shown)
    assert "optim.lr=0.5" in shown and subprocess.run(["bash", "-n"], input=shown.encode()).returncode == 0
    assert [path.name for path in here.iterdir()] == ["bin"]


def test_a_job_is_submitted_from_its_private_run_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(here, "run.dir=run") == 0
    assert capsys.readouterr().out == "12\n"
    file = here / "run" / "job.sbatch"
    assert (here / "asked").read_text() == "--parsable run/job.sbatch\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and stat.S_IMODE((here / "run").stat().st_mode) == 0o700
    assert submit(here) == 0
    (run_dir,) = (here / "runs").iterdir()
    assert f"run.dir={run_dir}" in (run_dir / "job.sbatch").read_text(), "the name is fixed once, for a job that comes back"


def test_F36_a_sweep_is_one_array_with_a_folder_for_each_job(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(here, "-m", "optim.lr=0.1,0.2", "run.dir=sweep") == 0
    text = (here / "sweep" / "job.sbatch").read_text()
    assert "--array=0-1" in options(text) and f"run.dir={here}/sweep/1" in text
    assert sorted(path.name for path in (here / "sweep").iterdir()) == ["0", "1", "job.sbatch"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["slurm.time=1h"], "slurm.time=1h"),
        (["slurm.taskz=node"], "Did you mean slurm.tasks?"),
        (["train.global_batch=3", "slurm.tasks=x"], "train.global_batch=3"),
        (["-m", "slurm.time=10,20"], "one request"),
        (["--nope"], "unrecognized arguments: --nope"),
    ],
)
def test_what_cannot_run_is_refused_before_slurm_is_asked(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert submit(here, *arguments) == 2
    assert words in capsys.readouterr().err
    assert [path.name for path in here.iterdir()] == ["bin"]


def test_what_slurm_refuses_is_said_in_its_words(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake(here / "bin", "sbatch", "echo 'sbatch: error: no such qos' >&2; exit 1")
    assert submit(here, "run.dir=run") == 2
    assert "sbatch refused the job: sbatch: error: no such qos" in capsys.readouterr().err
    assert not (here / "run").exists()
    (here / "bin" / "sbatch").unlink()
    if subprocess.run(["which", "sbatch"], capture_output=True).returncode:
        assert submit(here, "run.dir=run") == 2 and "--dry-run" in capsys.readouterr().err
