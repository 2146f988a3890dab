from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dist_train.zero import residency
from dist_train.zero.policy import ShardPolicy
from dist_train.zero.residency import DeviceMemory, FileMemory, HostMemory, Memory, Residency, walk

CPU = torch.device("cpu")
MIB = 1 << 20
STRAY = 16 * MIB  # the kernel reads somewhat further than it is asked to


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """An empty folder on a disk, also where pytest's own lies in memory."""
    for folder in (tmp_path, Path("/var/tmp"), Path.cwd()):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            FileMemory(folder).close()
        if not told:
            return folder
    raise AssertionError("no folder on a local disk to test with")


@pytest.fixture
def memory(disk: Path) -> Iterator[FileMemory]:
    made = FileMemory(disk)
    yield made
    made.close()


@contextmanager
def tmpfs(folder: Path, size: str) -> Iterator[Path]:
    """A small disk of its own, which fills up as a real one does."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"may not mount here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def resident(*tensors: Tensor) -> int:
    """Bytes of these tensors that are in memory, whoever uses them (mincore)."""
    libc, total = ctypes.CDLL(None, use_errno=True), 0
    for tensor in tensors:
        if tensor.numel() == 0:
            continue
        pages = (ctypes.c_ubyte * -(-tensor.nbytes // 4096))()
        assert libc.mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), pages) == 0
        total += 4096 * sum(page & 1 for page in pages)
    return total


def process_bytes(kind: str) -> int:
    found = re.search(rf"^{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1]) * 1024


def dirty(tensor: Tensor) -> int:
    """Bytes of the mappings over a tensor that must be written."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            start, stop = (int(end, 16) for end in span.groups())
            inside = start < tensor.data_ptr() + tensor.nbytes and tensor.data_ptr() < stop
        elif inside and (count := re.match(r"(?:Shared|Private)_Dirty:\s+(\d+) kB", line)):
            total += int(count[1]) * 1024
    return total


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def send_away(memory: FileMemory, tensors: list[Tensor]) -> None:
    """Return when no page of these is in memory: what is read then comes from the disk."""
    memory.done(tensors)
    memory.done([])  # waits for the call before
    wait_until(lambda: resident(*tensors) == 0)


def make_groups(memory: Memory, groups: int, numel: int, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    roles = ("master", "exp_avg", "exp_avg_sq")
    return [[memory.zeros(numel, dtype, f"bucket{i}/{role}") for role in roles] for i in range(groups)]


@pytest.mark.parametrize("place", ["device", "host", "nvme"])
def test_tensors_of_every_place_are_flat_zeros_that_kernels_write(place: str, disk: Path) -> None:
    memory, other = Residency(optimizer=place, folder=disk if place == "nvme" else None).memories(CPU)
    assert (memory.kind, memory.device, memory.resident_at_once) == (place, CPU, place != "nvme")
    assert (other is memory) == (place == "device")
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float64):
        before = memory.held_bytes
        tensor = memory.zeros(1000, dtype, "x")
        assert tensor.shape == (1000,) and tensor.dtype == dtype and not tensor.any()
        assert tensor.data_ptr() % 64 == 0 and not tensor.is_meta and tensor.device == CPU
        assert tensor.untyped_storage().nbytes() == memory.held_bytes - before == 1000 * dtype.itemsize
        memory.ahead([tensor])
        assert tensor.add_(1).sum() == 1000
        memory.done([tensor])
        assert tensor.sum() == 1000
    memory.close()
    assert tensor.add_(1).sum() == 2000, "tensors outlive their memory's close"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_survive_leaving_memory(dtype: torch.dtype, memory: FileMemory) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [70_001, 1, 4096, 0, 300_000]
    groups = [[memory.zeros(n, dtype, "a"), memory.zeros(n, dtype, "b")] for n in sizes]
    expected = [[torch.zeros(n, dtype=dtype) for _ in range(2)] for n in sizes]
    for _ in range(4):
        for index in walk(memory, groups):
            for tensor, plain in zip(groups[index], expected[index], strict=True):
                plain.copy_(torch.randn(plain.numel(), generator=generator).to(dtype) + plain)
                tensor.copy_(plain)
        send_away(memory, [tensor for group in groups for tensor in group])
        assert all(torch.equal(t, p) for ts, ps in zip(groups, expected, strict=True) for t, p in zip(ts, ps, strict=True))


