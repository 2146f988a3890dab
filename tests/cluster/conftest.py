"""What the cluster tests share. Nothing is skipped: without root or the packages they fail and say what to do."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tests.cluster.hosts import Hosts, hosts

ROOT = Path(__file__).resolve().parents[2]
DIST_TRAIN = [sys.executable, "-m", "dist_train.cli.main"]
TOY = [
    *("model.layers=2", "model.hidden=32", "model.heads=2", "model.kv_heads=2", "model.ffn=32", "model.vocab=53"),
    *("data=synthetic", "data.synthetic_documents=64", "train.seq_len=16", "train.global_batch=8", "train.micro_batch=2"),
    *("train.eval_every=0", "checkpoint.every=0", "observe.sample_tokens=0", "observe.tensorboard=false"),
    *("observe.progress=false", "launch.device=cpu", "launch.timeout_seconds=60", "launch.grace_seconds=20"),
]


class Groups(LoadScopeScheduling):
    """The hosts of all tests have the same names, so one process runs all that use them. The image is built beside it."""

    def _split_scope(self, nodeid: str) -> str:
        return "image" if "test_image.py" in nodeid else "hosts"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    return Groups(config, log)


@pytest.fixture(scope="session", autouse=True)
def machine() -> None:
    """Root, and the programs that make hosts."""
    if os.geteuid() != 0:
        pytest.fail("tests/cluster makes network namespaces and needs root")
    if missing := [name for name in ("ip", "nsenter", "unshare", "hostname") if shutil.which(name) is None]:
        pytest.fail(f"tests/cluster needs {', '.join(missing)}: run `make test-cluster`, which installs what it needs")


@pytest.fixture
def two_hosts() -> Iterator[Hosts]:
    with hosts(2) as up:
        yield up


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The override that keeps token files in one folder for all tests."""
    return f"data.cache_dir={tmp_path_factory.mktemp('tokens')}"
