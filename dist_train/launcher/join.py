"""Become a rank of a job that torchrun, srun or mpirun started: one environment for all three, one run folder for all ranks."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from dist_train.config.compose import ConfigError
from dist_train.launcher import guard, mpi
from dist_train.launcher.environment import Place, threads_per_rank
from dist_train.launcher.logs import last_lines
from dist_train.launcher.rank import guarded
from dist_train.launcher.report import BAD_INPUT, OK, PREEMPTED, failure

if TYPE_CHECKING:
    from torch.distributed import Store

_REFUSED = "!"  # an absolute path starts otherwise
_LEAVE_SECONDS = 10.0


def join(place: Place, prepare: Callable[[], Path], timeout_seconds: float) -> int:
    """Run this process as the rank `place`; the exit code of this rank.

    `prepare` checks, prepares and makes the run folder; it runs on rank 0 alone, the others get the path or the complaint.
    Raises ConfigError for a job whose ranks cannot find each other, and on rank 0 what `prepare` raised.
    """
    world = mpi.connect(place) if place.by == "mpirun" and "MASTER_ADDR" not in os.environ else None
    _set_environment(world.settle(place) if world else place)
    from torch.distributed import PrefixStore, TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    timeout = timedelta(seconds=timeout_seconds)
    # Rank 0 hosts the store here, before the process group does, and for as long as this process lives.
    host = TCPStore(address, port, None, place.rank == 0 and not by_agent, timeout, wait_for_workers=False)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    store = PrefixStore(f"run_folder{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", host)
    if place.rank == 0:
        store.set("answer", _answer(prepare))
    answer = store.get("answer").decode()
    if answer.startswith(_REFUSED):
        if world:
            world.end(BAD_INPUT)
        _leave(store, place, linger=not by_agent)
        if place.rank == 0:
            raise ConfigError(answer[len(_REFUSED) :])
        return BAD_INPUT  # rank 0 has the words
    run_dir = Path(answer)
    log = str(run_dir / "logs" / f"rank_{place.rank:05d}.log")
    terminal = os.dup(2)
    if place.rank != 0:
        guard.redirect(log, log)
    code = guarded(run_dir, started_here=False)
    if not by_agent and code in (OK, PREEMPTED):
        _leave(store, place, linger=code != OK)
    if world:
        world.finish() if code == OK else world.end(code)
    if place.rank != 0 and code not in (OK, PREEMPTED):
        os.write(terminal, f"{failure(place.rank, code, last_lines(log), log)}\n".encode())
    return code


def _set_environment(place: Place) -> None:
    """The variables that torchrun would have set, which is all that the mesh reads."""
    if place.address is None or place.port is None:
        raise ConfigError(
            f"{place.by}: nothing in the environment says where rank 0 of {place.world_size} can be met; set MASTER_ADDR to the "
            "host of rank 0 and MASTER_PORT to a free port there, the same on every rank, or install mpi4py for this mpirun."
        )
    found = {"RANK": place.rank, "WORLD_SIZE": place.world_size, "MASTER_ADDR": place.address, "MASTER_PORT": place.port}
    if place.local_rank is not None:
        found["LOCAL_RANK"] = place.local_rank
    threads = threads_per_rank(os.environ, len(os.sched_getaffinity(0)), place.local_size or 1)
    if threads is not None:
        found["OMP_NUM_THREADS"] = threads
    os.environ.update({name: str(value) for name, value in found.items()})


def _answer(prepare: Callable[[], Path]) -> str:
    try:
        return str(prepare())
    except ConfigError as error:
        return f"{_REFUSED}{error}"
    except Exception:
        return f"{_REFUSED}rank 0 could not prepare the run\n{traceback.format_exc()}"


def _leave(store: Store, place: Place, linger: bool) -> None:
    """Rank 0 hosts the store, so it waits until all have come here: they may still need it to leave their groups.

    `linger`: the others wait for the end of rank 0, who has something to say, because the first to end with a code that is not
    0 has all others killed by mpirun.
    """
    count = store.add("left", 1)
    until = time.monotonic() + _LEAVE_SECONDS
    if linger and place.rank != 0:
        guard.redirect(os.devnull, os.devnull)  # where torch reports in a page that rank 0 has gone
    try:
        while (count < place.world_size if place.rank == 0 else linger) and time.monotonic() < until:
            time.sleep(0.05)
            count = store.add("left", 0)
    except RuntimeError:  # torch's errors of a store whose host is gone
        pass
