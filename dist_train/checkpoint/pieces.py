"""Tensors in and out of safetensors files: which rank writes what, one file written, slices read by memory map."""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dist_train.checkpoint.manifest import BLOCK_BYTES, ITEM_BYTES, CheckpointError, FileEntry, Manifest, SavedBox
from dist_train.checkpoint.reshard import slices
from dist_train.params.geometry import Box, Piece

REMEDY = "Resume from another checkpoint: checkpoint.resume=PATH"


@dataclass(frozen=True)
class Claim:
    """A piece without its data: what a rank tells the others that it holds."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box

    @property
    def bytes(self) -> int:
        return self.box.size * ITEM_BYTES[self.dtype]


def claim(piece: Piece) -> Claim:
    """Raises CheckpointError for a piece that does not fit into its tensor or that the format cannot hold."""
    dtype, shape, box = str(piece.tensor.dtype).removeprefix("torch."), tuple(piece.shape), piece.box
    if dtype not in ITEM_BYTES:
        raise CheckpointError(f"tensor {piece.name}: dtype {dtype} cannot be saved; use one of {', '.join(ITEM_BYTES)}.")
    fits = len(shape) == len(box.offset) == len(box.shape) and all(
        o >= 0 and o + s <= n for o, s, n in zip(box.offset, box.shape, shape)
    )
    if not fits:
        raise CheckpointError(f"tensor {piece.name}: box {box.offset} + {box.shape} does not lie in shape {shape}.")
    return Claim(piece.name, dtype, shape, box)


def assign(claims: list[list[Claim]]) -> list[list[int]]:
    """Which of its pieces each rank writes: every distinct box once, replicas spread so that the bytes are balanced.

    A pure function of all ranks' claims, so ranks that gathered the same claims agree without another message. Empty
    boxes are written only for tensors that are empty themselves.
    """
    holders: dict[tuple[str, Box], list[tuple[int, int]]] = {}
    for rank, held in enumerate(claims):
        for index, one in enumerate(held):
            if one.bytes or 0 in one.shape:
                holders.setdefault((one.name, one.box), []).append((rank, index))
    loads, chosen = [0] * len(claims), [[] for _ in claims]  # type: tuple[list[int], list[list[int]]]
    # Pieces that only one rank holds come first, as they leave no choice; then the large ones, which balance worst.
    for where in sorted(holders.values(), key=lambda w: (len({r for r, _ in w}) > 1, -claims[w[0][0]][w[0][1]].bytes)):
        rank, index = min(where, key=lambda pair: (loads[pair[0]], pair))
        loads[rank] += claims[rank][index].bytes
        chosen[rank].append(index)
    return [sorted(indices) for indices in chosen]


def write_file(path: Path, pieces: Iterable[Piece]) -> tuple[FileEntry, list[tuple[str, SavedBox]]]:
    """Write one private (0600) safetensors file and flush it to the device. Raises OSError or SafetensorError.

    A box that is the whole tensor is stored under the tensor's name, another one as `name[0:4, 2:6]`.
    """
    tensors: dict[str, Tensor] = {}
    boxes: dict[str, tuple[str, Box]] = {}
    seen: set[int] = set()
    for piece in pieces:
        host = piece.tensor.detach().to("cpu").contiguous()
        if host.numel() and host.data_ptr() in seen:
            host = host.clone()  # safetensors refuses tied tensors, which are two names here
        seen.add(host.data_ptr())
        key = piece.name if piece.box.shape == tuple(piece.shape) else f"{piece.name}{piece.box}"
        tensors[key], boxes[key] = host, (piece.name, piece.box)
    save_file(tensors, path, metadata={"format": "pt"})
    os.chmod(path, 0o600)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        length = file.read(8)
        header = file.read(int.from_bytes(length, "little"))
        size = os.fstat(file.fileno()).st_size
    entry = FileEntry(size, 8 + len(header), zlib.crc32(header, zlib.crc32(length)))
    places, saved = json.loads(header), []
    for key, (name, box) in boxes.items():
        first, last = places[key]["data_offsets"]
        # From memory, not read back: what the disk then returns is checked against what was meant.
        checksums = _checksums(tensors[key].reshape(-1).view(torch.uint8))
        saved.append((name, SavedBox(box, path.name, entry.header_bytes + first, last - first, checksums)))
    return entry, saved


def _checksums(data: Tensor) -> tuple[int, ...]:
    return tuple(_crc32(block) for block in data.split(BLOCK_BYTES)) if data.numel() else ()


def _crc32(data: Tensor) -> int:
    # (Tensor.numpy would forbid the storage to be resized ever after, and engines do that.)
    return zlib.crc32((ctypes.c_char * data.numel()).from_address(data.data_ptr()))


class Reader:
    """Reads boxes of one checkpoint by memory map. Every block is checked against its checksum before it is first used."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder, self._manifest = folder, manifest
        self._maps: dict[str, Tensor] = {}
        self._good: set[tuple[str, int, int]] = set()  # (file, start of a box, block)

    def read(self, name: str, saved: SavedBox, wanted: Box) -> Tensor:
        """The elements of `wanted`, which lies in `saved.box`: a view of the mapped file in the saved dtype, not to be written.

        Raises CheckpointError naming file and tensor when the file is missing, has another size or does not match a checksum.
        """
        index = slices(wanted, saved.box)
        dtype = self._manifest.tensors[name].dtype
        first, last = _span(saved.box.shape, index, ITEM_BYTES[dtype])
        self.check(name, saved, first, last)
        data = self._map(saved.file)[saved.start : saved.start + saved.bytes]
        return data.view(getattr(torch, dtype)).view(saved.box.shape)[index]

    def check(self, name: str, saved: SavedBox, first: int, last: int) -> None:
        """Check the blocks that hold bytes first .. last-1 of a saved box."""
        for block in range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES)):
            if (saved.file, saved.start, block) in self._good:
                continue
            start, stop = saved.start + block * BLOCK_BYTES, saved.start + min((block + 1) * BLOCK_BYTES, saved.bytes)
            if _crc32(self._map(saved.file)[start:stop]) != saved.crc32[block]:
                raise CheckpointError(
                    f"{self._folder / saved.file}: damaged: tensor {name}, box {saved.box}, bytes {start} to {stop} "
                    f"do not match their checksum. {REMEDY}"
                )
            self._good.add((saved.file, saved.start, block))

    def check_header(self, file: str) -> None:
        """Check existence, size and the safetensors header of a file."""
        entry = self._manifest.files[file]
        if _crc32(self._map(file)[: entry.header_bytes]) != entry.header_crc32:
            raise CheckpointError(f"{self._folder / file}: damaged: its header does not match its checksum. {REMEDY}")

    def _map(self, file: str) -> Tensor:
        if file not in self._maps:
            path, expected = self._folder / file, self._manifest.files[file].bytes
            try:
                size = path.stat().st_size
                if size != expected:
                    raise CheckpointError(f"{path}: damaged: {size} bytes where {expected} were written. {REMEDY}")
                self._maps[file] = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
            except (OSError, RuntimeError) as error:
                raise CheckpointError(f"{path}: not readable ({error}). {REMEDY}") from error
        return self._maps[file]


def _span(shape: tuple[int, ...], index: tuple[slice, ...], item_bytes: int) -> tuple[int, int]:
    """First byte and byte after the last of a box within the row-major array that holds it."""
    first = last = 0
    for extent, part in zip(shape, index):
        first, last = first * extent + part.start, last * extent + part.stop - 1
    return first * item_bytes, (last + 1) * item_bytes
