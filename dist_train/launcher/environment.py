"""Which launcher, if any, this process was started by, and its place among the ranks. Pure: reads the mapping it is given."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from dist_train.config.compose import ConfigError
from dist_train.launcher.hosts import expand_nodes


@dataclass(frozen=True)
class Place:
    """One rank of a job that somebody else started. `address` and `port`: where rank 0 can be met; None if nothing says so."""

    by: str  # torchrun | mpirun | srun
    rank: int
    world_size: int
    local_rank: int | None
    local_size: int | None
    address: str | None
    port: int | None


@dataclass(frozen=True)
class NodePlace:
    """One node of several, which starts its own ranks; `address` and `port`: where node 0 can be met."""

    VARIABLES: ClassVar = ("DIST_TRAIN_NODES", "DIST_TRAIN_NODE_RANK", "DIST_TRAIN_RENDEZVOUS")
    node: int
    nodes: int
    address: str
    port: int


def detect_node(env: Mapping[str, str]) -> NodePlace | None:
    """The place of a node that DIST_TRAIN_NODES, DIST_TRAIN_NODE_RANK and DIST_TRAIN_RENDEZVOUS (HOST:PORT) give, else None.

    Raises ConfigError when one of the three is missing or makes no sense.
    """
    given = {name: env[name] for name in NodePlace.VARIABLES if name in env}
    if not given:
        return None
    if missing := [name for name in NodePlace.VARIABLES if name not in given]:
        raise ConfigError(f"{', '.join(missing)}: not set, but {', '.join(given)} is; a node needs all three.")
    nodes, node, where = given.values()
    for name in NodePlace.VARIABLES[:2]:
        if not given[name].strip().isdecimal():
            raise ConfigError(f"{name}={given[name]!r}: must be a number; set it right.")
    if int(nodes) == 0:
        raise ConfigError("DIST_TRAIN_NODES=0: there is at least one node; set it right.")
    if int(node) >= int(nodes):
        raise ConfigError(f"DIST_TRAIN_NODE_RANK={node}: nodes count from 0 to DIST_TRAIN_NODES-1 = {int(nodes) - 1}.")
    host, _, port = where.strip().rpartition(":")
    if not host.strip("[]") or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"DIST_TRAIN_RENDEZVOUS={where!r}: is not HOST:PORT; give the name of node 0 and a free port on it.")
    return NodePlace(int(node), int(nodes), host.strip("[]"), int(port))


def node_of_step(env: Mapping[str, str], place: Place | None, nodes: int, ranks: int) -> NodePlace | None:
    """`place` read as a node, where srun started one task on each of launch.nodes=`nodes` nodes for more `ranks` than tasks."""
    if place is None or place.by != "srun" or place.world_size != nodes or ranks == nodes or place.address is None:
        return None
    if env.get("SLURM_STEP_NUM_NODES", str(nodes)) != str(nodes) or place.port is None:
        return None
    return NodePlace(place.rank, nodes, place.address, place.port)


def detect(env: Mapping[str, str], parent: int = 0) -> Place | None:
    """The place that torchrun, Open MPI, MPICH (or Intel MPI) or srun gave this process, else None.

    MPI is asked before Slurm, because mpirun inside an allocation starts its helpers with srun and their numbers are
    inherited. One task of mpirun or srun is no world to join: that task starts its own ranks. `parent` (a process id)
    tells apart jobs of MPICH on one node. Raises ConfigError for values that are not numbers or contradict each other.
    """
    if "RANK" in env and "WORLD_SIZE" in env:
        return _place("torchrun", env, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "")
    if "OMPI_COMM_WORLD_RANK" in env and "OMPI_COMM_WORLD_SIZE" in env:
        rank, size, local_rank, local_size = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
        job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or str(parent)
        return _unless_alone(_place("mpirun", env, rank, size, local_rank, local_size, job))
    by_hydra = "MPI_LOCALRANKID" in env or "SLURM_PROCID" not in env  # srun itself may set PMI_RANK too
    if "PMI_RANK" in env and "PMI_SIZE" in env and by_hydra:
        return _unless_alone(_place("mpirun", env, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", str(parent)))
    in_step = env.get("SLURM_STEP_ID", "").isdigit() and "SLURM_PTY_PORT" not in env  # a batch script is no task of a step
    if in_step and "SLURM_PROCID" in env and ("SLURM_STEP_NUM_TASKS" in env or "SLURM_NTASKS" in env):
        size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
        job = f"{env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}"
        return _unless_alone(_place("srun", env, "SLURM_PROCID", size, "SLURM_LOCALID", "", job))
    return None


def threads_per_rank(env: Mapping[str, str], cores: int, ranks: int) -> str | None:
    """OMP_NUM_THREADS for each of `ranks` ranks that share `cores` cores; None where the user has set it."""
    return None if env.get("OMP_NUM_THREADS") else str(max(1, cores // max(1, ranks)))


def _place(by: str, env: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str, job: str) -> Place:
    def number(name: str) -> int | None:
        if name not in env:
            return None
        if not env[name].strip().isdigit():
            raise ConfigError(f"{name}={env[name]!r}: the environment of {by} must hold a number here; unset it or set it right.")
        return int(env[name])

    r, n, local_r, local_n = number(rank), number(size), number(local_rank), number(local_size)
    assert r is not None and n is not None
    if r >= n:
        raise ConfigError(f"{rank}={r}: ranks count from 0 to {size}-1 = {n - 1}; correct the environment of {by}.")
    address = env.get("MASTER_ADDR")
    if address is None and by == "srun":
        nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
        address = expand_nodes(nodes)[0] if nodes else None
    if address is None and (local_n == n or n == 1):
        address = "127.0.0.1"
    port = number("MASTER_PORT")
    if port is None and job:
        port = 20000 + zlib.crc32(job.encode()) % 12000  # below the ports that systems hand out; the same on every rank
    return Place(by, r, n, local_r, local_n, address, port)


def _unless_alone(place: Place) -> Place | None:
    return place if place.world_size > 1 else None
