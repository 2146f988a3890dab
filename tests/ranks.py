"""Warm pools of gloo ranks for the tests: importing torch eight times on two cores costs 15 s, once a session is enough.

`run_ranks(4, function, *args)` calls the module-level `function(mesh, comm, *args)` on four ranks and returns their
results in rank order. An exception on a rank, a rank that dies and a call that outlasts `timeout` fail the test with the
first traceback; the pool is then rebuilt by the next call.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the ranks of a pool come after it, and import what they need themselves
    from dist_train.mesh.mesh import ParallelMesh
    from dist_train.mesh.shape import MeshShape

_pools: dict[int, _Pool] = {}
_meshes: dict[tuple[MeshShape, tuple[int, ...]], ParallelMesh] = {}  # of this process, which is a rank
COLLECTIVE_TIMEOUT_SECONDS = 15.0


def run_ranks(n: int, function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
    if n == 1:
        from dist_train.comm.collectives import Collectives
        from dist_train.mesh.mesh import ParallelMesh

        return [function(ParallelMesh.single(), Collectives(), *args)]
    pool = _pools.get(n)
    if pool is None:
        pool = _pools[n] = _Pool(n)
    try:
        return pool.call(function, args, timeout)
    except BaseException:
        _pools.pop(n).close()
        raise


def mesh_of(shape: MeshShape, pool: ParallelMesh) -> ParallelMesh:
    """The mesh of these degrees on all ranks of a pool: on each of them it is made once, since groups take long to make."""
    from dist_train.mesh.mesh import ParallelMesh

    key = shape, pool.world.ranks
    if key not in _meshes:
        _meshes[key] = (
            ParallelMesh.single() if pool.world.size == 1 else ParallelMesh.from_process_group(shape, timeout_seconds=60)
        )
    return _meshes[key]


class RankFailure(AssertionError):
    """A rank raised, died or did not answer."""


class _Pool:
    def __init__(self, n: int) -> None:
        context = multiprocessing.get_context("forkserver")  # one process imports torch, the ranks of all pools come from it
        # What some tests import later too: there it would be each rank's 2 s.
        context.set_forkserver_preload(["torch", "dist_train.train.build", "torch._dynamo", "torch.distributed.fsdp"])
        self._folder = tempfile.TemporaryDirectory()
        self._answers: Any = context.Queue()
        self._questions = [context.Queue() for _ in range(n)]
        self._ranks = [
            context.Process(target=_serve, args=(rank, n, self._folder.name, question, self._answers), daemon=True)
            for rank, question in enumerate(self._questions)
        ]
        for process in self._ranks:
            process.start()
        self._collect("start", time.monotonic() + 120.0)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        for question in self._questions:
            question.put((function, args))
        return self._collect(getattr(function, "__name__", repr(function)), time.monotonic() + timeout)

    def _collect(self, what: str, deadline: float) -> list[Any]:
        found: dict[int, Any] = {}
        while len(found) < len(self._ranks):
            try:
                rank, ok, value = self._answers.get(timeout=0.2)
            except queue.Empty:
                dead = [rank for rank, process in enumerate(self._ranks) if not process.is_alive() and rank not in found]
                if dead:
                    raise RankFailure(f"{what}: rank {dead[0]} died with exit code {self._ranks[dead[0]].exitcode}") from None
                if time.monotonic() > deadline:
                    silent = sorted(set(range(len(self._ranks))) - set(found))
                    raise RankFailure(f"{what}: no answer from ranks {silent} in time.\n{self._stacks(silent)}") from None
                continue
            if not ok:
                raise RankFailure(f"{what}: rank {rank} raised\n{value}")
            found[rank] = value
        return [found[rank] for rank in range(len(self._ranks))]

    def _stacks(self, silent: list[int]) -> str:
        import signal

        for rank in silent:
            os.kill(self._ranks[rank].pid or 0, signal.SIGUSR2)
        time.sleep(0.5)
        return "\n".join(f"rank {rank}:\n{Path(self._folder.name, f'stack{rank}').read_text()}" for rank in silent)

    def close(self) -> None:
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.join(5)
        self._folder.cleanup()


def _serve(rank: int, n: int, folder: str, questions: Any, answers: Any) -> None:
    import signal
    import threading

    threading.Thread(target=_end_with_session, daemon=True).start()
    stacks = open(Path(folder, f"stack{rank}"), "w")  # noqa: SIM115 - lives as long as the process
    faulthandler.register(signal.SIGUSR2, stacks, all_threads=True)

    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from dist_train.comm.collectives import Collectives
    from dist_train.mesh.mesh import ParallelMesh
    from dist_train.mesh.shape import MeshShape

    torch.set_num_threads(1)
    timeout = timedelta(seconds=90)  # to find each other, on a machine with other things to do; collectives have their own
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n, timeout=timeout)
    mesh = ParallelMesh.from_process_group(MeshShape(dp=n), timeout_seconds=COLLECTIVE_TIMEOUT_SECONDS)
    answers.put((rank, True, None))
    while True:
        function, args = questions.get()
        try:
            answers.put((rank, True, function(mesh, Collectives(), *args)))
        except BaseException:
            answers.put((rank, False, traceback.format_exc()))
        sys.stdout.flush()


def _end_with_session() -> None:
    session = multiprocessing.parent_process()
    assert session is not None
    session.join()
    os._exit(1)  # it was killed; nobody waits for this rank any more


@atexit.register
def _close_all() -> None:
    for pool in list(_pools.values()):
        pool.close()
    _pools.clear()
