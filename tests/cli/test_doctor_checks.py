"""The verdicts of `dist-train doctor` about one machine: pure functions of what was read."""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path

import pytest

from dist_train.launcher.checkup import limits, machine, network, storage
from dist_train.launcher.checkup.check import BAD, OK, WARN, Check, bytes_text, lines, shown_environment, verdict, worst
from dist_train.launcher.checkup.network import Interface

GIB = 2**30
LO, ETH, IB = Interface("lo", "127.0.0.1", loopback=True), Interface("eth0", "10.0.0.5"), Interface("ib0", "10.1.0.5")
DOCKER, DOWN = Interface("docker0", "172.17.0.1"), Interface("eth1", "10.2.0.5", up=False)


def test_the_worst_state_wins_and_only_what_is_not_ok_shows_its_remedy():
    checks = [Check("a", OK, "1", "never shown"), Check("long", BAD, "2", "do this"), Check("c", WARN, "3")]
    assert (worst(checks), worst(checks[:1]), worst([])) == (BAD, OK, OK)
    assert verdict(checks) == "1 ok, 1 warn, 1 bad"
    assert lines(checks) == ["ok    a     1", "bad   long  2", "            -> do this", "warn  c     3"]
    assert [bytes_text(count) for count in (5, 2048, GIB * 1.5, 2**41)] == ["5 B", "2.0 KiB", "1.5 GiB", "2.0 TiB"]


def test_the_environment_is_chosen_by_prefix_and_secrets_are_masked():
    env = {"OMP_NUM_THREADS": "2", "HOME": "/root", "NCCL_API_KEY": "s", "TORCH_HOME": "/x", "DIST_TRAIN_PASSWORD": "s"}
    assert shown_environment(env) == {
        "DIST_TRAIN_PASSWORD": "***",
        "NCCL_API_KEY": "***",
        "OMP_NUM_THREADS": "2",
        "TORCH_HOME": "/x",
    }


@pytest.mark.parametrize(
    "check, state, text",
    [
        (limits.shared_memory(8 * GIB, 8 * GIB, 4), OK, "8.0 GiB free"),
        (limits.shared_memory(GIB / 16, GIB / 16, 0), WARN, "--shm-size=8g"),
        (limits.shared_memory(GIB / 16, GIB / 16, 2), BAD, "SIGBUS"),
        (limits.shared_memory(8 * GIB, 0, 2), BAD, "0 B free"),
        (limits.open_files(1024, 8), WARN, "ulimit -n 65536"),
        (limits.open_files(4096, 8), OK, "8 ranks need about 304"),
        (limits.open_files(4096, 1024), BAD, "1024 ranks need about 6400"),
        (limits.open_files(math.inf, 1024), OK, "unlimited"),
        (limits.locked_memory(8 * 2**20, False), OK, "no RDMA device"),
        (limits.locked_memory(8 * 2**20, True), BAD, "ulimit -l unlimited"),
        (limits.locked_memory(math.inf, True), OK, "unlimited"),
        (limits.processes(1024), WARN, "ulimit -u"),
        (limits.core_files(math.inf, False), WARN, "ulimit -c 0"),
        (limits.core_files(math.inf, True), OK, "to a program"),
        (limits.core_files(0, False), OK, "none"),
        (limits.memory(16 * GIB, math.inf), OK, "16.0 GiB available"),
        (limits.memory(16 * GIB, GIB), WARN, "cgroup limit 1.0 GiB"),
        (limits.cores(64, 8.0, ""), WARN, "OMP_NUM_THREADS=8"),
        (limits.cores(64, 8.0, "8"), OK, "OMP_NUM_THREADS=8"),
        (limits.cores(64, math.inf, ""), OK, "64 to run on"),
        (machine.accelerators(8, 8, "13.0", None), OK, "8 usable of 8"),
        (machine.accelerators(0, 0, None, None), OK, "CPU only"),
        (machine.accelerators(0, 8, None, None), WARN, "CPU build"),
        (machine.accelerators(0, 8, "13.0", ""), WARN, "CUDA_VISIBLE_DEVICES"),
        (machine.accelerators(0, 8, "13.0", None), BAD, "driver is older than CUDA 13.0"),
        (machine.clock(5), WARN, "chrony"),
        (machine.clock(0), OK, "kept by NTP"),
        (storage.room("d", "", "ext4", 100 * GIB, 10**6, 10**6), OK, "100.0 GiB free"),
        (storage.room("d", "", "ext4", 5 * GIB, 10**6, 10**6), WARN, "checkpoint.keep=1"),
        (storage.room("d", "", "ext4", GIB / 2, 10**6, 10**6), BAD, "512.0 MiB"),
        (storage.room("d", "", "ext4", 100 * GIB, 50, 10**6), BAD, "50 inodes"),
        (storage.room("d", "", "btrfs", 100 * GIB, 0, 0), OK, "btrfs"),
        (storage.room("d", "", "tmpfs", 100 * GIB, 10**6, 10**6), WARN, "gone after a reboot"),
        (storage.writing(500 * 2**20, 0.002), OK, "2.0 ms"),
        (storage.writing(5 * 2**20, 0.002), WARN, "checkpoint.every"),
        (storage.writing(500 * 2**20, 0.5), WARN, "500.0 ms"),
        (network.port_range(32768, 60999, 100), OK, "100 of them"),
        (network.port_range(32768, 60999, 20000), WARN, "ss -tan"),
        (network.port_range(1024, 65535, 10), WARN, "MASTER_PORT"),
        (network.own_name("n1", ["10.0.0.5"], True, {}), OK, "10.0.0.5"),
        (network.own_name("n1", ["127.0.1.1"], True, {}), BAD, "/etc/hosts"),
        (network.own_name("n1", ["127.0.1.1"], False, {}), WARN, "for several hosts"),
        (network.own_name("n1", [], True, {"GLOO_SOCKET_IFNAME": "eth0"}), WARN, "not known"),
    ],
)
def test_a_verdict_says_the_value_and_the_remedy(check, state, text):
    assert check.state == state and text in f"{check.value} {check.remedy}"
    assert (check.state == OK) == (not check.remedy) or check.name in ("shared memory /dev/shm", "own name")
    assert state == OK or check.remedy


