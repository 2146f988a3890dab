"""`--spread` (`make test`): every test function runs, but of those with many costly cases only a fixed part."""

from __future__ import annotations

import os
import tempfile
from collections import Counter

import pytest

# Before torch is loaded. Threads of several processes that wait for each other on few cores make everything slower, often by a
# factor of ten: who has a core spins for one that waits for it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.toy import SHARED  # noqa: E402

# Of each test function of these files every n-th case runs. Primes, so that a step through the product of several parameters
# meets all values of each.
EVERY = {
    "csrc/test_kernels.py": 5,
    "house/test_benchmarks.py": 3,
    "parity/test_composition.py": 5,
    "parity/test_layouts.py": 11,
    "train/test_layouts.py": 3,
    "train/test_ops.py": 3,
    "train/test_run.py": 3,
    "zero/test_deepspeed.py": 13,
    "zero/test_engines.py": 7,
    "zero/test_library.py": 3,
    "zero/test_placement.py": 3,
    "zero/test_wires.py": 3,
}


def pytest_configure(config: pytest.Config) -> None:
    folder = tempfile.TemporaryDirectory()
    os.environ[SHARED] = folder.name
    config.add_cleanup(folder.cleanup)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--spread", action="store_true", help="of test functions with many costly cases run some")


@pytest.hookimpl(trylast=True)  # what -k and -m leave
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("spread"):
        return
    seen: Counter[str] = Counter()
    kept, left = [], []
    for item in items:
        function = item.nodeid.partition("[")[0]
        every = next((n for file, n in EVERY.items() if file in function), 1)
        (left if seen[function] % every else kept).append(item)
        seen[function] += 1
    config.hook.pytest_deselected(items=left)
    items[:] = kept
