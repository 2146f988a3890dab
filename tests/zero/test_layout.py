from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dist_train.zero.layout import ALIGNMENT, ParamSpec, plan_buckets

shapes = st.lists(
    st.tuples(
        st.sampled_from([(), (0,), (1,), (3,), (53,), (7, 5), (64, 64), (3, 0, 2)]),
        st.sampled_from(["float32", "bfloat16"]),
        st.sampled_from(["decay", "no_decay"]),
    ),
    min_size=1,
    max_size=30,
)


def _specs(drawn):
    return [ParamSpec(f"p{i}", shape, dtype, group) for i, (shape, dtype, group) in enumerate(drawn)]


@given(shapes, st.integers(1, 20_000), st.integers(1, 5))
def test_every_parameter_lies_once_in_a_bucket_of_its_dtype_and_group(drawn, bucket_bytes, shards):
    specs = _specs(drawn)
    by_name = {spec.name: spec for spec in specs}
    buckets = plan_buckets(specs, bucket_bytes, 4, shards)
    assert sorted(slot.name for b in buckets for slot in b.slots) == sorted(by_name)
    for bucket in buckets:
        at = 0
        for segment in bucket.segments:
            assert segment.start == at and at % ALIGNMENT == 0
            for slot in segment.slots:
                spec = by_name[slot.name]
                assert (slot.start, slot.shape, bucket.dtype, segment.group) == (at, spec.shape, spec.dtype, spec.group)
                at = slot.stop
            assert at <= segment.stop < at + ALIGNMENT
            at = segment.stop
        assert at <= bucket.numel < at + shards * ALIGNMENT + (at == 0) * shards * ALIGNMENT
        assert len({segment.group for segment in bucket.segments}) == len(bucket.segments)


@given(shapes, st.integers(1, 20_000), st.integers(1, 5))
def test_shards_are_equal_aligned_and_cover_the_bucket(drawn, bucket_bytes, shards):
    for bucket in plan_buckets(_specs(drawn), bucket_bytes, 4, shards):
        cuts = [bucket.shard(index) for index in range(shards)]
        assert cuts[0].start == 0 and cuts[-1].stop == bucket.numel
        assert all(a.stop == b.start for a, b in zip(cuts, cuts[1:], strict=False))
        assert all((cut.stop - cut.start) == bucket.shard_numel and cut.start % ALIGNMENT == 0 for cut in cuts)


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
