"""The fixture of the known-fault tests: a two-layer model of odd sizes, and batches whose rows have unequal live tokens."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import pickle
from pathlib import Path

import torch
from torch import Tensor, nn

from dist_train.config.compose import compose
from dist_train.config.schema import Config
from dist_train.model.build import build_model

VOCAB, SEQ = 53, 12
SHARED = "DIST_TRAIN_TESTS"  # folder of this session, set in conftest.py
TOY = (
    "model.layers=2", "model.hidden=16", "model.heads=4", "model.kv_heads=2", "model.ffn=32", f"model.vocab={VOCAB}",
    f"train.seq_len={SEQ}", "data=synthetic", "data.synthetic_min_tokens=2", "data.synthetic_max_tokens=11", "optim=sgd",
    "optim.lr=0.1", "optim.weight_decay=0", "lr=constant", "lr.warmup_steps=0", "train.clip_norm=0", "launch.timeout_seconds=15",
    "observe.tensorboard=false", "observe.progress=false", "observe.sample_tokens=0", "launch.device=cpu",
)  # fmt: skip


@functools.cache
def toy_config(*overrides: str) -> Config:
    """The toy with these overrides. Composed once in a session, and not on every rank of every test: it takes 0.3 s."""
    if SHARED not in os.environ:
        return compose([*TOY, *overrides])
    path = Path(os.environ[SHARED], hashlib.sha256(repr(overrides).encode()).hexdigest())
    with open(path, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if found := file.read():
            return pickle.loads(found)
        config = compose([*TOY, *overrides])
        file.write(pickle.dumps(config))
    return config


def toy_model(*overrides: str) -> nn.Module:
    return build_model(toy_config(*overrides), seed=0)


def toy_batch(live: list[int], seed: int = 1) -> tuple[Tensor, Tensor]:
    """(tokens_BT, labels_BT): row i counts `live[i]` of its SEQ tokens."""
    generator = torch.Generator().manual_seed(seed)
    rows_BT = torch.randint(0, VOCAB, (len(live), SEQ + 1), generator=generator)
    labels_BT = rows_BT[:, 1:].clone()
    for row, count in enumerate(live):
        labels_BT[row, count:] = -100
    return rows_BT[:, :-1].contiguous(), labels_BT
