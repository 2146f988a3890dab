"""The random streams of a rank, in and out of a checkpoint.

Streams: `python` (random), `numpy` (its global generator), `torch` (the CPU generator), `cuda` (this rank's device, when it
is one) and any torch.Generator that the caller names (one for each axis, say). Each is a uint8 tensor of fixed length,
saved as `rng/<rank>/<stream>` by every rank for itself: no rank ever resumes with another rank's stream.

On a changed layout "the same stream" has no meaning, since ranks hold other parts of the batch and the model. The rule:
when the layout is not the saved one, every rank seeds its streams from (seed, step, rank, stream) and nothing else, so two
resumes of one checkpoint on one new layout agree with each other.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dist_train.checkpoint.manifest import CheckpointError
from dist_train.checkpoint.store import load, names
from dist_train.params.geometry import Piece

_PYTHON = struct.Struct("<q625Q?d")  # version, 624 words and the position, whether a second Gaussian is cached, that Gaussian
_NUMPY = struct.Struct("<624Qq?d")
_NONE: Mapping[str, torch.Generator] = {}


def capture(device: torch.device, generators: Mapping[str, torch.Generator] = _NONE) -> dict[str, Tensor]:
    """The state of every stream of this process as uint8 tensors on the CPU, by stream name."""
    version, words, gauss = random.getstate()
    streams = {"python": _tensor(_PYTHON.pack(version, *words, gauss is not None, gauss or 0.0))}
    state = np.random.get_state(legacy=False)
    if state["bit_generator"] != "MT19937":
        raise CheckpointError(
            f"numpy's global generator is {state['bit_generator']}; only MT19937, its default, can be saved. "
            "Leave np.random.set_bit_generator alone and make a np.random.Generator of your own."
        )
    words, position = state["state"]["key"].tolist(), state["state"]["pos"]
    streams["numpy"] = _tensor(_NUMPY.pack(*words, position, bool(state["has_gauss"]), state["gauss"]))
    streams["torch"] = torch.get_rng_state()
    if device.type == "cuda":
        streams["cuda"] = torch.cuda.get_rng_state(device)
    return streams | {name: generator.get_state() for name, generator in generators.items()}


def restore(streams: Mapping[str, Tensor], device: torch.device, generators: Mapping[str, torch.Generator] = _NONE) -> None:
    """Put this process's streams back to what `capture` saw. Raises CheckpointError when one is missing or malformed."""
    try:
        version, *words, has_gauss, gauss = _PYTHON.unpack(_bytes(streams["python"]))
        random.setstate((version, tuple(words), gauss if has_gauss else None))
        *keys, position, has_gauss, cached = _NUMPY.unpack(_bytes(streams["numpy"]))
        np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, int(has_gauss), cached))
        torch.set_rng_state(streams["torch"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(streams["cuda"], device)
        for name, generator in generators.items():
            generator.set_state(streams[name])
    except (KeyError, ValueError, TypeError, RuntimeError, struct.error) as error:
        raise CheckpointError(f"random streams do not fit this program ({type(error).__name__}: {error}).") from error


def reseed(seed: int, step: int, rank: int, device: torch.device, generators: Mapping[str, torch.Generator] = _NONE) -> None:
    """Seed every stream from (seed, step, rank, stream) alone: the rule for a changed layout, and for a fresh start (step 0)."""

    def draw(stream: int) -> int:
        sequence = np.random.SeedSequence([seed & (2**64 - 1), step, rank, stream])
        return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))  # torch takes 63 bits

    random.seed(draw(0))
    np.random.seed(draw(1) & 0xFFFFFFFF)
    torch.random.default_generator.manual_seed(draw(2))
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(draw(3))
    for index, name in enumerate(sorted(generators)):
        generators[name].manual_seed(draw(4 + index))


def pieces(rank: int, streams: Mapping[str, Tensor]) -> list[Piece]:
    """What `store.save` takes: every stream of this rank under its name."""
    return [Piece.whole(f"rng/{rank}/{stream}", state) for stream, state in streams.items()]


def resume(
    path: Path,
    rank: int,
    seeded_as: int,
    same_layout: bool,
    seed: int,
    step: int,
    device: torch.device,
    generators: Mapping[str, torch.Generator] = _NONE,
) -> bool:
    """Go on with this rank's saved streams, or reseed by the rule above. Returns whether the saved ones were restored.

    They are restored when `same_layout` is true (the caller compares layouts) and all of this rank's streams were saved.
    `seeded_as` stands for the rank in that rule. Raises CheckpointError for a damaged file.
    """
    saved = names(path)
    prefix = f"rng/{rank}/"
    needed = ["python", "numpy", "torch", *(["cuda"] if device.type == "cuda" else []), *generators]
    if not same_layout or any(prefix + stream not in saved for stream in needed):
        reseed(seed, step, seeded_as, device, generators)
        return False
    streams = {stream: torch.empty(saved[prefix + stream][0], dtype=torch.uint8) for stream in needed}
    load(path, pieces(rank, streams))
    restore(streams, device, generators)
    return True


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