@pytest.mark.parametrize(
    "found, own, env, gloo, nccl",
    [
        ([LO, ETH], ["10.0.0.5"], {}, ETH, ETH),
        ([LO, ETH], ["127.0.1.1"], {}, LO, ETH),
        ([LO, ETH], [], {}, LO, ETH),
        ([LO, DOCKER, ETH, IB], ["10.0.0.5"], {}, ETH, IB),
        ([LO, DOCKER], ["172.17.0.1"], {}, DOCKER, DOCKER),
        ([LO, DOWN], ["10.2.0.5"], {}, DOWN, LO),
        ([LO, ETH, IB], ["127.0.0.1"], {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}, ETH, ETH),
        ([LO, DOCKER, ETH], ["10.0.0.5"], {"NCCL_SOCKET_IFNAME": "^docker,lo", "GLOO_SOCKET_IFNAME": "eno1"}, None, ETH),
        ([LO, ETH], [], {"NCCL_SOCKET_IFNAME": "=eth"}, LO, None),
    ],
)
def test_which_interface_gloo_and_nccl_take(found, own, env, gloo, nccl):
    assert network.gloo_takes(found, own, env) == gloo and network.nccl_takes(found, env) == nccl


@pytest.mark.parametrize(
    "takes, way, found, peer, state, text",
    [
        (ETH, ETH, [LO, ETH], "n2", OK, "leads eth0"),
        (LO, ETH, [LO, ETH], "n2", BAD, "export GLOO_SOCKET_IFNAME=eth0"),
        (DOCKER, ETH, [LO, DOCKER, ETH], "n2", WARN, "export GLOO_SOCKET_IFNAME=eth0"),
        (ETH, None, [LO, ETH], "n2", BAD, "ip route get n2"),
        (LO, None, [LO, ETH], "", WARN, "for several hosts export GLOO_SOCKET_IFNAME=eth0"),
        (DOCKER, None, [LO, DOCKER, ETH], "", WARN, "bridge"),
        (LO, None, [LO], "", OK, "lo"),
        (ETH, LO, [LO, ETH], "localhost", OK, "leads lo"),
        (None, None, [LO, ETH], "", BAD, "GLOO_SOCKET_IFNAME names no interface"),
    ],
)
def test_what_is_said_of_the_choice(takes, way, found, peer, state, text):
    check = network.interface_choice("gloo", takes, way, found, peer)
    assert check.state == state and text in f"{check.value} {check.remedy}"


def test_this_machine_has_a_loopback_interface_and_its_peer_is_itself():
    found = network.interfaces()
    loopback = next(each for each in found if each.loopback)
    assert (loopback.name, loopback.address, loopback.up) == ("lo", "127.0.0.1", True)
    assert network.leads_to("127.0.0.1", found) == loopback
    assert network.leads_to("no-such-host.invalid", found) is None
    assert network.addresses_of("localhost") == ["127.0.0.1"]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert network._used(port, port) == 1


def test_the_limits_of_cgroups_are_those_of_the_whole_path(tmp_path):
    inner = tmp_path / "job" / "step"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (tmp_path / "job" / "memory.max").write_text(f"{4 * GIB}\n")
    (inner / "cpu.max").write_text("150000 100000\n")
    (tmp_path / "job" / "cpu.max").write_text("max 100000\n")
    assert limits.memory_limit(tmp_path, "0::/job/step\n") == 4 * GIB
    assert limits.cpu_quota(tmp_path, "0::/job/step\n") == 1.5
    assert limits.memory_limit(tmp_path, "0::/elsewhere\n") == math.inf
    one = tmp_path / "memory" / "job"
    one.mkdir(parents=True)
    (one / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert limits.memory_limit(tmp_path, "4:memory:/job\n") == math.inf
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(str(2 * GIB))
    assert limits.memory_limit(tmp_path, "4:memory:/job\n") == 2 * GIB
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert limits.cpu_quota(tmp_path, "1:cpu,cpuacct:/\n") == math.inf


def test_the_driver_and_the_file_system_are_read_from_what_the_kernel_writes(tmp_path):
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version: gcc 12\n"
    assert (machine.driver(text), machine.driver("")) == ("550.54.15", "none")
    mounts = "21 1 8:1 / / rw - ext4 /dev/sda rw\n22 21 0:9 / /data rw - nfs4 host:/x rw\n23 21 0:9 / /data2 rw - lustre x rw\n"
    for folder, kind in (("/data/run", "nfs4"), ("/data", "nfs4"), ("/data2/x", "lustre"), ("/database", "ext4")):
        assert storage.filesystem(Path(folder), mounts) == kind


def test_a_run_folder_is_written_to_and_left_as_it_was(tmp_path):
    before = sorted(os.listdir(tmp_path))
    room, writing = storage.storage(tmp_path / "not" / "yet")
    assert sorted(os.listdir(tmp_path)) == before
    assert str(tmp_path) in room.value and "/s, a small file in" in writing.value


def test_a_file_in_the_way_of_a_run_folder_is_bad(tmp_path):
    (tmp_path / "file").write_text("")
    (check,) = storage.storage(tmp_path / "file" / "run")
    assert check.state == BAD and "cannot be written" in check.value