def test_an_optimizer_step_over_a_file_has_the_bits_of_one_in_memory(memory: FileMemory) -> None:
    generator = torch.Generator().manual_seed(1)
    kept = [[t.clone() for t in group] for group in make_groups(HostMemory(CPU), 3, 50_003)]
    filed = make_groups(memory, 3, 50_003)
    options = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "amsgrad": False, "weight_decay": 0.1, "maximize": False}
    for step in range(1, 4):
        grads = torch.randn(3, 50_003, generator=generator)
        for memory_, groups in ((HostMemory(CPU), kept), (memory, filed)):
            for index in walk(memory_, groups):
                master, first, second = ([t] for t in groups[index])
                torch._fused_adamw_(master, [grads[index]], first, second, [], [torch.tensor(float(step))], **options)
    for plain, file in zip(kept, filed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, file, strict=True)) and file[0].abs().sum() > 0


def test_walk_asks_for_the_next_group_before_it_hands_out_one() -> None:
    told: list[str] = []

    class Telling(DeviceMemory):
        def ahead(self, tensors: Sequence[Tensor], read_only: bool = False) -> None:
            told.append(f"ahead {int(tensors[0])} {read_only}")

        def done(self, tensors: Sequence[Tensor]) -> None:
            told.append(f"done {int(tensors[0])}")

    for index in walk(Telling(CPU), [[torch.tensor(at)] for at in range(3)], read_only=True):
        told.append(f"use {index}")
    first = dict.fromkeys(told)  # what was announced already may be announced again
    assert list(first) == [
        *("ahead 0 True", "ahead 1 True", "use 0", "done 0"),
        *("ahead 2 True", "use 1", "done 1", "use 2", "done 2"),
    ]


def test_any_order_of_calls_keeps_values(memory: FileMemory) -> None:
    chance = random.Random(0)
    tensors = [memory.zeros(100_000 + 1000 * i, torch.float32, f"t{i}") for i in range(5)]
    counts = [0] * 5
    for _ in range(80):
        at = chance.randrange(5)
        match chance.randrange(4):
            case 0:
                memory.ahead([tensors[at], tensors[(at + 1) % 5]])
            case 1:
                memory.done([tensors[at]])
            case _:
                tensors[at].add_(1)
                counts[at] += 1
                assert (tensors[at] == counts[at]).all()
    assert all((tensor == count).all() for tensor, count in zip(tensors, counts, strict=True))


def test_memory_in_use_is_that_of_three_groups_however_many_there_are(memory: FileMemory) -> None:
    groups = make_groups(memory, 10, MIB)  # 12 MiB each
    tensors = [tensor for group in groups for tensor in group]
    one = sum(tensor.nbytes for tensor in groups[0])
    anonymous, mapped = process_bytes("RssAnon"), process_bytes("RssFile")
    for _ in range(2):
        for index in walk(memory, groups):
            for tensor in groups[index]:
                tensor.add_(1)
            assert resident(*groups[index]) == one
            assert resident(*tensors) <= 3 * one + STRAY
            assert process_bytes("RssFile") - mapped <= 3 * one + STRAY
    assert process_bytes("RssAnon") - anonymous < 2 * one, "state is in the file, not in anonymous memory"
    send_away(memory, tensors)
    assert all((tensor == 2).all() for tensor in tensors)


@pytest.mark.parametrize("read_only", [True, False])
def test_ahead_brings_tensors_into_memory_before_they_are_touched(read_only: bool, memory: FileMemory) -> None:
    first, other = memory.zeros(8 * MIB, torch.uint8, "a").fill_(7), memory.zeros(64 * MIB, torch.uint8, "b").fill_(7)
    send_away(memory, [first, other])
    memory.ahead([first], read_only)
    wait_until(lambda: resident(first) == first.nbytes)
    assert resident(other) <= STRAY
    memory.done([])
    if read_only:
        assert dirty(first) == 0, "what is only read is not written again"
    first.add_(1)
    assert dirty(first) == first.nbytes
    send_away(memory, [first, other])
    assert (first == 8).all() and (other == 7).all()


