from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_train.zero.layout import ALIGNMENT, FLAT, WHOLE, Cut, ParamSpec, owned_part, plan_buckets, slot_parts

shapes = st.lists(
    st.tuples(
        st.sampled_from([(), (0,), (1,), (3,), (53,), (7, 5), (64, 64), (3, 0, 2)]),
        st.sampled_from(["float32", "bfloat16"]),
        st.sampled_from(["decay", "no_decay"]),
    ),
    min_size=1,
    max_size=30,
)


cuts = st.sampled_from([FLAT, Cut(block=48), Cut(block=256), WHOLE])


def _specs(drawn, cut=FLAT):
    return [ParamSpec(f"p{i}", shape, dtype, group, cut) for i, (shape, dtype, group) in enumerate(drawn)]


@given(shapes, st.integers(1, 20_000), st.integers(1, 5))
def test_every_parameter_lies_once_in_a_bucket_of_its_dtype_and_group(drawn, bucket_bytes, shards):
    specs = _specs(drawn)
    by_name = {spec.name: spec for spec in specs}
    buckets = plan_buckets(specs, bucket_bytes, 4, shards)
    assert sorted(slot.name for b in buckets for slot in b.slots) == sorted(by_name)
    for bucket in buckets:
        at = 0
        for segment in bucket.segments:
            assert segment.start == at
            for slot in segment.slots:
                spec = by_name[slot.name]
                assert (slot.shape, bucket.dtype, segment.group) == (spec.shape, spec.dtype, spec.group)
                assert slot.start % ALIGNMENT == 0 and at <= slot.start < at + ALIGNMENT
                at = slot.stop
            assert at <= segment.stop < at + ALIGNMENT
            at = segment.stop
        assert at <= bucket.numel < at + shards * ALIGNMENT + (at == 0) * shards * ALIGNMENT
        assert len({segment.group for segment in bucket.segments}) == len(bucket.segments)


@given(shapes, st.integers(1, 20_000), st.integers(1, 5), cuts)
def test_shards_are_equal_aligned_and_cover_the_bucket(drawn, bucket_bytes, shards, cut):
    for bucket in plan_buckets(_specs(drawn, cut), bucket_bytes, 4, shards):
        owned = [bucket.shard(index) for index in range(shards)]
        assert owned[0].start == 0 and owned[-1].stop == bucket.numel
        assert all(a.stop == b.start for a, b in zip(owned, owned[1:], strict=False))
        assert all(cut.stop - cut.start == bucket.shard_numel and cut.start % ALIGNMENT == 0 for cut in owned)
        taken = sorted([(slot.start, slot.stop) for slot in bucket.slots] + [(gap.start, gap.stop) for gap in bucket.padding])
        assert [start for start, _ in taken] == [0, *(stop for _, stop in taken[:-1])] and taken[-1][1] == bucket.numel


@given(shapes, st.integers(1, 20_000), st.integers(1, 5), cuts)
def test_a_cut_falls_where_the_optimizer_allows_it(drawn, bucket_bytes, shards, cut):
    found: dict[str, list[tuple[int, int]]] = {}
    for bucket in plan_buckets(_specs(drawn, cut), bucket_bytes, 4, shards):
        for index in range(shards):
            owned = bucket.shard(index)
            for segment in bucket.segments:
                at = owned_part(segment, owned)
                held = slice(owned.start + at.start, owned.start + at.stop)
                for part in slot_parts(segment.slots, held):
                    assert held.start + part.at.start == part.slot.start + part.first
                    found.setdefault(part.slot.name, []).append((part.first, part.at.stop - part.at.start))
    for spec in _specs(drawn, cut):
        parts = sorted(set(found[spec.name]))
        assert sum(size for _, size in parts) == spec.numel
        assert not cut.whole or len(parts) == 1
        assert all(first % cut.block == 0 for first, _ in parts)


def test_whole_parameters_are_spread_over_the_shards():
    specs = [ParamSpec(f"p{i}", (size,), "float32", "g", WHOLE) for i, size in enumerate([640, 640, 320, 320, 64, 6])]
    (bucket,) = plan_buckets(specs, 1e9, 4, 3)
    assert bucket.shard_numel == 704 and bucket.numel == 3 * 704
    held = [{slot.name for slot in bucket.slots if slot.start // 704 == index} for index in range(3)]
    assert held == [{"p1", "p4"}, {"p0", "p5"}, {"p3", "p2"}]


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_whole_matrices_larger_than_a_bucket_are_packed_together(shards):
    shapes = [(64, 64), (64, 64), (176, 64), (176, 64), (64, 176), (64,)]
    specs = [ParamSpec(f"{i}.{j}", shape, "float32", "g", WHOLE) for i in range(8) for j, shape in enumerate(shapes)]
    buckets = plan_buckets(specs, 1000, 4, shards)
    assert sum(bucket.numel for bucket in buckets) < 1.35 * sum(spec.numel for spec in specs)
    assert max(bucket.numel for bucket in buckets) <= 2 * shards * 176 * 64


@given(shapes, st.integers(1, 20_000))
def test_buckets_stand_in_the_order_in_which_backward_completes_them(drawn, bucket_bytes):
    specs = _specs(drawn)
    place = {spec.name: at for at, spec in enumerate(reversed(specs))}
    done = [max(place[slot.name] for slot in bucket.slots) for bucket in plan_buckets(specs, bucket_bytes, 4, 2)]
    assert done == sorted(done)


def test_buckets_hold_about_the_asked_bytes_and_never_split_a_parameter():
    specs = [ParamSpec(f"p{i}", (100,), "float32", "decay") for i in range(10)] + [ParamSpec("big", (5000,), "float32", "decay")]
    buckets = plan_buckets(specs, 1200, 4, 1)
    assert [[slot.name for slot in bucket.slots] for bucket in buckets] == [
        ["big"], ["p9", "p8", "p7"], ["p6", "p5", "p4"], ["p3", "p2", "p1"], ["p0"],
    ]  # fmt: skip
