from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from dist_train.checkpoint import CheckpointError, rng, save
from dist_train.comm.collectives import Collectives
from dist_train.mesh.mesh import ParallelMesh
from tests.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def streams_as_before():
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def draw(generator):
    """Eight numbers of each stream, Gaussians among them: they come in pairs of which the second is kept back."""
    return (
        [random.random() for _ in range(8)] + [random.gauss(0, 1) for _ in range(3)],
        np.random.rand(8).tolist() + [np.random.normal() for _ in range(3)],
        torch.rand(8).tolist() + torch.randn(3).tolist(),
        torch.rand(8, generator=generator).tolist(),
    )


def test_F20_every_stream_goes_on_where_it_was():
    generator = torch.Generator().manual_seed(3)
    rng.reseed(1, 2, 3, CPU)
    for _ in range(2):  # an odd number of Gaussians each time: with and without one kept back
        random.gauss(0, 1), np.random.normal()
        streams = rng.capture(CPU, {"tp": generator})
        assert {name: state.dtype for name, state in streams.items()} == dict.fromkeys(
            ("python", "numpy", "torch", "tp"), torch.uint8
        )
        expected = draw(generator)
        assert draw(generator) != expected
        rng.restore(streams, CPU, {"tp": generator})
        assert draw(generator) == expected


def test_a_captured_stream_does_not_follow_later_draws():
    streams = rng.capture(CPU)
    copy = {name: state.clone() for name, state in streams.items()}
    draw(torch.Generator())
    assert all(torch.equal(streams[name], copy[name]) for name in copy)


@pytest.mark.parametrize("stream", ["python", "numpy", "torch"])
def test_a_missing_or_malformed_stream_is_refused(stream):
    streams = rng.capture(CPU)
    for bad in ({k: v for k, v in streams.items() if k != stream}, {**streams, stream: streams[stream][:-8].clone()}):
        with pytest.raises(CheckpointError, match="random streams do not fit"):
            rng.restore(bad, CPU)


def test_seeding_depends_on_seed_step_rank_and_stream_alone():
    def seeded(*where):
        generators = {"a": torch.Generator(), "b": torch.Generator()}
        rng.reseed(*where, CPU, generators)
        return [*draw(generators["a"]), torch.rand(8, generator=generators["b"]).tolist()]

    base = seeded(1, 2, 3)
    assert seeded(1, 2, 3) == base
    for other in ((0, 2, 3), (1, 0, 3), (1, 2, 0), (-1, 2, 3), (2**63, 2, 3)):
        assert all(a != b for a, b in zip(seeded(*other), base))
    assert len({tuple(numbers) for numbers in base}) == 5  # no two streams share a seed


def save_then_resume(mesh, comm, root):
    generator = torch.Generator()
    named = {"dropout": generator}
    rng.reseed(7, 0, mesh.rank, mesh.device, named)
    draw(generator)
    path = save(root, 4, rng.pieces(mesh.rank, rng.capture(mesh.device, named)), {}, comm, mesh.world)
    expected = draw(generator)
    draw(generator)
    restored = rng.resume(path, mesh.rank, mesh.rank, True, 7, 4, mesh.device, named)
    return restored, draw(generator) == expected, expected


def test_F20_each_rank_resumes_with_its_own_streams(tmp_path):
    results = run_ranks(2, save_then_resume, tmp_path)
    assert [result[:2] for result in results] == [(True, True)] * 2
    assert all(a != b for a, b in zip(results[0][2], results[1][2]))


def test_F20_a_changed_layout_seeds_by_the_stated_rule(tmp_path):
    path = save(tmp_path, 4, rng.pieces(0, rng.capture(CPU)), {}, Collectives(), ParallelMesh.single().world)
    generator = torch.Generator().manual_seed(0)
    for rank, same_layout in ((0, False), (1, True)):  # another layout; a rank that was not saved
        rng.reseed(7, 4, rank, CPU)
        expected = draw(generator)
        generator.manual_seed(0)
        assert rng.resume(path, rank, rank, same_layout, 7, 4, CPU) is False
        assert draw(generator) == expected
        generator.manual_seed(0)
