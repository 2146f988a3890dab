"""Jobs over ssh without a network: a stand-in for ssh that gives the command to a shell, as sshd does, on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from dist_train.config.compose import ConfigError, compose
from dist_train.config.schema import LaunchConfig
from dist_train.launcher import ssh
from dist_train.launcher.hosts import Host, read_hostfile

HOSTS = [Host("h1", None, 2, "hosts:1"), Host("h2", "ana", 2, "hosts:2")]


@pytest.fixture
def fake(tmp_path: Path) -> LaunchConfig:
    """An ssh that notes its process; the host `gone` is not there, and `deaf` never answers."""
    program = tmp_path / "ssh"
    program.write_text(
        "#!/bin/sh\n"
        f'echo $$ >"{tmp_path}/ssh_$1"\n'
        'case $1 in gone) echo "ssh: connect to host gone port 22: No route to host" >&2; exit 255;; deaf) exec sleep 60;; esac\n'
        'echo "Welcome to $1"\n'
        'exec sh -c "$2"\n'
    )
    program.chmod(0o700)
    return LaunchConfig(kind="ssh", ssh_command=[str(program)], grace_seconds=5, lost_seconds=1)


def start(launch: LaunchConfig, *argv: str, hosts: list[Host] | None = None) -> int:
    return ssh.Starter(hosts or HOSTS, launch, argv).run()


def python(text: str, *arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", text, *arguments]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until(condition, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_every_host_gets_its_place_the_folder_and_the_variables_of_the_list(fake, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_DEBUG", "a b\n'c'")
    monkeypatch.setenv("SECRET", "x")
    text = (
        "import json, os, sys; rank = os.environ['DIST_TRAIN_NODE_RANK'];"
        "open(f'seen{rank}', 'w').write(json.dumps([os.getcwd(), dict(os.environ)]));"
        "print('out of', rank); print('err of', rank, file=sys.stderr)"
    )
    monkeypatch.setenv("PATH", os.environ["PATH"])
    launch = dataclasses.replace(fake, forward_env=["NCCL_*"])
    assert start(launch, *python(text)) == 0
    seen = [json.loads((tmp_path / f"seen{node}").read_text()) for node in (0, 1)]
    assert [folder for folder, _ in seen] == [str(tmp_path)] * 2
    assert [env["DIST_TRAIN_NODE_RANK"] for _, env in seen] == ["0", "1"]
    assert {env["DIST_TRAIN_NODES"] for _, env in seen} == {"2"}
    assert {env["NCCL_DEBUG"] for _, env in seen} == {"a b\n'c'"}
    where = {env["DIST_TRAIN_RENDEZVOUS"] for _, env in seen}
    assert len(where) == 1 and where.pop().startswith("h1:")
    shown = capfd.readouterr()
    assert shown.out == "out of 0\n" and shown.err == "err of 0\n"  # neither greetings nor what another host says


def test_the_variables_that_are_forwarded() -> None:
    env = {"NCCL_DEBUG": "INFO", "NCCL": "x", "PATH": "/bin", "HOME": "/root"}
    assert ssh.forwarded(env, ["NCCL_*", "HOME", "MISSING"]) == {"NCCL_DEBUG": "INFO", "HOME": "/root"}


def test_the_commands_that_are_built() -> None:
    words = ssh.ssh_argv(["ssh", "-p", "22"], HOSTS[1])
    assert words[:4] == ["ssh", "-p", "22", "ana@h2"] and len(words) == 5
    assert words[4].startswith(f"exec {sys.executable} -I -S ") and words[4].endswith("/dist_train/launcher/remote.py")
    tail = ["launch.nodes=2", "launch.ranks_per_node=4"]
    assert ssh.agent_argv(["a=1", "b=x y", "--config-dir", "c"], 2, 4)[4:] == ["a=1", "b=x y", *tail, "--config-dir", "c"]
    assert ssh.agent_argv(["--config-dir", "c"], 2, 0)[4:] == ["--config-dir", "c", "launch.nodes=2"]


@pytest.mark.parametrize("node", [0, 1])
def test_F32_the_code_of_the_host_that_fails_is_the_jobs_and_its_words_are_shown(fake, node, capfd) -> None:
    text = "import os, sys; mine = os.environ['DIST_TRAIN_NODE_RANK'] == sys.argv[1]; print('no more' * mine); sys.exit(7 * mine)"
    assert start(fake, *python(text, str(node))) == 7
    shown = capfd.readouterr()
    assert ("no more" in shown.out) == (node == 0)
    assert ("[h2] no more" in shown.err) == (node == 1)


def test_a_host_that_dies_ends_the_others_and_is_named(fake, tmp_path, capfd, monkeypatch) -> None:
    monkeypatch.setattr(ssh, "SLACK_SECONDS", 0.0)
    text = "import os, time; open(os.environ['DIST_TRAIN_NODE_RANK'] + '.pid', 'w').write(str(os.getpid())); time.sleep(60)"
    monkeypatch.chdir(tmp_path)

    def lose() -> None:
        until(lambda: all((tmp_path / f"{node}.pid").exists() and (tmp_path / f"{node}.pid").read_text() for node in (0, 1)))
        os.kill(int((tmp_path / "ssh_ana@h2").read_text()), signal.SIGKILL)  # what stands for ssh, sshd and the host

    killer = threading.Thread(target=lose)
    killer.start()
    code = start(dataclasses.replace(fake, lost_seconds=0.2, grace_seconds=0.2), *python(text))
    killer.join()
    assert code == 128 + signal.SIGTERM  # how host 0 ended when it was asked to
    assert "host h2 (hosts:2) was lost" in capfd.readouterr().err
    for node in (0, 1):
        until(lambda node=node: not lives(int((tmp_path / f"{node}.pid").read_text())))


SIGNALS = """
import os, signal, sys, time
def end(number, frame):
    print("got", number, flush=True)
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, end)
open(os.environ["DIST_TRAIN_NODE_RANK"] + ".pid", "w").write(str(os.getpid()))
time.sleep(60)
"""


def outside(fake: LaunchConfig, folder: Path, *argv: str) -> subprocess.Popen[bytes]:
    """The starter as a process of its own, once every host runs what it was told."""
    text = (
        "import json, sys; from dist_train.launcher import ssh; from dist_train.launcher.hosts import Host;"
        "from dist_train.config.schema import LaunchConfig; launch, argv = json.loads(sys.argv[1]);"
        "ssh.AFTER_GRACE_SECONDS = 0.2; hosts = [Host('h1', None, None, 'hosts:1'), Host('h2', None, None, 'hosts:2')];"
        "sys.exit(ssh.Starter(hosts, LaunchConfig(**launch), argv).run())"
    )
    told = json.dumps([dataclasses.asdict(fake), argv])
    process = subprocess.Popen([sys.executable, "-c", text, told], cwd=folder, stdout=subprocess.PIPE)
    until(lambda: all((folder / f"{node}.pid").exists() and (folder / f"{node}.pid").read_text() for node in (0, 1)))
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_F33_a_stop_signal_reaches_every_host_and_their_code_is_kept(fake, tmp_path, number) -> None:
    process = outside(fake, tmp_path, *python(SIGNALS))
    process.send_signal(number)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 75 and out.decode() == f"got {int(number)}\n"
    assert not any(lives(int((tmp_path / f"{node}.pid").read_text())) for node in (0, 1))


@pytest.mark.parametrize("stubborn", [False, True])
def test_F32_a_starter_that_is_killed_leaves_nothing_on_any_host(fake, tmp_path, stubborn) -> None:
    text = SIGNALS if not stubborn else SIGNALS.replace("end)", "signal.SIG_IGN)")
    process = outside(dataclasses.replace(fake, grace_seconds=0.5), tmp_path, *python(text))
    process.kill()
    process.wait(10)
    for name in ("0.pid", "1.pid", "ssh_h1", "ssh_h2"):
        until(lambda name=name: not lives(int((tmp_path / name).read_text())))


@pytest.mark.parametrize(("name", "words"), [("gone", "No route to host"), ("deaf", "no answer in 1 s")])
def test_a_host_that_cannot_be_reached_is_named_in_bounded_time(fake, name, words, monkeypatch) -> None:
    monkeypatch.setattr(ssh, "REACH_SECONDS", 1.0 if name == "deaf" else 30.0)
    monkeypatch.setattr(ssh, "CLOSING_SECONDS", 1.0)
    with pytest.raises(ConfigError) as told:
        start(fake, "true", hosts=[HOSTS[0], Host(name, None, 2, "hosts:2")])
    assert f"hosts:2: host {name} cannot be used" in str(told.value) and words in str(told.value) and "true`" in str(told.value)


def test_an_ssh_that_is_not_there_and_a_folder_that_is_not_there(fake, tmp_path, monkeypatch, capfd) -> None:
    with pytest.raises(ConfigError, match="launch.ssh_command.*no-ssh.*install ssh"):
        start(dataclasses.replace(fake, ssh_command=["no-ssh"]), "true")
    monkeypatch.setattr(os, "getcwd", lambda: "/nowhere/at/all")
    assert start(fake, "true") == 2
    assert "/nowhere/at/all: No such file or directory; the folder of the starter must exist" in capfd.readouterr().err


def config(tmp_path: Path, text: str, *overrides: str):
    (tmp_path / "hosts").write_text(text)
    return compose(["launch.kind=ssh", f"launch.hostfile={tmp_path}/hosts", "data=synthetic", *overrides])


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("h1 slots=2\nh2 slots=4\n", [], "hosts:2: h2 has slots=4 and .*hosts:1 slots=2; every host"),
        ("h1 slots=2\nh2\n", [], "hosts:2: h2 has no slots and"),
        ("h1\nh2\n", ["launch.nodes=3"], "launch.nodes=3: the hostfile .*hosts has 2 hosts"),
        ("h1 slots=2\nh2 slots=2\n", ["launch.ranks_per_node=3"], "launch.ranks_per_node=3: .*hosts:1 says slots=2"),
        ("localhost\nh2\n", [], "hosts:1: localhost is where the ranks of h2"),
        ("h1 slots=2\nh2 slots=2\n", ["mesh.dp=3"], "launch.ranks_per_node=2: times launch.nodes=2"),
        ("h1 slots=2\nh2 slots=2\n", ["train.micro_batch=0"], "train.micro_batch=0"),
        ("h1 lots=2\n", [], "hosts:1: 'lots=2'"),
    ],
)
def test_F34_what_can_be_refused_is_refused_before_any_host_is_asked(text, overrides, words, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(ssh, "Connection", None)
    with pytest.raises(ConfigError, match=words):
        ssh.start(config(tmp_path, text, *overrides), [])


def test_ranks_of_each_host(tmp_path) -> None:
    (tmp_path / "hosts").write_text("h1\nh2\n")
    hosts = read_hostfile(tmp_path / "hosts")
    assert ssh.slots_of(hosts, LaunchConfig()) == 0
    assert ssh.slots_of(hosts, LaunchConfig(nodes=2, ranks_per_node=3)) == 3
    assert ssh.slots_of(HOSTS, LaunchConfig()) == 2


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["launch.hostfile=hosts"], "launch.hostfile=hosts: is for launch.kind=ssh"),
        (["launch.kind=ssh"], "launch.kind=ssh: no hosts are given"),
        (["launch.ssh_command=[]"], "launch.ssh_command=\\[\\]: names no program"),
    ],
)
def test_F34_a_hostfile_is_never_ignored(overrides, words) -> None:
    from dist_train.config.check import require

    with pytest.raises(ConfigError, match=words):
        require(compose(overrides), 1)
