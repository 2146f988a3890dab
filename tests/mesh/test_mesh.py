from __future__ import annotations

import time

import pytest
import torch

from dist_train.mesh.mesh import ParallelMesh
from dist_train.mesh.shape import MeshShape
from tests.ranks import run_ranks


def _split(mesh, comm, replicas):
    shards, across = mesh.split_data(replicas)
    return shards.ranks, shards.index, across.ranks, across.index


def test_data_ranks_split_into_runs_of_neighbours_and_replicas_across_them():
    assert run_ranks(4, _split, 2) == [
        ((0, 1), 0, (0, 2), 0), ((0, 1), 1, (1, 3), 0), ((2, 3), 0, (0, 2), 1), ((2, 3), 1, (1, 3), 1),
    ]  # fmt: skip
    assert run_ranks(4, _split, 1) == [((0, 1, 2, 3), rank, (rank,), 0) for rank in range(4)]
    assert run_ranks(4, _split, 4) == [((rank,), 0, (0, 1, 2, 3), rank) for rank in range(4)]


def test_runs_that_do_not_come_out_equal_are_refused():
    with pytest.raises(AssertionError, match="does not divide the 4 data ranks"):
        run_ranks(4, _split, 3)


def _stalls(mesh, comm, seconds):
    short = ParallelMesh.from_process_group(MeshShape(dp=mesh.world.size), timeout_seconds=seconds)
    waited = {}
    for group in (short.world, short.dp, *short.split_data(2)):
        comm.barrier(mesh.world)
        if mesh.rank == 3:
            time.sleep(3 * seconds)
        elif 3 in group.ranks:
            started = time.monotonic()
            with pytest.raises(RuntimeError):
                comm.all_reduce(torch.ones(4), group).wait()
            waited[group.axis] = time.monotonic() - started
    return waited


def test_U04_the_timeout_reaches_every_group():
    results = run_ranks(4, _stalls, 1.0)
    assert {axis for waited in results for axis in waited} == {"world", "dp", "shard", "replica"}
    assert all(0.5 < waited < 10 for found in results for waited in found.values())


def test_a_mesh_that_is_not_the_world_is_refused_with_both_numbers(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match=r"has 4 ranks but the launcher started 6"):
        ParallelMesh.from_environment(dp=4)
