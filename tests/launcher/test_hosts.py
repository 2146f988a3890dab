"""Slurm's node lists: what they mean, and what each mistake is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_train.config.compose import ConfigError
from dist_train.launcher.hosts import expand_nodes


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("nodeA,nodeB[001,003],nodeC", ["nodeA", "nodeB001", "nodeB003", "nodeC"]),
        ("node[001-004,007]", ["node001", "node002", "node003", "node004", "node007"]),
        ("linux[1,2]", ["linux1", "linux2"]),
        ("n[09-11]", ["n09", "n10", "n11"]),
        ("gpu-a-1,gpu-b-2", ["gpu-a-1", "gpu-b-2"]),
        ("r[1-2]n[01-02].hpc", ["r1n01.hpc", "r1n02.hpc", "r2n01.hpc", "r2n02.hpc"]),
        ("[7-8]", ["7", "8"]),
        (" a ", ["a"]),
    ],
)
def test_F30_node_lists_are_expanded_by_the_whole_grammar(nodes, names):
    assert expand_nodes(nodes) == names


@pytest.mark.parametrize(
    "nodes",
    ["", ",", "a,", "a,,b", "a[1-2", "a1-2]", "a[[1]]", "a[]", "a[1,]", "a[x-y]", "a[2-1]", "a[1-2-3]", "a b", "a[1-999999999]",
     "a[1-9999][1-9999]", "a;rm", "a[-1]"],
)  # fmt: skip
def test_F30_a_malformed_node_list_is_refused_and_quoted(nodes):
    with pytest.raises(ConfigError) as told:
        expand_nodes(nodes)
    assert repr(nodes) in str(told.value) and "write it as Slurm does" in str(told.value)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5), st.integers(1, 4)), min_size=1, max_size=4))
def test_ranges_keep_their_order_and_their_zeros(ranges):
    inside = ",".join(f"{first:0{width}d}-{first + more:0{width}d}" for first, more, width in ranges)
    expected = [f"n{number:0{width}d}" for first, more, width in ranges for number in range(first, first + more + 1)]
    assert expand_nodes(f"n[{inside}]") == expected