def test_what_is_wanted_again_at_once_stays(memory: FileMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, other = memory.zeros(MIB, torch.uint8, "a").fill_(1), memory.zeros(MIB, torch.uint8, "b").fill_(1)
    may_drop, drop = threading.Event(), os.posix_fadvise
    monkeypatch.setattr(os, "posix_fadvise", lambda *told: may_drop.wait(60) and drop(*told))
    memory.done([other, tensor])
    memory.ahead([tensor])  # while `other` is still being written
    may_drop.set()
    memory.done([])
    wait_until(lambda: resident(tensor) == tensor.nbytes)
    send_away(memory, [tensor, other])
    assert (tensor == 1).all()


def test_a_view_stands_for_its_tensor(memory: FileMemory) -> None:
    tensor = memory.zeros(2 * MIB, torch.float32, "a").fill_(1)
    memory.done([tensor[100:200], tensor[5000:]])
    wait_until(lambda: resident(tensor) == 0)
    memory.ahead([tensor[-1:]])
    wait_until(lambda: resident(tensor) == tensor.nbytes)
    memory.done([tensor[:1]])
    wait_until(lambda: resident(tensor) == 0)


def test_a_tensor_of_another_memory_is_refused_also_where_one_of_ours_lay(memory: FileMemory) -> None:
    address = memory.zeros(MIB, torch.uint8, "gone").data_ptr()
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    fixed = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE: there, or nowhere
    assert libc.mmap(ctypes.c_void_p(address), ctypes.c_size_t(MIB), 3, fixed, -1, ctypes.c_int64(0)) == address
    follower = torch.frombuffer((ctypes.c_char * MIB).from_address(address), dtype=torch.uint8)
    for tensor in (torch.ones(100), follower):
        for call in (memory.ahead, memory.done):
            with pytest.raises(ValueError, match="did not make"):
                call([tensor])


def test_freeing_a_tensor_that_is_being_written_is_safe(memory: FileMemory) -> None:
    for at in range(20):
        tensor = memory.zeros(MIB, torch.uint8, "a").fill_(1)
        memory.ahead([tensor])
        memory.done([tensor])
        del tensor
        follower = torch.full((MIB,), at, dtype=torch.uint8)
        memory.done([])
        assert (follower == at).all()


def test_many_tensors_take_no_file_descriptors(memory: FileMemory) -> None:
    before = len(os.listdir("/proc/self/fd"))
    tensors = [memory.zeros(10, torch.float32, f"t{i}").fill_(i) for i in range(500)]
    assert len(os.listdir("/proc/self/fd")) == before
    assert all((tensor == i).all() for i, tensor in enumerate(tensors))


def test_the_file_has_no_name_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        memories = [FileMemory(tmp_path) for _ in range(2)]
    finally:
        os.umask(mask)
    first, second = (memory.zeros(1000, torch.float32, "same name").fill_(at) for at, memory in enumerate(memories))
    assert not first.any() and second.all(), "two that share a folder do not share a file"
    assert list(tmp_path.iterdir()) == []
    ours = [fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink() and os.readlink(fd).startswith(str(tmp_path))]
    assert len(ours) == 2 and all(fd.stat().st_mode & 0o777 == 0o600 for fd in ours)
    for memory in memories:
        memory.close()


KILLED = """
import sys, time, torch
from dist_train.zero.residency import FileMemory
memory = FileMemory(sys.argv[1])
tensor = memory.zeros(1 << 20, torch.float32, "state").fill_(1)
memory.done([tensor]); memory.done([])
print("ready", flush=True)
time.sleep(100)
"""


def test_a_killed_process_leaves_nothing_on_the_disk(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "ready\n"
        assert list(tmp_path.iterdir()) == []
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error_when_a_tensor_is_made(tmp_path: Path) -> None:
    with tmpfs(tmp_path, "8m"), pytest.warns(UserWarning, match="lies in memory"):
        memory = FileMemory(tmp_path)
        kept = memory.zeros(MIB, torch.float32, "bucket0/master").fill_(3)
        with pytest.raises(OSError) as failure:
            memory.zeros(2 * MIB, torch.float32, "bucket1/master")
        assert failure.value.errno == errno.ENOSPC
        for part in (str(tmp_path), "8,388,608 bytes of bucket1/master after 4,194,304 bytes", "free space, set another folder"):
            assert part in str(failure.value)
        memory.done([kept])
        fits = memory.zeros(MIB - 16384, torch.float32, "bucket2/master").fill_(4)  # what failed gave back what it had taken
        assert (kept == 3).all() and (fits == 4).all()
        memory.close()


def test_a_limit_on_file_size_is_an_error_when_a_tensor_is_made(memory: FileMemory) -> None:
    kept = memory.zeros(1000, torch.float32, "bucket0/master").fill_(3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
    try:
        with pytest.raises(OSError, match="4,194,304 bytes of bucket1/master after 4,000 bytes"):
            memory.zeros(MIB, torch.float32, "bucket1/master")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert memory.held_bytes == 4000 and (kept == 3).all()
    assert (memory.zeros(MIB, torch.float32, "bucket1/master").fill_(1) == 1).all() and (kept == 3).all()


@pytest.mark.parametrize("folder", ["missing", "a_file", "/proc"])
def test_a_folder_that_cannot_be_written_is_named(folder: str, tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("")
    with pytest.raises(OSError, match=rf"nvme folder '{tmp_path / folder}'.*must exist and be writable"):
        FileMemory(tmp_path / folder)


def test_a_write_that_fails_is_told_by_the_next_call(memory: FileMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = memory.zeros(1000, torch.float32, "a").fill_(1)

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fadvise", broken)
        memory.done([tensor])
        with pytest.raises(OSError, match="the disk is gone"):
            memory.done([])
    memory.done([tensor])  # it is told once, and the disk may come back
    memory.done([])


def test_a_read_that_fails_is_told_when_the_tensor_was_used(memory: FileMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, began = memory.zeros(1000, torch.float32, "a"), threading.Event()

    def broken(*_: object) -> None:
        began.set()
        raise OSError(errno.EIO, "the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(residency, "_advise", broken)
        memory.ahead([tensor])
        assert began.wait(60)
        with pytest.raises(OSError, match="the disk is gone"):
            memory.done([tensor])
    memory.done([tensor])


class Cudart:
    """What torch.cuda.cudart() offers, for memory that no card is beside."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802 (the names are CUDA's)
        assert flags == 1 and address not in self.pinned
        self.pinned[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.pinned[address]
        return 0


def test_host_memory_beside_cuda_is_pinned_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    card, checked = Cudart(), []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: card)
    monkeypatch.setattr(torch.cuda, "check_error", checked.append)
    memory = HostMemory(torch.device("cuda"))
    tensor, empty = memory.zeros(MIB + 1, torch.float32, "a"), memory.zeros(0, torch.float32, "b")
    assert card.pinned == {tensor.data_ptr(): 4 * (MIB + 1)} and checked == [0]
    assert tensor.device == CPU and not tensor.any() and empty.numel() == 0 and memory.held_bytes == 4 * (MIB + 1)
    kept = tensor.fill_(2)[5:]
    del tensor
    gc.collect()
    assert card.pinned and (kept == 2).all()
    del kept
    gc.collect()
    assert not card.pinned


def test_residency_says_what_it_cannot_do() -> None:
    for wrong, rule in (
        ({"optimizer": "gpu"}, "optimizer='gpu': state lives on one of device, host, nvme"),
        ({"parameters": "disk"}, "parameters='disk'"),
        ({"optimizer": "nvme"}, "nvme needs a folder"),
        ({"parameters": "nvme"}, "nvme needs a folder"),
        ({"optimizer": "host", "folder": "/x"}, "only nvme uses a folder"),
    ):
        with pytest.raises(ValueError, match=rule):
            Residency(**wrong)
    Residency().check(ShardPolicy.from_stage(0))
    Residency(optimizer="host").check(ShardPolicy.from_stage(0))
    Residency(parameters="host").check(ShardPolicy.from_stage(3))
    with pytest.raises(ValueError, match="set stage 3"):
        Residency(parameters="host").check(ShardPolicy.from_stage(2))


def test_what_lives_in_one_place_shares_one_memory(disk: Path) -> None:
    optimizer, parameters = Residency("nvme", "nvme", disk).memories(CPU)
    assert optimizer is parameters and isinstance(optimizer, FileMemory)
    optimizer.close()
    optimizer, parameters = Residency("host", "device").memories(torch.device("meta"))
    assert type(parameters) is DeviceMemory and parameters.zeros(1, torch.float32, "a").is_meta
    assert type(optimizer) is HostMemory and not optimizer.zeros(1, torch.float32, "a").is_meta
