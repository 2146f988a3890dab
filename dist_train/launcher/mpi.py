"""What MPI itself tells the ranks of an mpirun that its environment does not: where rank 0 is, and who shares a host.

mpi4py must belong to the MPI of that mpirun (its wheels find Open MPI and MPICH by themselves). Training talks over torch's own
backends; MPI stays open for the end of a rank, at which mpirun learns how the job ended.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import socket
import sys
import time
from typing import Any

from dist_train.launcher.environment import Place
from dist_train.launcher.remote import free_port

_BYTES = 1024  # of the message that names rank 0's host and port
_PASSED_ON_SECONDS = 0.5  # in which mpirun reads what a rank has said


def connect(place: Place) -> World | None:
    """Take part in the MPI job of this rank; None without mpi4py, or with one that belongs to another MPI than mpirun.

    The latter is known by its numbers: it believes each rank to be alone.
    """
    try:
        import mpi4py

        mpi4py.rc.finalize = False  # at exit it would wait for the other ranks, which a rank that failed is to end
        from mpi4py import MPI
    except (ImportError, RuntimeError):  # the latter: no MPI library is found
        return None
    world = World(MPI)
    if (world.rank, world.size) == (place.rank, place.world_size):
        return world
    world.finish()
    return None


class World:
    """All ranks of one mpirun. `settle` and `finish` are called by all of them, in this order."""

    def __init__(self, mpi: Any) -> None:
        self._mpi, self._all = mpi, mpi.COMM_WORLD
        self.rank, self.size = self._all.Get_rank(), self._all.Get_size()

    def settle(self, place: Place) -> Place:
        """`place` with the address of rank 0, a free port there (MASTER_PORT where it is set) and the ranks of this host."""
        here = self._all.Split_type(self._mpi.COMM_TYPE_SHARED)
        message = bytearray(_BYTES)
        if self.rank == 0:
            port = place.port if "MASTER_PORT" in os.environ else free_port()
            text = json.dumps([socket.gethostname(), port]).encode()
            message[: len(text)] = text
        self._all.Bcast([message, self._mpi.BYTE], 0)
        address, port = json.loads(message.rstrip(b"\0"))
        local_rank, local_size = here.Get_rank(), here.Get_size()
        here.Free()
        if local_size == self.size:
            address = "127.0.0.1"  # no name needs to be known
        return dataclasses.replace(place, address=address, port=port, local_rank=local_rank, local_size=local_size)

    def finish(self) -> None:
        """Wait for all ranks and take leave of MPI: from here on nobody's end is a failure."""
        self._mpi.Finalize()

    def end(self, code: int) -> None:
        """At exit this process ends the job with `code`: an exit code alone means something else to each MPI."""
        atexit.register(self._abort, code)

    def _abort(self, code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_PASSED_ON_SECONDS)  # MPICH forgets what it has not read by then
        self._all.Abort(code)
