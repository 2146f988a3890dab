"""`dist-train train [hydra overrides]`: compose the config, refuse what cannot run, prepare the data, start the ranks."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig

from dist_train.config import check, compose
from dist_train.config.compose import ConfigError
from dist_train.config.schema import Config
from dist_train.launcher import environment, folder
from dist_train.launcher.report import OK, PREEMPTED

_MULTIRUN = ("-m", "--multirun")


def main(argv: list[str]) -> int:
    """Exit code of the run; of a multirun the first that is not 0, which also ends it. Raises ConfigError."""
    import hydra

    compose.register()
    outcome: list[int | ConfigError] = []

    @hydra.main(config_path=str(compose.configs_dir()), config_name="config", version_base="1.3")
    def job(node: DictConfig) -> None:
        # Exceptions do not leave this function: hydra would add lines of its own to them.
        if any(result != OK for result in outcome):
            return
        try:
            outcome.append(train(compose.to_config(node)))
        except ConfigError as error:
            outcome.append(error)

    with _hydra_arguments(argv):
        try:
            job()
        except Exception as error:
            raise compose.translate(error) from error
    for result in outcome:
        if isinstance(result, ConfigError):
            raise result
        if result != OK:
            return result
    return OK


def train(config: Config) -> int:
    """Run this config to its end, on ranks of our own or as one rank of somebody else's job; the exit code."""
    place = environment.detect(os.environ, os.getppid())
    if place is None:
        return _start(config)
    if any(word in sys.argv for word in _MULTIRUN):
        raise ConfigError(f"--multirun: each job starts its own ranks, which it cannot inside {place.by}; run it outside.")
    from dist_train.launcher.join import join

    def prepare() -> Path:
        check.require(config, place.world_size)
        return _prepare(config)

    return join(place, prepare, config.launch.timeout_seconds)


def _start(config: Config) -> int:
    from dist_train.launcher.elastic import Job, run
    from dist_train.launcher.rendezvous import listen

    world_size = check.world_size(config, _devices(config.launch.device))
    check.require(config, world_size)
    with listen(config.launch.port) as listener:
        run_dir = _prepare(config)
        job = Job(
            argv=[sys.executable, "-m", "dist_train.launcher.rank", str(run_dir)],
            ranks=world_size,
            logs=run_dir / "logs",
            tee=False,
            max_restarts=config.launch.max_restarts,
            grace_seconds=config.launch.grace_seconds,
        )
        code = run(job, listener)
    if code == PREEMPTED:
        print(f"dist-train: stopped after saving; go on with the same command and run.dir={run_dir}", file=sys.stderr)
    return code


def _prepare(config: Config) -> Path:
    """What is left to refuse is refused, the data is made ready, and only then does the run folder appear."""
    folder.refuse_old_run(config)
    from dist_train import data

    data.prepare(config.data, progress=config.observe.progress)
    return folder.make_run_folder(config)


def _devices(device: str) -> int:
    import torch

    count = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cuda" and count == 0:
        raise ConfigError("launch.device=cuda: torch sees no CUDA device here; set launch.device=cpu or auto.")
    return count


@contextmanager
def _hydra_arguments(argv: list[str]) -> Iterator[None]:
    """What `hydra.main` reads from the process: its arguments, and the wish that it raises instead of printing."""
    before, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    with tempfile.TemporaryDirectory(prefix="dist_train_") as scratch:
        swept = [f"hydra.sweep.dir={scratch}"] if any(word in argv for word in _MULTIRUN) else []  # it keeps a file there
        sys.argv = ["dist-train train", *argv, *swept]
        os.environ["HYDRA_FULL_ERROR"] = "1"
        try:
            yield
        finally:
            sys.argv = before
            if full_error is None:
                del os.environ["HYDRA_FULL_ERROR"]
            else:
                os.environ["HYDRA_FULL_ERROR"] = full_error
