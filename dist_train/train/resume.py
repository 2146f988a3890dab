"""Where a run goes on from: found and checked before anything of the run folder is touched, restored once the engine stands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_train import checkpoint, data
from dist_train.checkpoint import CheckpointError, rng
from dist_train.comm.collectives import Collectives
from dist_train.config.compose import ConfigError
from dist_train.config.schema import Config
from dist_train.mesh.mesh import ParallelMesh
from dist_train.optim.scaler import LossScale
from dist_train.train.state import TrainState
from dist_train.zero.protocol import Engine


@dataclass(frozen=True)
class Start:
    """A checkpoint to go on from. `own`: it lies in this run's folder."""

    path: Path
    own: bool

    @property
    def step(self) -> int:
        return int(checkpoint.read_state(self.path)["train"]["step"])


def find_start(config: Config, root: Path | None, older_than: int | None = None) -> Start | None:
    """What `checkpoint.resume` asks for, `root` being this run's own folder of checkpoints if it has one already.

    A path is where a run *begins*: the run's own newer checkpoints win over it, or the same command again would undo its
    work. Only a path into the run's own folder goes back, once: what was saved since then remembers that path. Raises
    ConfigError.
    """
    asked = config.checkpoint.resume
    if asked in ("auto", "never"):
        found = None if root is None else checkpoint.find(root, asked, older_than)
        return None if found is None else Start(found, own=True)
    path = checkpoint.find(Path(asked), asked)
    assert path is not None
    if root is None or not root.is_dir():
        return Start(path, own=False)
    inside = path.resolve().parent == root.resolve()
    own = checkpoint.find(root, "auto", older_than)
    if own is not None and (not inside or checkpoint.read_state(own).get("began_at") == began_at(config)):
        return Start(own, own=True)
    return Start(path, own=inside)


def check_start(config: Config, corpus: data.Corpus, root: Path | None) -> Start | None:
    """`find_start`, refused with a ConfigError where this config cannot go on from it: other shapes, data, order, optimizer."""
    start = find_start(config, root)
    if start is None:
        return None
    from dist_train.model.build import empty_model

    saved, shapes = checkpoint.read_state(start.path), checkpoint.names(start.path)
    for name, param in empty_model(config).named_parameters():
        found = shapes.get(f"model/{name}")
        if found is None or found[0] != tuple(param.shape):
            held = "no such parameter" if found is None else f"shape {list(found[0])}"
            raise ConfigError(
                f"model.*: {name} has shape {list(param.shape)} here and {held} in {start.path}; give the model.* values that it "
                "was made with, another run.dir, or checkpoint.resume=never."
            )
    if weights_only(config, start):
        return start
    if config.checkpoint.same_data:
        for what, mine in (("data", corpus.fingerprint), ("order", order(config))):
            if saved[what] != mine:
                told = "other data or another tokenizer" if what == "data" else f"the order {saved['order']}, not {mine}"
                raise ConfigError(
                    f"checkpoint.same_data=true: {start.path} was made with {told}; give the values of that run, or set "
                    "checkpoint.same_data=false to go on with these (samples may then repeat or be left out)."
                )
    if saved["optim"] != config.optim.name:
        raise ConfigError(
            f"optim.name={config.optim.name}: {start.path} holds the state of {saved['optim']}; set optim={saved['optim']}, or "
            "checkpoint.weights_only=true to begin anew from its weights."
        )
    if start.own and (step := saved["train"]["step"]) > config.train.steps:
        rule = f"{start.path} is further already; set train.steps={step} or more"
        raise ConfigError(f"train.steps={config.train.steps}: {rule}.")
    return start


def began_at(config: Config) -> str | None:
    """The path that `checkpoint.resume` names, if it names one: every checkpoint says which it follows."""
    asked = config.checkpoint.resume
    return None if asked in ("auto", "never") else str(Path(asked).expanduser().resolve())


def weights_only(config: Config, start: Start) -> bool:
    """Weights alone are taken from elsewhere; what this run saved itself it goes on with."""
    return config.checkpoint.weights_only and not start.own


def order(config: Config) -> dict[str, Any]:
    """What decides which sample stands at which position, beside the data."""
    return {"seed": config.train.seed, "seq_len": config.train.seq_len, "shuffle": config.data.shuffle}


def restore(
    config: Config, root: Path, engine: Engine, mesh: ParallelMesh, comm: Collectives, layout: dict[str, int]
) -> tuple[Start | None, TrainState]:
    """Fill engine and random streams from where the run goes on; collective. A fresh state where there is nothing.

    A checkpoint of this run that turns out damaged while it is read is passed over with a warning for the one before it.
    Raises ConfigError on every rank alike.
    """
    fresh = TrainState(loss_scale=LossScale.from_config(config.precision))
    older_than, damage = None, ""
    while True:
        start = _agreed_start(config, root, mesh, comm, older_than)
        if start is None and damage:
            raise CheckpointError(damage)
        if start is None:
            return None, fresh
        anew, state, complaint = weights_only(config, start), fresh, None
        try:
            pieces = list(engine.pieces())
            # What a rank's wire still owes (comm/compress.py) is this rank's alone, and means nothing on another layout.
            owed = [piece for piece in pieces if piece.name.startswith("residual/")]
            kept = [piece for piece in pieces if piece.name.startswith(("model/",) if anew else ("model/", "optim/"))]
            saved = checkpoint.load(start.path, kept)
            if not anew:
                state, same = TrainState.from_json(saved["train"]), saved["layout"] == layout
                if same:
                    checkpoint.load(start.path, owed, strict=False)
                rng.resume(start.path, mesh.rank, mesh.stream, same, config.train.seed, state.step, mesh.device)
        except CheckpointError as error:
            complaint = str(error)
        complaints = [text for text in comm.all_gather_object(complaint, mesh.world) if text is not None]
        if not complaints:
            break
        damage, older_than = complaints[0], start.step
        if config.checkpoint.resume != "auto":  # a path was asked for, so nothing else is taken for it
            raise CheckpointError(damage)
        checkpoint.logger.warning("checkpoint passed over: %s", damage)
    engine.restored()
    if start.own and mesh.is_main:
        _set_aside_after(root, state.step)
    return start, state


def _agreed_start(config: Config, root: Path, mesh: ParallelMesh, comm: Collectives, older_than: int | None) -> Start | None:
    """The start, or the complaint, as rank 0 sees it: ranks that decided alone could differ."""
    answer: tuple[str, bool] | str | None = None
    if mesh.is_main:
        try:
            start = find_start(config, root, older_than)
            answer = None if start is None else (str(start.path), start.own)
        except ConfigError as error:
            answer = str(error)
    answer = comm.broadcast_object(answer, mesh.world)
    if isinstance(answer, str):
        raise ConfigError(answer)
    return None if answer is None else Start(Path(answer[0]), answer[1])


def _set_aside_after(root: Path, step: int) -> None:
    """The run goes back to `step`: its later checkpoints keep their files under a name that no resume takes."""
    for path in root.glob("step_????????"):
        if int(path.name.removeprefix("step_")) > step:
            path.rename(path.with_name(f"{path.name}.left_behind"))
