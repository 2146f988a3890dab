"""A real Slurm on the hosts of `hosts.py`: munge, slurmctld on h1 and a slurmd with eight make-believe GPUs on each host.

Two partitions: `main`, whose jobs are requeued when one of `high` needs their nodes. A silent node is down after ten seconds.
"""

from __future__ import annotations

import os
import secrets
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.hosts import Hosts, hosts

_CONF = """
ClusterName=test
SlurmctldHost=h1(10.77.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/run/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
SlurmdTimeout=10
MinJobAge=600
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
GresTypes=gpu
PartitionName=main Nodes=h[1-{count}] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20 PreemptMode=REQUEUE
PartitionName=high Nodes=h[1-{count}] Default=NO MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
_NODE = (
    "NodeName=h{number} NodeAddr=10.77.0.{number} CPUs=64 Sockets=1 CoresPerSocket=64 ThreadsPerCore=1 RealMemory=900000 "
    "Gres=gpu:8 Feature=h100 State=UNKNOWN\n"
)


class Slurm:
    """A cluster that runs. Commands are run on h1, where slurmctld is."""

    def __init__(self, up: Hosts, folder: Path) -> None:
        self.hosts, self.folder = up, folder
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}

    def run(
        self, *argv: str, seconds: float = 60.0, cwd: Path | None = None, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.hosts.run(1, list(argv), seconds, {**self.env, **(env or {})}, cwd)

    def ask(self, *argv: str) -> str:
        """What a command of Slurm prints."""
        done = self.run(*argv)
        assert done.returncode == 0, done
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """The fields of a job as `scontrol show job` has them: JobState, ExitCode, Restarts …"""
        words = self.ask("scontrol", "show", "job", "-o", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, seconds: float = 120.0) -> dict[str, str]:
        """Until the job has ended for good; the last look at it."""
        until = time.monotonic() + seconds
        while (found := self.job(number))["JobState"] not in ("COMPLETED", "FAILED", "CANCELLED"):
            assert time.monotonic() < until, f"{found}\n{self.logs()}"
            time.sleep(0.3)
        return found

    def logs(self) -> str:
        """The last lines of the daemons' logs."""
        return "\n".join(path.name + "\n" + path.read_text()[-2000:] for path in (self.folder / "log").iterdir())

    def start_node(self, number: int) -> None:
        done = self.hosts.run(number, ["slurmd"], env=self.env)
        assert done.returncode == 0, done

    def wait_for_nodes(self, seconds: float = 40.0) -> None:
        until = time.monotonic() + seconds
        while self.run("sinfo", "-h", "-p", "main", "-t", "idle,alloc,mix", "-o", "%D").stdout.split() != [str(self.hosts.count)]:
            assert time.monotonic() < until, self.run("sinfo", "-N").stdout + self.logs()
            time.sleep(0.2)


@contextmanager
def slurm(count: int, folder: Path) -> Iterator[Slurm]:
    """A cluster of `count` nodes with all its state in `folder`; at the end nothing of it is left."""
    folder.chmod(0o755)
    for name in ("run", "log", "spool", "state", "dev"):
        (folder / name).mkdir()
    for number in range(8):
        os.mknod(folder / "dev" / f"nvidia{number}", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/dev/nvidia[0-7]\n")
    nodes = "".join(_NODE.format(number=number) for number in range(1, count + 1))
    (folder / "slurm.conf").write_text(_CONF.format(folder=folder, count=count) + nodes)
    key = folder / "run" / "munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o600)
    with hosts(count) as up:
        cluster = Slurm(up, folder)
        run = folder / "run"
        munged = ["munged", "--force", f"--key-file={key}", f"--socket={run}/munge.sock", f"--pid-file={run}/munged.pid"]
        munged += [f"--log-file={folder}/log/munged.log", f"--seed-file={run}/munge.seed"]
        for number, command in [(1, munged), (1, ["slurmctld", "-c"])]:
            done = up.run(number, command, env=cluster.env)
            assert done.returncode == 0, (command, done)
        for number in range(1, count + 1):
            cluster.start_node(number)
        cluster.wait_for_nodes()
        yield cluster
