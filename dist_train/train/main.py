"""What every rank runs."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import nullcontext
from pathlib import Path

from dist_train.config import check
from dist_train.config.schema import Config
from dist_train.mesh.mesh import ParallelMesh
from dist_train.tensor.check import check_states
from dist_train.train.build import build_run
from dist_train.train.loop import Loop


def run_rank(config: Config, run_dir: Path) -> int:
    """Train as one rank of the launched job; the exit code: 0 done, 75 stopped after saving. Raises ConfigError."""
    check.require(config, int(os.environ.get("WORLD_SIZE", "1")))
    mesh_config, launch = config.mesh, config.launch
    mesh = ParallelMesh.from_environment(
        mesh_config.pp, mesh_config.dp, mesh_config.cp, mesh_config.tp, launch.device, launch.timeout_seconds
    )
    _log_to(run_dir / "logs" / f"rank_{mesh.rank:05d}.log" if mesh.is_main else None)
    try:
        return train(config, run_dir, mesh)
    finally:
        mesh.close()


def train(config: Config, run_dir: Path, mesh: ParallelMesh) -> int:
    """Train on a mesh that stands already; returns as `run_rank`."""
    run = build_run(config, run_dir, mesh)
    looks = check_states(run.model, mesh.tp, run.comm) if config.observe.check_states else nullcontext()
    try:
        with looks:
            return Loop(run).run()
    finally:
        run.observer.close()
        run.requests.close()


def _log_to(file: Path | None) -> None:
    """Python's warnings and log lines go to standard error, which other ranks' launcher put into a file, and to `file`."""
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if file is not None:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.touch(mode=0o600)
        handlers.append(logging.FileHandler(file))
    logging.basicConfig(level=logging.INFO, handlers=handlers, format="%(asctime)s %(levelname)s %(message)s", force=True)
    logging.captureWarnings(True)
