from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_train.mesh.shape import AXES, MeshShape

degrees = st.integers(1, 4)


@given(degrees, degrees, degrees, degrees)
def test_rank_and_coordinates_are_inverse(pp, dp, cp, tp):
    shape = MeshShape(pp, dp, cp, tp)
    assert [shape.rank(**shape.coordinates(rank)) for rank in range(shape.size)] == list(range(shape.size))


@given(degrees, degrees, degrees, degrees, st.sets(st.sampled_from(AXES), min_size=1))
def test_groups_partition_the_ranks_and_differ_only_on_their_axes(pp, dp, cp, tp, axes):
    shape = MeshShape(pp, dp, cp, tp)
    groups = shape.groups(sorted(axes))
    assert sorted(rank for group in groups for rank in group) == list(range(shape.size))
    for group in groups:
        places = [shape.coordinates(rank) for rank in group]
        for axis in AXES:
            assert axis in axes or len({place[axis] for place in places}) == 1


def test_tensor_parallel_ranks_are_neighbours():
    assert MeshShape(pp=2, dp=2, tp=2).groups("tp") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert MeshShape(pp=2, dp=2, tp=2).groups("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_degrees_below_one_and_ranks_outside_are_refused():
    with pytest.raises(ValueError, match="mesh.tp=0"):
        MeshShape(tp=0)
    with pytest.raises(ValueError, match="ranks 0..3"):
        MeshShape(dp=4).coordinates(4)
