"""dist_train: train language models on any layout of ranks. Names are loaded when first used, so `import dist_train` is cheap."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "ParallelMesh": "dist_train.mesh.mesh",
    "MeshShape": "dist_train.mesh.shape",
    "shard": "dist_train.zero",
    "ZeroEngine": "dist_train.zero.engine",
    "AdamW": "dist_train.optim",
    "Adam": "dist_train.optim",
    "SGD": "dist_train.optim",
    "Muon": "dist_train.optim",
    "AdamW8bit": "dist_train.optim",
    "Lamb": "dist_train.optim",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'dist_train' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
