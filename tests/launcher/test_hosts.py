"""Node lists and hostfiles: what they mean, and what each mistake is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_train.config.compose import ConfigError
from dist_train.launcher.hosts import Host, expand_nodes, read_hostfile


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


def test_F34_a_hostfile_with_comments_users_and_any_line_ends(tmp_path):
    file = tmp_path / "hosts"
    file.write_bytes(b"# two nodes\r\nh1 slots=8  \r\n\r\nana@h2 # spare\r\n  h3.cluster\tslots=2\r\nfd00::4\n\n")
    assert read_hostfile(file) == [
        Host("h1", None, 8, f"{file}:2"),
        Host("h2", "ana", None, f"{file}:4"),
        Host("h3.cluster", None, 2, f"{file}:5"),
        Host("fd00::4", None, None, f"{file}:6"),
    ]
    assert [host.login for host in read_hostfile(file)] == ["h1", "ana@h2", "h3.cluster", "fd00::4"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "names no host"),
        ("# nothing\n", "names no host"),
        ("h1 lots=8\n", ":1: 'lots=8' is not known"),
        ("h1\nh2 slots=0\n", ":2: 'slots=0'"),
        ("h1 slots=\n", ":1: 'slots='"),
        ("h1 slots=-1\n", ":1: 'slots=-1'"),
        ("h1 slots=2 slots=3\n", ":1: 'slots=3'"),
        ("h1 slots 8\n", ":1: 'slots' is not known"),
        ("h1\nh1 slots=2\n", ":2: host h1 stands in"),
        ("ana@\n", ":1: 'ana@' is no host"),
        ("-oProxyCommand=x\n", ":1: '-oProxyCommand=x' is no host"),
        ("a;b\n", ":1: 'a;b' is no host"),
    ],
)
def test_F34_a_hostfile_that_is_wrong_is_refused_with_its_line(text, words, tmp_path):
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ConfigError) as told:
        read_hostfile(file)
    assert str(file) in str(told.value) and words in str(told.value)


def test_F34_a_hostfile_that_cannot_be_read_is_refused(tmp_path):
    for file in (tmp_path / "nope", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_hostfile(file)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00h1")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hostfile(tmp_path / "binary")
