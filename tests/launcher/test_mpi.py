"""What MPI tells its ranks, with a stand-in for mpi4py whose ranks are threads; the real ones are in tests/cluster."""

from __future__ import annotations

import json
import sys
import threading
import types

import pytest

from dist_train.launcher import mpi
from dist_train.launcher.environment import Place


class Fake:
    """As much of `mpi4py.MPI` as is used, for one rank of `size` on hosts of `per_host`."""

    BYTE, COMM_TYPE_SHARED = "byte", "shared"

    def __init__(self, rank: int, size: int, per_host: int, box: dict, met: threading.Barrier) -> None:
        self.rank, self.size, self.per_host, self.box, self.met = rank, size, per_host, box, met
        self.COMM_WORLD = self
        self.finished = False

    def Get_rank(self) -> int:
        return self.rank

    def Get_size(self) -> int:
        return self.size

    def Split_type(self, kind: str) -> Fake:
        assert kind == "shared"
        first = self.rank // self.per_host * self.per_host
        return Fake(self.rank - first, min(self.per_host, self.size - first), 0, {}, self.met)

    def Free(self) -> None:
        pass

    def Bcast(self, what: list, root: int) -> None:
        if self.rank == root:
            self.box["sent"] = bytes(what[0])
        self.met.wait(10)
        what[0][:] = self.box["sent"]

    def Finalize(self) -> None:
        self.finished = True


def settle(size: int, per_host: int, port: int | None = 5) -> list[Place]:
    box: dict = {}
    met = threading.Barrier(size)
    places: dict[int, Place] = {}

    def one(rank: int) -> None:
        world = mpi.World(Fake(rank, size, per_host, box, met))
        places[rank] = world.settle(Place("mpirun", rank, size, None, None, None, port))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return [places[rank] for rank in range(size)]


def test_ranks_of_several_hosts_learn_the_address_of_rank_0_and_their_places_on_the_host(monkeypatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    monkeypatch.setattr(mpi.socket, "gethostname", lambda: "nodé7")
    places = settle(4, 2)
    assert {place.address for place in places} == {"nodé7"}
    assert len({place.port for place in places}) == 1 and places[0].port in range(20000, 32000)
    assert [(place.local_rank, place.local_size) for place in places] == [(0, 2), (1, 2), (0, 2), (1, 2)]


def test_ranks_of_one_host_need_no_name_and_a_port_that_the_user_set_is_kept(monkeypatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "4711")
    places = settle(2, 2, port=4711)
    assert {(place.address, place.port, place.local_size) for place in places} == {("127.0.0.1", 4711, 2)}


@pytest.fixture
def installed(monkeypatch):
    """mpi4py in which this process is rank 1 of `size`."""

    def install(size: int) -> Fake:
        fake = Fake(min(1, size - 1), size, 1, {}, threading.Barrier(1))
        package = types.SimpleNamespace(rc=types.SimpleNamespace(finalize=None), MPI=fake)
        monkeypatch.setitem(sys.modules, "mpi4py", package)
        monkeypatch.setitem(sys.modules, "mpi4py.MPI", fake)
        return fake

    return install


def test_mpi_stays_open_and_is_not_closed_at_exit(installed) -> None:
    fake = installed(2)
    world = mpi.connect(Place("mpirun", 1, 2, None, None, None, None))
    assert world is not None and sys.modules["mpi4py"].rc.finalize is False and not fake.finished
    world.finish()
    assert fake.finished


def test_an_mpi4py_of_another_mpi_is_not_believed(installed) -> None:
    fake = installed(1)  # every rank believes that it is alone
    assert mpi.connect(Place("mpirun", 1, 2, None, None, None, None)) is None and fake.finished


def test_without_mpi4py_the_environment_decides(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    assert mpi.connect(Place("mpirun", 1, 2, None, None, None, None)) is None


def test_the_end_of_a_rank_that_failed_is_the_end_of_the_job_once_it_has_spoken(monkeypatch, capsys) -> None:
    fake = Fake(1, 2, 1, {}, threading.Barrier(1))
    at_exit: list = []
    monkeypatch.setattr(mpi.atexit, "register", lambda *call: at_exit.append(call))
    monkeypatch.setattr(mpi.time, "sleep", lambda seconds: print("slept"))
    fake.Abort = lambda code: print("abort", code)  # type: ignore[attr-defined]
    mpi.World(fake).end(7)
    assert capsys.readouterr().out == ""
    ((function, *arguments),) = at_exit
    function(*arguments)
    assert capsys.readouterr().out == "slept\nabort 7\n"


def test_the_message_has_room_for_the_longest_name() -> None:
    assert len(json.dumps(["é" * 64, 65535])) < mpi._BYTES  # HOST_NAME_MAX of Linux
