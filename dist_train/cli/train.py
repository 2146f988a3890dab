"""`dist-train train [hydra overrides]`: compose the config, refuse what cannot run, prepare the data, start the ranks."""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

from dist_train.cli.jobs import MULTIRUN, each_job
from dist_train.config import check
from dist_train.config.compose import ConfigError
from dist_train.config.schema import Config
from dist_train.launcher import environment, folder
from dist_train.launcher.lock import FolderLock
from dist_train.launcher.report import OK, PREEMPTED


def main(argv: list[str]) -> int:
    """Exit code of the run; of a multirun the first that is not 0, which also ends it. Raises ConfigError."""
    return each_job(argv, lambda config: train(for_this_job(config)))


def for_this_job(config: Config) -> Config:
    """Jobs of a multirun must not go on from each other: in a given `run.dir` each has the subfolder of its number."""
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    hydra = HydraConfig.get()
    if hydra.mode != RunMode.MULTIRUN or not config.run.dir:
        return config
    run = dataclasses.replace(config.run, dir=str(Path(config.run.dir) / str(hydra.job.num)))
    return dataclasses.replace(config, run=run)


def train(config: Config) -> int:
    """Run this config to its end: on ranks of our own, as one node of several, or as one rank of somebody else's job."""
    node = environment.detect_node(os.environ)
    place = environment.detect(os.environ, os.getppid()) if node is None else None
    if place is not None and place.by == "srun" and config.launch.nodes > 1:
        ranks = check.world_size(config, _devices(config.launch.device))
        node = environment.node_of_step(os.environ, place, config.launch.nodes, ranks)
    if node is not None:
        return _start_node(config, node)
    if config.launch.kind == "ssh":
        return _start_over_ssh(config, place)
    if place is None:
        return _start(config)
    if any(word in sys.argv for word in MULTIRUN):
        raise ConfigError(f"--multirun: each job starts its own ranks, which it cannot inside {place.by}; run it outside.")
    from dist_train.launcher.join import join

    folders: list[Path] = []  # of rank 0, which alone calls `prepare`
    with ExitStack() as held:

        def prepare() -> Path:
            check.require(config, place.world_size)
            run_dir, lock = _prepare(config)
            held.enter_context(lock)
            folders.append(run_dir)
            return run_dir

        code = join(place, prepare, config.launch.timeout_seconds)
    for run_dir in folders:
        _tell_end(config, run_dir, code)
    return code


def _start_node(config: Config, place: environment.NodePlace) -> int:
    if any(word in sys.argv for word in MULTIRUN):
        raise ConfigError("--multirun: its jobs start one after the other; on several nodes start each by itself.")
    if place.nodes != config.launch.nodes:
        rule = f"the environment says that {place.nodes} nodes were started"
        raise ConfigError(f"launch.nodes={config.launch.nodes}: {rule}; set launch.nodes={place.nodes}.")
    from dist_train.launcher.node import run_node

    world_size = check.world_size(config, _devices(config.launch.device))
    folders: list[Path] = []  # of node 0, which alone calls `prepare`
    with ExitStack() as held:

        def prepare() -> tuple[Path, tuple[int, ...]]:
            check.require(config, world_size)
            run_dir, lock = _prepare(config)
            held.enter_context(lock)
            folders.append(run_dir)
            return run_dir, lock.descriptors

        code = run_node(place, config.launch, prepare, world_size // place.nodes)
    for run_dir in folders:
        _tell_end(config, run_dir, code)
    return code


def _start_over_ssh(config: Config, place: environment.Place | None) -> int:
    if place is not None:
        raise ConfigError(f"launch.kind=ssh: starts the ranks of all hosts, which {place.by} has done; leave it out here.")
    if any(word in sys.argv for word in MULTIRUN):
        raise ConfigError("--multirun: launch.kind=ssh starts one run on all hosts; start each run of a sweep by itself.")
    from dist_train.launcher import ssh

    return ssh.start(config, sys.argv[1:])


def _start(config: Config) -> int:
    from dist_train.launcher.elastic import Job, run
    from dist_train.launcher.rendezvous import listen

    world_size = check.world_size(config, _devices(config.launch.device))
    check.require(config, world_size, check.one_node(config))
    with listen(config.launch.port) as listener:
        run_dir, lock = _prepare(config)
        job = Job(
            argv=[sys.executable, "-m", "dist_train.launcher.rank", str(run_dir)],
            ranks=world_size,
            logs=run_dir / "logs",
            tee=False,
            max_restarts=config.launch.max_restarts,
            grace_seconds=config.launch.grace_seconds,
            held=lock.descriptors,
        )
        with lock:
            code = run(job, listener)
    _tell_end(config, run_dir, code)
    return code


def _prepare(config: Config) -> tuple[Path, FolderLock]:
    """What is left to refuse is refused, the data is made ready, and only then does the run folder appear."""
    folder.refuse_early(config)
    from dist_train import data
    from dist_train.train.resume import check_start

    corpus = data.prepare(config.data, progress=config.observe.progress)
    data.check_corpus(corpus, config.train)
    check_start(config, corpus, Path(config.run.dir).expanduser() / "checkpoints" if config.run.dir else None)
    run_dir, lock = folder.make_run_folder(config)
    print(f"run folder: {run_dir}", file=sys.stderr, flush=True)
    return run_dir, lock


def _tell_end(config: Config, run_dir: Path, code: int) -> None:
    if code == OK:
        near = run_dir.relative_to(Path.cwd()) if run_dir.is_relative_to(Path.cwd()) else run_dir
        print(f"finished: {run_dir}  (text from it: dist-train generate {shlex.quote(str(near))})", file=sys.stderr)
    elif code == PREEMPTED:
        given = config.run.dir and any(word in sys.argv for word in MULTIRUN)
        how = f"; it is in {run_dir}" if given else f" and run.dir={run_dir}"
        print(f"dist-train: stopped after saving; go on with the same command{how}", file=sys.stderr)


def _devices(device: str) -> int:
    import torch

    count = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cuda" and count == 0:
        raise ConfigError("launch.device=cuda: torch sees no CUDA device here; set launch.device=cpu or auto.")
    return count
