"""Find the other ranks of this job, or start some here, and check all of them together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, Store, TCPStore

from dist_train.config.compose import ConfigError
from dist_train.launcher import environment, guard
from dist_train.launcher.checkup.machine import Report, examine
from dist_train.launcher.checkup.meeting import Allocation, attend, lead
from dist_train.launcher.rendezvous import port_error

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Seat:
    """One process of several. Nodes that start their own ranks count as ranks here: one check-up a node."""

    rank: int
    size: int
    address: str
    port: int


def find_seat(env: Mapping[str, str], parent: int = 0) -> Seat | None:
    """The place that a launcher gave this process among several, None when it is alone. Raises ConfigError."""
    node = environment.detect_node(env)
    if node is not None:
        return Seat(node.node, node.nodes, node.address, node.port) if node.nodes > 1 else None
    place = environment.detect(env, parent)
    if place is None or place.world_size == 1:
        return None
    if place.address is None or place.port is None:
        raise ConfigError(
            f"{place.by}: nothing in the environment says where rank 0 of {place.world_size} can be met; set MASTER_ADDR to the "
            "host of rank 0 and MASTER_PORT to a free port there, the same on every rank (mpirun -x MASTER_ADDR -x MASTER_PORT)."
        )
    return Seat(place.rank, place.world_size, place.address, place.port)


def check_allocation(seat: Seat, run_dir: Path | None, seconds: float) -> Allocation | None:
    """Meet the others and compare. What rank 0 knows in the end; None on the others.

    Raises ConfigError on rank 0 when its port is taken, and DistStoreError on another that does not find or loses rank 0.
    """
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"doctor{attempt}", _connect(seat, seat.rank == 0 and not hosted, seconds))
    look = _look(run_dir, seat.size)
    if seat.rank == 0:
        return lead(store, seat.size, seat.address, look, run_dir, seconds)
    attend(store, seat.rank, seat.address, look, seconds)
    return None


def check_here(ranks: int, run_dir: Path | None, seconds: float, words: list[str]) -> Allocation:
    """Start `ranks` - 1 ranks on this machine, be rank 0, and end them. `words`: arguments of `dist-train doctor` for them."""
    store = TCPStore(_LOOPBACK, 0, None, True, timedelta(seconds=seconds), wait_for_workers=False)
    with _started(ranks, store.port, words):
        return lead(PrefixStore("doctor0", store), ranks, _LOOPBACK, _look(run_dir, ranks), run_dir, seconds)


def _look(run_dir: Path | None, size: int) -> partial[Report]:
    return partial(_examine, run_dir, size)


def _examine(run_dir: Path | None, size: int, peer: str, first: bool) -> Report:
    return examine(run_dir, peer, size, first)


def _connect(seat: Seat, hosts: bool, seconds: float) -> Store:
    try:
        return TCPStore(seat.address, seat.port, None, hosts, timedelta(seconds=seconds), wait_for_workers=False)
    except (DistNetworkError, DistStoreError) as error:
        if hosts:
            raise port_error(seat.port, error) from error
        why = str(error).splitlines()[0]
        raise DistStoreError(f"rank 0 was not reached at {seat.address}:{seat.port} in {seconds:g} s ({why})") from error


@contextmanager
def _started(ranks: int, port: int, words: list[str]) -> Iterator[None]:
    """Ranks 1, 2 … of a job of this machine; they end with this process, however it ends."""
    command = [sys.executable, "-I", "-S", guard.__file__, sys.executable, "-m", "dist_train.cli.main", "doctor", *words]
    threads = environment.threads_per_rank(os.environ, len(os.sched_getaffinity(0)), ranks)
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(port), guard.LAUNCHER: str(os.getpid())}
    shared |= {} if threads is None else {"OMP_NUM_THREADS": threads}
    started = []
    try:
        for rank in range(1, ranks):
            mine = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(subprocess.Popen(command, env=mine, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))
        yield
        for process in started:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                break  # one that was lost; it is named in what was found
    finally:
        for process in started:
            process.kill()
            process.wait()


def say_lost(seat: Seat, error: Exception) -> None:
    print(f"dist-train doctor: rank {seat.rank} ({socket.gethostname()}): {error}", file=sys.stderr, flush=True)
