"""The ranks of one engine, in processes of their own, and the conductor's side of them.

Engines that are compared share no process: none can change another (DeepSpeed replaces functions of torch itself), and what one
holds is told from what another does. Only one team works at a time; the ranks of the others sleep in a read from a pipe.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import link

TIMEOUT_SECONDS = 300.0
_context = multiprocessing.get_context("forkserver")
# Imported once for all ranks of all teams, which are forked from there.
_context.set_forkserver_preload(["torch", "torch.distributed", "dist_train.zero.engine", "dist_train.model.build"])


class TeamFailure(RuntimeError):
    """A rank raised, died or did not answer."""


class Team:
    """`ranks` processes that make `build(mesh, *arguments)` each and call its methods when asked to.

    With `link_mbit` the two ranks are hosts of their own (`link.py`). `started` must be called before anything else: between
    the two, several teams start side by side.
    """

    def __init__(
        self,
        name: str,
        ranks: int,
        build: Callable[..., Any],
        arguments: Sequence[Any] = (),
        link_mbit: float = 0.0,
        device: str = "cpu",
    ) -> None:
        self.name, self._link_mbit = name, link_mbit
        self._folder = tempfile.TemporaryDirectory(prefix="dist_train_team_")
        self._pipes, self._processes = [], []
        for rank in range(ranks):
            here, there = _context.Pipe()
            place = _Place(rank, ranks, Path(self._folder.name), link_mbit, device)
            process = _context.Process(target=_serve, args=(there, place, build, arguments), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def started(self) -> None:
        """Return when every rank is ready."""
        if self._link_mbit:
            link.lay_cable(*self._answers())
            self._ask("go on")
        self._answers()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What `method` returned on each rank."""
        self._ask((method, arguments))
        return self._answers()

    def _ask(self, question: Any) -> None:
        for pipe in self._pipes:
            pipe.send(question)

    def _answers(self) -> list[Any]:
        found = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_SECONDS):
                raise TeamFailure(f"{self.name}: no answer from rank {rank} in {TIMEOUT_SECONDS:.0f} s")
            try:
                ok, value = pipe.recv()
            except EOFError:
                raise TeamFailure(f"{self.name}: rank {rank} died") from None
            if not ok:
                raise TeamFailure(f"{self.name}: rank {rank} raised\n{value}")
            found.append(value)
        return found

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(10)
        self._folder.cleanup()


@dataclass(frozen=True)
class _Place:
    rank: int
    ranks: int
    folder: Path
    link_mbit: float
    device: str


def _serve(pipe: Any, place: _Place, build: Callable[..., Any], arguments: Sequence[Any]) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to all processes of a group, they are the conductor's to handle
        signal.signal(number, signal.SIG_IGN)
    try:
        if place.link_mbit:
            link.step_aside()
            pipe.send((True, os.getpid()))
            pipe.recv()
            link.plug_in(place.rank, place.link_mbit)
        player = build(_mesh(place), *arguments)
        pipe.send((True, None))
        while True:
            method, given = pipe.recv()
            pipe.send((True, getattr(player, method)(*given)))
    except EOFError:  # the conductor is gone
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def _mesh(place: _Place) -> Any:
    import torch
    import torch.distributed as dist

    from dist_train.mesh.mesh import ParallelMesh
    from dist_train.mesh.shape import MeshShape

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    timeout = timedelta(seconds=TIMEOUT_SECONDS)
    store = f"file://{place.folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=place.rank, world_size=place.ranks, timeout=timeout)
    return ParallelMesh.from_process_group(MeshShape(dp=place.ranks), place.device, timeout_seconds=TIMEOUT_SECONDS)
