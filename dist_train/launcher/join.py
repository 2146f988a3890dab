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
from dist_train.launcher import guard
from dist_train.launcher.environment import Place, threads_per_rank
from dist_train.launcher.rank import guarded
from dist_train.launcher.report import BAD_INPUT, OK, PREEMPTED

if TYPE_CHECKING:
    from torch.distributed import Store

_REFUSED = "!"  # an absolute path starts otherwise
_LEAVE_SECONDS = 10.0


def join(place: Place, prepare: Callable[[], Path], timeout_seconds: float) -> int:
    """Run this process as the rank `place`; the exit code of this rank.

    `prepare` checks, prepares and makes the run folder; it runs on rank 0 alone, the others get the path or the complaint.
    Raises ConfigError for a job whose ranks cannot find each other, and on rank 0 what `prepare` raised.
    """
    _set_environment(place)
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
        _leave(store, place)
        if place.rank == 0:
            raise ConfigError(answer[len(_REFUSED) :])
        return BAD_INPUT  # rank 0 has the words
    run_dir = Path(answer)
    if place.rank != 0:
        log = str(run_dir / "logs" / f"rank_{place.rank:05d}.log")
        guard.redirect(log, log)
    code = guarded(run_dir, started_here=False)
    if not by_agent and code in (OK, PREEMPTED):
        _leave(store, place)
    return code


def _set_environment(place: Place) -> None:
    """The variables that torchrun would have set, which is all that the mesh reads."""
    if place.address is None or place.port is None:
        raise ConfigError(
            f"{place.by}: nothing in the environment says where rank 0 of {place.world_size} can be met; set MASTER_ADDR to the "
            "host of rank 0 and MASTER_PORT to a free port there, the same on every rank (mpirun -x MASTER_ADDR -x MASTER_PORT)."
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


def _leave(store: Store, place: Place) -> None:
    """Rank 0 hosts the store, so it is the last to go: the others may still need it to leave their groups."""
    count = store.add("left", 1)
    until = time.monotonic() + _LEAVE_SECONDS
    while place.rank == 0 and count < place.world_size and time.monotonic() < until:
        time.sleep(0.05)
        count = store.add("left", 0)
