"""The mesh on real ranks: process groups for each axis, built once and passed in.

A group of size 1 is legal, has no process group and is the identity for every collective, so no caller asks whether an
axis is in use; one rank runs without torch.distributed at all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from dist_train.mesh.shape import AXES, MeshShape


@dataclass(frozen=True)
class Group:
    """The ranks that share an axis with this one. `index` is this rank's place among `ranks`."""

    axis: str
    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None = None
    size: int = field(init=False)  # kept, not counted: it is read hundreds of times in a step

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.ranks))


@dataclass(frozen=True)
class ParallelMesh:
    """This rank's view of the mesh. `data` joins dp and cp: the ranks that see different tokens of one step.

    `back` has the ranks of `pp` and a channel of its own: what goes to a rank with a lower index goes there, so that on one
    channel messages between two ranks go one way. `ends`: the first and the last rank of `pp`, where this is one of them.
    """

    shape: MeshShape
    rank: int
    device: torch.device
    world: Group
    pp: Group
    dp: Group
    cp: Group
    tp: Group
    data: Group
    back: Group
    ends: Group
    timeout: timedelta | None = None  # of every collective on every group

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes logs, metrics and manifests."""
        return self.rank == 0

    @property
    def speaks(self) -> bool:
        """True on one rank of those that work on the same tokens: the one that counts them where all ranks add up."""
        return self.tp.index == self.pp.index == 0

    @property
    def stream(self) -> int:
        """The rank by which random streams are seeded: equal over tp, where what is not split must be drawn alike."""
        return self.tp.ranks[0]

    @classmethod
    def single(cls, device: str = "cpu") -> ParallelMesh:
        """One rank, without torch.distributed."""
        return cls._build(MeshShape(), 0, torch.device(device), timeout=None)

    @classmethod
    def from_environment(
        cls, pp: int = 1, dp: int = -1, cp: int = 1, tp: int = 1, device: str = "auto", timeout_seconds: float = 600.0
    ) -> ParallelMesh:
        """Join the ranks that a launcher started (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT); alone without one.

        `dp=-1` takes what the other degrees leave of the world. `timeout_seconds` reaches every group, not only the
        world's. Raises ValueError when the degrees do not multiply to the number of ranks.
        """
        world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        rest = pp * cp * tp
        if dp == -1 and world % rest == 0:
            dp = world // rest
        shape = MeshShape(pp, max(dp, 1), cp, tp)
        if shape.size != world:
            raise ValueError(
                f"mesh {shape} has {shape.size} ranks but the launcher started {world}: "
                f"start {shape.size}, or set mesh.dp=-1 and degrees whose product divides {world}."
            )
        place = _device(device, int(os.environ.get("LOCAL_RANK", "0")))
        if world == 1:
            return cls._build(shape, 0, place, timeout=None)
        timeout = timedelta(seconds=timeout_seconds)
        _join(rank, world, "nccl" if place.type == "cuda" else "gloo", timeout)
        return cls._build(shape, rank, place, timeout)

    @classmethod
    def from_process_group(cls, shape: MeshShape, device: str = "cpu", timeout_seconds: float = 600.0) -> ParallelMesh:
        """A mesh over a default process group that exists already (tests, notebooks, other people's launchers)."""
        return cls._build(shape, dist.get_rank(), torch.device(device), timedelta(seconds=timeout_seconds))

    @classmethod
    def _build(cls, shape: MeshShape, rank: int, device: torch.device, timeout: timedelta | None) -> ParallelMesh:
        def group(name: str, axes: tuple[str, ...]) -> Group:
            return _join_one(name, shape.groups(axes), rank, timeout)

        by_axis = {axis: group(axis, (axis,)) for axis in AXES}
        data = by_axis["dp"] if shape.cp == 1 else group("data", ("dp", "cp"))
        pipelines = shape.groups("pp")
        back = _join_one("pp", pipelines, rank, timeout)
        ends = _join_one("ends", [(line[0], line[-1]) for line in pipelines] if shape.pp > 1 else [], rank, timeout)
        world = group("world", AXES)
        return cls(shape, rank, device, world=world, data=data, back=back, ends=ends, timeout=timeout, **by_axis)

    def split_data(self, replicas: int) -> tuple[Group, Group]:
        """(shard group, replica group) of this rank: the data ranks as `replicas` runs of neighbours. Collective over the world.

        A shard group is one such run, and stays inside a node where a node holds a run; a replica group joins the ranks that
        have the same place in every run. Raises ValueError when the runs do not come out equal.
        """
        size = self.data.size
        if replicas == 1:
            return self.data, Group("replica", (self.rank,), 0)
        if size % replicas:
            raise ValueError(f"shard.replicas={replicas}: does not divide the {size} data ranks; set a divisor of {size}.")
        each, everyone = size // replicas, self.shape.groups(("dp", "cp"))
        runs = [data[at : at + each] for data in everyone for at in range(0, size, each)]
        across = [data[at::each] for data in everyone for at in range(each)]
        return _join_one("shard", runs, self.rank, self.timeout), _join_one("replica", across, self.rank, self.timeout)

    def close(self) -> None:
        """Leave the process groups. Harmless on a mesh of one rank."""
        if self.world.process_group is not None and dist.is_initialized():
            dist.destroy_process_group()


def _join_one(name: str, groups: list[tuple[int, ...]], rank: int, timeout: timedelta | None) -> Group:
    """The group among these that holds `rank`. Creating one is collective: every rank creates all of them, in one order."""
    mine = Group(name, (rank,), 0)
    for ranks in groups:
        handle = dist.new_group(list(ranks), timeout=timeout) if len(ranks) > 1 else None
        if rank in ranks:
            mine = Group(name, ranks, ranks.index(rank), handle)
    return mine


def _device(name: str, local_rank: int) -> torch.device:
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"launch.device={name}: local rank {local_rank} needs a CUDA device of its own and {torch.cuda.device_count()} "
            "are visible; start fewer ranks per node or set launch.device=cpu."
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _join(rank: int, world: int, backend: str, timeout: timedelta) -> None:
    # After an elastic restart the agent's store still holds the keys of the attempt that died, and gloo would wait
    # for those dead peers: each attempt gets keys of its own.
    # Each rank of a gloo group reads the addresses of all others; with this it reads them in one operation on the store, not
    # in two for each: N ranks make N operations for a group, not 2N².
    os.environ.setdefault("GLOO_ENABLE_STORE_V2_API", "1")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    agent_hosts_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    host_store = dist.TCPStore(address, port, None, is_master=rank == 0 and not agent_hosts_store, timeout=timeout)
    store = dist.PrefixStore(f"attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", host_store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
