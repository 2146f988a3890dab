"""What people write on command lines, in files and in environments: byte for byte, or an error that names it and its place."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dist_train.config.compose import ConfigError
from dist_train.config.schema import LaunchConfig
from dist_train.launcher import ssh
from dist_train.launcher.environment import detect, detect_node
from dist_train.launcher.hosts import Host, expand_nodes, read_hostfile
from tests.launcher.test_launch import ODD

ROOT = Path(__file__).resolve().parents[2]
WORDS = [*ODD, "'", "a;b", "`id`", "\t", "!1", "key=[a,b]", os.fsdecode(b"\xff\xfe")]
DUMP = 'import os, sys; sys.stdout.buffer.write(b"".join(os.fsencode(word) + bytes(1) for word in sys.argv[1:]))'


def program(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)
    return str(folder / name)


def read(data: bytes) -> list[str]:
    return [os.fsdecode(word) for word in data.split(b"\0")[:-1]]


@pytest.fixture
def dump(tmp_path: Path) -> str:
    """A program that writes its arguments to standard output, each with a zero byte behind it."""
    return program(tmp_path, "dump", f"#!{sys.executable} -IS\n{DUMP}\n")


def test_F31_over_ssh(tmp_path: Path, capfdbinary) -> None:
    # sshd hands one string to the login shell of the user
    fake = program(tmp_path, "ssh", '#!/bin/sh\n[ $# -eq 2 ] && exec sh -c "$2"\n')
    launch = LaunchConfig(kind="ssh", ssh_command=[fake])
    code = ssh.Starter([Host("h1"), Host("h2")], launch, [sys.executable, "-I", "-S", "-c", DUMP, *WORDS]).run()
    assert code == 0
    assert read(capfdbinary.readouterr().out) == WORDS


def test_F31_through_the_options_of_hydra_that_ssh_puts_the_size_of_the_job_behind() -> None:
    argv = ["run.dir=a b\n$HOME *é'", "data.path=", "--config-dir", "c d"]
    assert [word for word in ssh.agent_argv(argv, 2, 3)[4:] if not word.startswith("launch.")] == argv


@pytest.mark.parametrize(
    ("script", "starter", "given"),
    [
        ("mpi/openmpi.sh", "mpirun", ["hosts", "4"]),
        ("mpi/mpich.sh", "mpiexec", ["hosts", "4"]),
        ("ssh/start.sh", "dist-train", ["hosts"]),
    ],
)
def test_F31_through_the_scripts_of_launch(script: str, starter: str, given: list[str], tmp_path: Path, dump: str) -> None:
    program(tmp_path, "dist-train", "#!/bin/sh\nexit 9\n")
    program(tmp_path, starter, Path(dump).read_text())
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "NCCL_DEBUG": "INFO"}
    done = subprocess.run([str(ROOT / "launch" / script), *given, *WORDS], env=env, capture_output=True, timeout=30)
    assert done.returncode == 0, done
    words = read(done.stdout)
    assert words[-len(WORDS) :] == WORDS
    assert words.count("hosts") + words.count("launch.hostfile=hosts") == 1
    if script == "mpi/openmpi.sh":
        assert words[words.index("NCCL_DEBUG") - 1] == "-x"


@pytest.mark.parametrize("script", ["mpi/openmpi.sh", "mpi/mpich.sh", "ssh/start.sh"])
def test_the_scripts_of_launch_say_how_they_are_used(script: str) -> None:
    done = subprocess.run([str(ROOT / "launch" / script)], capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and done.stderr.startswith("usage: ")


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_F31_in_a_container(engine: str, tmp_path: Path, dump: str) -> None:
    """`docker run IMAGE train WORDS`: what follows the image is appended to the entry point, which no shell reads."""
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", (ROOT / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    program(tmp_path, "dist-train", Path(dump).read_text())
    run = f'#!/bin/bash\nwhile [ "$1" != image ]; do shift; done; shift\nexec {shlex.join(json.loads(entry))} "$@"\n'
    container = program(tmp_path, engine, run)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([container, "run", "--rm", "image", "train", *WORDS], env=env, capture_output=True, timeout=30)
    assert read(done.stdout) == ["train", *WORDS]


OMPI = {f"OMPI_COMM_WORLD_{name}": n for name, n in {"RANK": "1", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}.items()}
NODE = {"DIST_TRAIN_NODES": "2", "DIST_TRAIN_NODE_RANK": "1", "DIST_TRAIN_RENDEZVOUS": "h1:29500"}


@pytest.mark.parametrize(
    ("kind", "given", "place", "value"),
    [
        ("hostfile", "", "hosts", "names no host"),
        ("hostfile", "# only words\n\n", "hosts", "names no host"),
        ("hostfile", "h1\nh2 lots=8\n", "hosts:2", "'lots=8'"),
        ("hostfile", "h1 slots=0\n", "hosts:1", "'slots=0'"),
        ("hostfile", "h1 slots=two\n", "hosts:1", "'slots=two'"),
        ("hostfile", "h1 slots=2.5\n", "hosts:1", "'slots=2.5'"),
        ("hostfile", "h1 8\n", "hosts:1", "'8'"),
        ("hostfile", "h1\r\n\r\nh1 slots=2\r\n", "hosts:3", "h1"),
        ("hostfile", "@h1\n", "hosts:1", "'@h1'"),
        ("hostfile", "h1,h2\n", "hosts:1", "'h1,h2'"),
        ("hostfile", "h[1-2]\n", "hosts:1", "'h[1-2]'"),
        ("hostfile", "h1\n-oProxyCommand=id\n", "hosts:2", "'-oProxyCommand=id'"),
        ("hostfile", "$(id)\n", "hosts:1", "'$(id)'"),
        ("nodes", "a[1-2", "node list 'a[1-2'", "not closed"),
        ("nodes", "a1-2]", "node list 'a1-2]'", "bracket at 5"),
        ("nodes", "a,,b", "node list 'a,,b'", "a name is empty"),
        ("nodes", "n[3-1]", "node list 'n[3-1]'", "3-1 runs backwards"),
        ("nodes", "n[1-x]", "node list 'n[1-x]'", "'1-x'"),
        ("nodes", "n[1-999999]", "node list 'n[1-999999]'", "1-999999 makes more than"),
        ("rank", {"RANK": "one", "WORLD_SIZE": "2"}, "RANK", "'one'"),
        ("rank", {"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE", "''"),
        ("rank", {"RANK": "2", "WORLD_SIZE": "2"}, "RANK", "2"),
        ("rank", {**OMPI, "OMPI_COMM_WORLD_LOCAL_RANK": "-1"}, "OMPI_COMM_WORLD_LOCAL_RANK", "'-1'"),
        ("rank", {**OMPI, "MASTER_PORT": "http"}, "MASTER_PORT", "'http'"),
        ("rank", {"SLURM_STEP_ID": "0", "SLURM_PROCID": "x", "SLURM_NTASKS": "2"}, "SLURM_PROCID", "'x'"),
        ("node", {**NODE, "DIST_TRAIN_NODES": "two"}, "DIST_TRAIN_NODES", "'two'"),
        ("node", {**NODE, "DIST_TRAIN_NODE_RANK": "2"}, "DIST_TRAIN_NODE_RANK", "2"),
        ("node", {**NODE, "DIST_TRAIN_RENDEZVOUS": "h1"}, "DIST_TRAIN_RENDEZVOUS", "'h1'"),
        ("node", {**NODE, "DIST_TRAIN_RENDEZVOUS": "h1:70000"}, "DIST_TRAIN_RENDEZVOUS", "'h1:70000'"),
        ("node", {"DIST_TRAIN_NODES": "2"}, "DIST_TRAIN_NODE_RANK", "not set"),
    ],
)
def test_F34_what_is_malformed_is_named_with_its_place(kind: str, given, place: str, value: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    if kind == "hostfile":
        file.write_bytes(given.encode())
    ask = {"hostfile": lambda: read_hostfile(file), "nodes": lambda: expand_nodes(given), "rank": lambda: detect(given)}
    with pytest.raises(ConfigError) as told:
        ask.get(kind, lambda: detect_node(given))()
    assert place in str(told.value) and value in str(told.value), told.value
    assert len(re.split(r"[;:] ", str(told.value))) > 1  # more than a name: what is wrong with it
