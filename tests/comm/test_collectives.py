from __future__ import annotations

import pytest
import torch

from dist_train.comm.collectives import Collectives
from dist_train.comm.trace import TrafficCounter
from tests.ranks import RankFailure, run_ranks


def _strided(mesh, comm, transposed):
    n, results = mesh.dp.size, {}

    def make(rows):
        x = torch.arange(rows * 3, dtype=torch.float32).view(3, rows) + 100 * mesh.rank
        return x.t() if transposed else x.t().contiguous()

    x = make(4)
    comm.all_reduce(x, mesh.dp).wait()
    results["all_reduce"] = x.clone()
    x = make(4)
    comm.broadcast(x, mesh.dp, source=n - 1).wait()
    results["broadcast"] = x.clone()
    x, out = make(4 * n), torch.zeros(3, 4).t() if transposed else torch.zeros(4, 3)
    comm.reduce_scatter(out, x, mesh.dp).wait()
    results["reduce_scatter"] = out.clone()
    x, out = make(4), torch.zeros(3, 4 * n).t() if transposed else torch.zeros(4 * n, 3)
    comm.all_gather(out, x, mesh.dp).wait()
    results["all_gather"] = out.clone()
    x, out = make(4 * n), torch.zeros(3, 4 * n).t() if transposed else torch.zeros(4 * n, 3)
    comm.all_to_all(out, x, mesh.dp).wait()
    results["all_to_all"] = out.clone()
    return results


@pytest.mark.parametrize("n", [1, 2, 3])
def test_F09_results_do_not_depend_on_strides(n):
    plain, strided = run_ranks(n, _strided, False), run_ranks(n, _strided, True)
    for a, b in zip(plain, strided, strict=True):
        for op in a:
            assert torch.equal(a[op], b[op]), op
    base = torch.arange(12.0).view(3, 4).t()
    assert torch.equal(plain[0]["all_reduce"], sum(base + 100 * r for r in range(n)))
    assert torch.equal(plain[0]["all_gather"], torch.cat([base + 100 * r for r in range(n)]))
    whole = torch.arange(12.0 * n).view(3, 4 * n).t()
    total = sum(whole + 100 * r for r in range(n))
    for rank in range(n):
        assert torch.equal(plain[rank]["broadcast"], base + 100 * (n - 1))
        assert torch.equal(plain[rank]["reduce_scatter"], total[4 * rank : 4 * rank + 4])
        mine = slice(4 * rank, 4 * rank + 4)
        assert torch.equal(plain[rank]["all_to_all"], torch.cat([(whole + 100 * r)[mine] for r in range(n)]))


def _traffic(mesh, comm):
    counter = TrafficCounter()
    comm = Collectives(counter)
    comm.all_reduce(torch.ones(12), mesh.dp).wait()
    comm.all_gather(torch.empty(12), torch.ones(12 // mesh.dp.size), mesh.dp).wait()
    comm.reduce_scatter(torch.empty(12 // mesh.dp.size), torch.ones(12), mesh.dp).wait()
    return counter.per_step(1)


def test_traffic_is_counted_in_bytes_sent_per_rank():
    (found, *_) = run_ranks(3, _traffic)
    assert found["all_reduce/dp"] == {"calls": 1, "bytes": 2 * 48 * 2 / 3}
    assert found["all_gather/dp"] == {"calls": 1, "bytes": 48 * 2 / 3}
    assert found["reduce_scatter/dp"] == {"calls": 1, "bytes": 48 * 2 / 3}


def _rotate(mesh, comm):
    """What came after two turns, of which the second begins before the first was waited for."""
    counter = TrafficCounter()
    comm, first, second = Collectives(counter), torch.empty(3), torch.empty(2)
    turns = [
        comm.rotate(first, torch.full((3,), float(mesh.rank)), mesh.dp),
        comm.rotate(second, torch.full((2,), -1.0), mesh.dp),
    ]
    for turn in turns:
        turn.wait()
    return first.tolist(), second.tolist(), counter.bytes["send", "dp"]


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_turn_takes_from_the_rank_before(n):
    for rank, found in enumerate(run_ranks(n, _rotate)):
        assert found == ([float((rank - 1) % n)] * 3, [-1.0] * 2, 20 if n > 1 else 0)


def _rank_one_fails(mesh, comm):
    if mesh.rank == 1:
        raise RuntimeError("planted")
    return mesh.rank


def _objects(mesh, comm):
    return comm.all_gather_object({"rank": mesh.rank}, mesh.dp), comm.broadcast_object(mesh.rank, mesh.dp, source=1)


def test_a_failing_rank_shows_its_traceback_and_the_pool_comes_back():
    with pytest.raises(RankFailure, match="planted"):
        run_ranks(2, _rank_one_fails)
    assert run_ranks(2, _objects) == [([{"rank": 0}, {"rank": 1}], 1)] * 2
