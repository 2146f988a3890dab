"""Where state lives: on the accelerator, in host memory, or in a file on NVMe (arXiv:2101.06840, arXiv:2104.07857).

A `Memory` makes flat tensors and is told before and after they are used:

    ahead(tensors)   they will be used soon: start to bring them into memory
    done(tensors)    they were used, and perhaps changed: they may leave memory

Tensors are ordinary ones at any time, whatever was told: kernels, collectives and checkpoints use them as they are. The calls
only decide what is in memory, and when. Device and host memory keep all they hold, and do nothing.

`FileMemory` maps a file into memory (MAP_SHARED), so that the file *is* the storage of its tensors. What is not in memory is
read where it is touched; `ahead` has a thread touch it first, so that nobody waits; `done` has another thread write what
was changed and then take the pages out of memory. Of the groups that `walk` passes at most three are in memory: one that is
read, one in use, one that is written.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import tempfile
import warnings
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, UntypedStorage

from dist_train.zero.policy import ShardPolicy

PLACES = ("device", "host", "nvme")


@dataclass(frozen=True)
class Residency:
    """Where optimizer state (masters and moments) and stage 3's shards of parameters live.

    `folder`: an existing folder on a fast local disk, for what lives on NVMe. Every rank of a node may use the same.
    """

    optimizer: str = "device"
    parameters: str = "device"
    folder: str | Path | None = None

    def __post_init__(self) -> None:
        for role in ("optimizer", "parameters"):
            if getattr(self, role) not in PLACES:
                raise ValueError(f"{role}={getattr(self, role)!r}: state lives on one of {', '.join(PLACES)}.")
        on_nvme = "nvme" in (self.optimizer, self.parameters)
        if on_nvme and self.folder is None:
            raise ValueError(f"{self._told}: nvme needs a folder on a fast local disk; set folder, or host instead of nvme.")
        if self.folder is not None and not on_nvme:
            raise ValueError(f"folder={str(self.folder)!r} with {self._told}: only nvme uses a folder; set nvme, or no folder.")

    @property
    def _told(self) -> str:
        return f"optimizer={self.optimizer}, parameters={self.parameters}"

    def check(self, policy: ShardPolicy) -> None:
        """Raise ValueError where parameters cannot live elsewhere, because the module reads them all the time."""
        if self.parameters != "device" and not policy.param:
            raise ValueError(
                f"parameters={self.parameters}: only parameters of stage 3 can live off the device; set stage 3, or device."
            )

    def memories(self, device: torch.device) -> tuple[Memory, Memory]:
        """The memory of optimizer state, and that of shards of parameters; one object where both live in one place."""
        made = {place: self._memory(place, device) for place in dict.fromkeys((self.optimizer, self.parameters))}
        return made[self.optimizer], made[self.parameters]

    def _memory(self, place: str, device: torch.device) -> Memory:
        if place == "nvme":
            assert self.folder is not None
            return FileMemory(self.folder)
        return HostMemory(device) if place == "host" else DeviceMemory(device)


class Memory(Protocol):
    """Makes the tensors of one place, and is told when they are used."""

    kind: str  # one of PLACES
    device: torch.device  # of the tensors, and so where an optimizer steps them: the accelerator, or the CPU for host and nvme
    resident_at_once: bool  # True: all may be used in one launch. False: one bucket after the other, or memory is not bounded

    def zeros(self, numel: int, dtype: torch.dtype, name: str) -> Tensor:
        """A flat tensor of zeros; `name` says in errors what it is."""

    def ahead(self, tensors: Sequence[Tensor], read_only: bool = False) -> None:
        """Start to bring these into memory; returns at once. A view stands for the whole tensor.

        `read_only`: they will not be changed, and so not be written afterwards. To change them is right all the same, but slow.
        """

    def done(self, tensors: Sequence[Tensor]) -> None:
        """These were used and perhaps changed. Returns at once, unless those of the call before are still being written."""

    @property
    def held_bytes(self) -> int:
        """Bytes of the tensors made here."""

    def close(self) -> None:
        """End what runs in the background. Tensors stay valid."""


def walk(memory: Memory, groups: Sequence[Sequence[Tensor]], read_only: bool = False) -> Iterator[int]:
    """The index of each group in turn, while its tensors are to be used: the next is read ahead, the last written behind."""
    for index, group in enumerate(groups):
        memory.ahead(group, read_only)
        if index + 1 < len(groups):
            memory.ahead(groups[index + 1], read_only)
        yield index
        memory.done(group)


class DeviceMemory:
    """Tensors on the accelerator (or the CPU, where that is the device)."""

    kind = "device"
    resident_at_once = True

    def __init__(self, device: torch.device) -> None:
        self.device, self.held_bytes = device, 0

    def zeros(self, numel: int, dtype: torch.dtype, name: str) -> Tensor:
        self.held_bytes += numel * dtype.itemsize
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def ahead(self, tensors: Sequence[Tensor], read_only: bool = False) -> None:
        pass

    def done(self, tensors: Sequence[Tensor]) -> None:
        pass

    def close(self) -> None:
        pass


class HostMemory(DeviceMemory):
    """Tensors in host memory, pinned where the accelerator is CUDA so that copies run beside compute."""

    kind = "host"

    def __init__(self, accelerator: torch.device) -> None:
        super().__init__(torch.device("cpu"))
        self._pinned = accelerator.type == "cuda"

    def zeros(self, numel: int, dtype: torch.dtype, name: str) -> Tensor:
        if not self._pinned or numel == 0:
            return super().zeros(numel, dtype, name)
        # torch's allocator of pinned memory rounds up to a power of two, which for state would waste up to half of the host.
        nbytes = numel * dtype.itemsize
        memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        tensor = torch.frombuffer(memory, dtype=dtype)
        cuda, address = torch.cuda.cudart(), tensor.data_ptr()
        torch.cuda.check_error(cuda.cudaHostRegister(address, nbytes, 1))  # 1: pinned for every device
        weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False
        self.held_bytes += nbytes
        return tensor


class FileMemory:
    """Tensors whose storage is a file in `folder`, mapped into memory.

    The file has no name (it is unlinked, or made with O_TMPFILE, before anything is written), is readable by its owner only, and
    is gone with the process, however that ends. So ranks that share a folder cannot collide, and state on NVMe is
    no checkpoint. Disk space is reserved when a tensor is made: a full disk is an error then, and not a SIGBUS in the
    middle of a run. (A file system that copies on write, such as btrfs or ZFS, reserves nothing for certain: leave space.)

    A folder in memory (tmpfs) frees no memory: state there costs what it costs on the host. A network folder works, at
    the speed of the network, and a server that goes away ends the process with SIGBUS. Both warn.

    Raises OSError for a folder that is missing or not writable, and for a disk without room. What fails in the background
    is raised by the next call.
    """

    kind = "nvme"
    resident_at_once = False

    def __init__(self, folder: str | Path) -> None:
        self.device, self.held_bytes = torch.device("cpu"), 0
        self._folder = Path(folder)
        try:
            self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)
        except OSError as error:
            why = error.strerror or str(error)
            raise OSError(
                error.errno, f"nvme folder {str(folder)!r}: {why}; it must exist and be writable: make it, or set another."
            ) from error
        _warn_of_file_system(self._folder)
        self._end = 0
        self._regions: dict[int, tuple[int, int]] = {}  # address of a tensor's memory → its offset in the file, its bytes
        self._coming: dict[int, Future[None]] = {}  # addresses of what was announced and not used since, and their read
        self._leaving: Future[None] | None = None  # the last write
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="read-ahead")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write-behind")

    def zeros(self, numel: int, dtype: torch.dtype, name: str) -> Tensor:
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.zeros(0, dtype=dtype)
        try:
            os.posix_fallocate(self._file.fileno(), self._end, nbytes)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file.fileno(), self._end)  # give back what was reserved in part
            raise OSError(
                error.errno,
                f"nvme folder {str(self._folder)!r}: no room for {nbytes:,} bytes of {name} after {self.held_bytes:,} bytes "
                f"({error.strerror}); all state must fit on the disk: free space, set another folder, or use more ranks.",
            ) from error
        memory = _map(self._file.fileno(), self._end, nbytes)
        address = ctypes.addressof(memory)
        _advise(address, nbytes, _MADV_HUGEPAGE)  # reads 4 MB at a time, whatever the disk's setting, and faults once in 2 MB
        self._regions[address] = self._end, nbytes
        weakref.finalize(memory, _unmap, self._regions, address, nbytes).atexit = False
        self._end += -(-nbytes // _SPACING) * _SPACING
        self.held_bytes += nbytes
        return torch.frombuffer(memory, dtype=dtype)

    def ahead(self, tensors: Sequence[Tensor], read_only: bool = False) -> None:
        new = {address: storage for address, storage in self._storages(tensors).items() if address not in self._coming}
        if new:
            self._coming.update(dict.fromkeys(new, self._reader.submit(self._read, new, read_only)))

    def done(self, tensors: Sequence[Tensor]) -> None:
        storages = self._storages(tensors)
        for read in {self._coming.pop(address) for address in storages if address in self._coming}:
            if not read.cancel():  # else it would bring back what is about to leave
                read.result()
        self._wait_for_write()  # no more than one is written while the next is used
        self._leaving = self._writer.submit(self._write, storages)

    def close(self) -> None:
        try:
            self._wait_for_write()
        finally:
            self._reader.shutdown(cancel_futures=True)
            self._writer.shutdown()
            self._file.close()

    def _wait_for_write(self) -> None:
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.result()

    def _storages(self, tensors: Sequence[Tensor]) -> dict[int, UntypedStorage]:
        """Memory of tensors by its address. Who holds it keeps it mapped."""
        found = {storage.data_ptr(): storage for storage in (t.untyped_storage() for t in tensors) if storage.nbytes()}
        if not found.keys() <= self._regions.keys():
            raise ValueError("a tensor that this memory did not make: tell each memory of its own tensors only.")
        return found

    # What the two threads do

    def _read(self, storages: dict[int, UntypedStorage], read_only: bool) -> None:
        for address in storages:
            # Reads, waits, and enters pages into the page table, as written ones if so asked: a fault at the first write to each
            # page would cost more than the update itself.
            _advise(address, self._regions[address][1], _MADV_POPULATE_READ if read_only else _MADV_POPULATE_WRITE)

    def _write(self, storages: dict[int, UntypedStorage]) -> None:
        for address in storages:
            if address in self._coming:  # it is needed again already
                continue
            offset, nbytes = self._regions[address]
            # Pages that are mapped, or not written yet, cannot leave memory: unmap, write and wait, drop. None of it loses data.
            _advise(address, nbytes, mmap.MADV_DONTNEED)
            _check(_libc.sync_file_range(self._file.fileno(), offset, nbytes, _WRITE_AND_WAIT), "writing state to nvme")
            os.posix_fadvise(self._file.fileno(), offset, -(-nbytes // _SPACING) * _SPACING, os.POSIX_FADV_DONTNEED)


# Tensors begin at multiples of this in the file: a large page of the page cache that two of them shared would not leave memory.
# What lies between them is a hole, and takes no room on the disk.
_SPACING = 2 << 20
_MADV_HUGEPAGE, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 14, 22, 23  # the last two from Linux 5.14 on
_WRITE_AND_WAIT = 7  # SYNC_FILE_RANGE_WAIT_BEFORE | WRITE | WAIT_AFTER
_IN_MEMORY = "lies in memory (tmpfs): state there frees none; set a folder on a disk"
_ON_NETWORK = "lies on a network: steps wait for it, and a lost server ends the run with SIGBUS; set a folder on a local disk"
_FILE_SYSTEMS = {
    **dict.fromkeys(("tmpfs", "ramfs"), _IN_MEMORY),
    **dict.fromkeys(("nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs"), _ON_NETWORK),
}

# Python's mmap would keep a file descriptor for each tensor, and state may be thousands of them.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _map(fd: int, offset: int, nbytes: int) -> Any:
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        _check(-1, f"mapping {nbytes:,} bytes of state on nvme")
    return (ctypes.c_char * nbytes).from_address(address)


def _unmap(regions: dict[int, tuple[int, int]], address: int, nbytes: int) -> None:
    del regions[address]  # the address may soon be another's
    _libc.munmap(address, nbytes)


def _advise(address: int, length: int, advice: int) -> None:
    result = _libc.madvise(address, length, advice)
    if result != 0 and ctypes.get_errno() == errno.EINVAL and advice != mmap.MADV_DONTNEED:
        return  # this kernel does not know it: slower, and right all the same
    _check(result, "state on nvme")


def _warn_of_file_system(folder: Path) -> None:
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == number and (told := _FILE_SYSTEMS.get(rest.split()[0])):
            warnings.warn(f"nvme folder {str(folder)!r} {told}.", stacklevel=3)
            return
