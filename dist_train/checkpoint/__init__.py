"""Layer 8: everything a run needs to go on, on disk: complete or invisible, loadable on any layout."""

from __future__ import annotations

from dist_train.checkpoint.folders import logger
from dist_train.checkpoint.manifest import CheckpointError
from dist_train.checkpoint.store import find, load, names, prune, read_state, save, verify
from dist_train.params.geometry import Box, Piece

__all__ = [
    "Box",
    "CheckpointError",
    "Piece",
    "find",
    "load",
    "logger",
    "names",
    "prune",
    "read_state",
    "save",
    "verify",
]
