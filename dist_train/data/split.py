"""Which documents are held out: by their content, so that copies of a document are never on both sides and that adding
documents moves none of the others."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


def content_bits(text: bytes) -> int:
    """64 bits that depend on the document alone."""
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"held out").digest(), "little")


def certainly_held_out(bits: int, fraction: float) -> bool:
    """Whether `held_out` holds this document out in any corpus large enough."""
    return bits < fraction * 2.0**64


def held_out(bits: npt.NDArray[np.uint64], sizes: npt.NDArray[np.int64], fraction: float) -> npt.NDArray[np.bool_]:
    """Mask of the documents of the evaluation split, given their content bits and their sizes in bytes.

    About `fraction` of the documents. Never more than half of the text, so the training split is not empty; where chance
    holds out none, one document of at most a quarter of the text is; a corpus that has none such has no evaluation split.
    """
    mask = np.zeros(len(bits), dtype=bool)
    if fraction <= 0.0 or not len(bits):
        return mask
    order = np.argsort(bits, kind="stable")
    total = int(sizes.sum(dtype=np.int64))
    fits = np.cumsum(sizes[order], dtype=np.int64) * 2 <= total
    mask[order[fits & (bits[order].astype(np.float64) < fraction * 2.0**64)]] = True
    if not mask.any():
        small = order[sizes[order] * 4 <= total]
        mask[small[:1]] = True
    return mask
