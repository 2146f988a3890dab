"""The engines that are compared, each as a function that takes one training step, and what a rank measures of it.

All train the same module from the same weights on the same sequence of batches, with the same AdamW (torch's fused kernel, decay
on matrices alone) and the same clipping. Peers are used as their documentation says, with the settings that suit them best here.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import io
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meters

LR = 1e-5  # small: AdamW amplifies the last bit of a small gradient, and losses are to be compared over many steps


@dataclass(frozen=True)
class Trainer:
    """An engine with its model, as far as a comparison needs it."""

    step: Callable[[], float]  # one training step; this rank's loss
    finish: Callable[[], None] = lambda: None  # returns when all is done that the last step began


@dataclass(frozen=True)
class Setting:
    """What all engines are given. `overrides` make the configuration of the model; `rows` are those of one rank's batch."""

    overrides: tuple[str, ...]
    rows: int
    clip: float  # global norm; 0: none
    extra: Path | None = None  # a file whose `make(name, model, loss, mesh, clip)` makes the engines not known here


@dataclass(frozen=True)
class Turn:
    """A rank's figures of the steps of one turn, each for one step."""

    wall_seconds: float
    cpu_seconds: float
    sent_bytes: float
    losses: list[float]  # of every step


@dataclass(frozen=True)
class Counts:
    """A rank's figures that do not depend on time."""

    calls: int  # Python and C calls of a step
    collectives: dict[str, int]  # of a step, by name
    held_bytes: int | None  # between steps: parameters, gradients, moments and whatever else the engine keeps
    peak_bytes: int | None  # in a step, with activations


class Contestant:
    """One engine on one rank."""

    def __init__(self, mesh: Any, name: str, setting: Setting) -> None:
        from dist_train.comm.collectives import Collectives

        make = _maker(name, setting)  # with all that it imports, which is no memory of the engine
        self._barrier = lambda: Collectives().barrier(mesh.world)
        _assemble("plain", setting, mesh, _plain).step()  # what torch keeps once it has run is no memory of the engine either
        gc.collect()
        self._barrier()
        self._empty_bytes = meters.bytes_allocated()
        self._trainer = _assemble(name, setting, mesh, make)

    def turn(self, steps: int) -> Turn:
        self._barrier()
        sent, started, busy = meters.bytes_sent(), time.perf_counter(), time.process_time()
        losses = [self._trainer.step() for _ in range(steps)]
        self._trainer.finish()
        sent = meters.bytes_sent() - sent
        self._barrier()
        wall, cpu = time.perf_counter() - started, time.process_time() - busy
        return Turn(wall / steps, cpu / steps, sent / steps, losses)

    def counts(self) -> Counts:
        """Takes two steps to count."""
        gc.collect()
        held, empty = meters.bytes_allocated(), self._empty_bytes
        calls = meters.calls(self._whole_step)
        collectives, peak = meters.collectives_and_peak(self._whole_step)
        if held is None or peak is None or empty is None:
            return Counts(calls, collectives, None, None)
        return Counts(calls, collectives, held - empty, peak - empty)

    def _whole_step(self) -> None:
        self._trainer.step()
        self._trainer.finish()


def _assemble(name: str, setting: Setting, mesh: Any, make: Callable[..., Trainer]) -> Trainer:
    """Engine `name` on fresh weights."""
    import torch

    from dist_train.config.compose import compose
    from dist_train.model.build import build_model
    from dist_train.ops.cross_entropy import cross_entropy_sum

    config = compose(list(setting.overrides))
    seq_len, vocab = config.train.seq_len, config.model.vocab
    generator = torch.Generator().manual_seed(mesh.rank)

    def loss(module: Any) -> Any:
        """Mean loss of the next batch, which is the same for every engine."""
        batch_BT = torch.randint(0, vocab, (setting.rows, seq_len + 1), generator=generator)
        return cross_entropy_sum(module(batch_BT[:, :-1]), batch_BT[:, 1:])[0] / (setting.rows * seq_len)

    return make(name, build_model(config, seed=0), loss, mesh, setting.clip)


def _ours(name: str, model: Any, loss: Any, mesh: Any, clip: float) -> Trainer:
    import dist_train as dt

    # As a training run does: parameters that a step updated may arrive during the next forward.
    engine = dt.shard(model, dt.AdamW(lr=LR), mesh, stage=int(name[-1]), clip_norm=clip, publish_ahead=True)

    def step() -> float:
        value = loss(engine.module)
        engine.backward(value)
        engine.step()
        return float(value.detach())

    return Trainer(step, engine.wait)


def _plain(name: str, model: Any, loss: Any, mesh: Any, clip: float) -> Trainer:
    return _torch_step(model, model, loss, clip)


def _ddp(name: str, model: Any, loss: Any, mesh: Any, clip: float) -> Trainer:
    from torch.nn.parallel import DistributedDataParallel

    return _torch_step(DistributedDataParallel(model, gradient_as_bucket_view=True), model, loss, clip)


def _fsdp2(name: str, model: Any, loss: Any, mesh: Any, clip: float) -> Trainer:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    device_mesh = DeviceMesh("cpu", list(range(mesh.dp.size)))
    for block in model.blocks:
        fully_shard(block, mesh=device_mesh)
    fully_shard(model, mesh=device_mesh)
    return _torch_step(model, model, loss, clip)


def _torch_step(module: Any, model: Any, loss: Any, clip: float) -> Trainer:
    import torch

    optimizer = _adamw(model)

    def step() -> float:
        value = loss(module)
        value.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return float(value.detach())

    return Trainer(step)


def _adamw(model: Any) -> Any:
    import torch

    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)


def _deepspeed(name: str, model: Any, loss: Any, mesh: Any, clip: float) -> Trainer:
    import deepspeed

    options = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": clip,  # its own default is 1
        # Buckets of DDP's 25 MB: of its own default each rank allocates 2 GB. At stage 3 parameters below 1e5 elements stay
        # whole, which is its default and faster.
        "zero_optimization": {"stage": int(name[-1]), "reduce_bucket_size": 6_250_000, "allgather_bucket_size": 6_250_000},
        "steps_per_print": 1 << 30,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        engine, *_ = deepspeed.initialize(model=model, optimizer=_adamw(model), config=options)

    def step() -> float:
        value = loss(engine)
        engine.backward(value)
        engine.step()
        return float(value.detach())

    return Trainer(step)


def _import_deepspeed() -> None:
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
    warnings.filterwarnings("ignore", category=FutureWarning)  # of torch, about names that it uses
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed

        # Shared memory for inference alone; it would first be compiled, and teams would meet under one name in it.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo")


def _import_fsdp2() -> None:
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401


ENGINES: dict[str, Callable[..., Trainer]] = {
    "plain": _plain,  # the model alone, without communication: what an engine adds is measured from there
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    **{f"ds{stage}": _deepspeed for stage in range(4)},
    **{f"stage{stage}": _ours for stage in range(4)},
}
_IMPORTS = {_deepspeed: _import_deepspeed, _fsdp2: _import_fsdp2}


def shards_parameters(name: str) -> bool:
    """Whether an engine gathers parameters in forward and backward, which is half as many bytes more."""
    return name == "fsdp2" or name.endswith("3")


def _maker(name: str, setting: Setting) -> Callable[..., Trainer]:
    make = ENGINES.get(name)
    if make is None:
        assert setting.extra is not None
        spec = importlib.util.spec_from_file_location("extra", setting.extra)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.make  # type: ignore[no-any-return]
    if make in _IMPORTS:
        _IMPORTS[make]()
    return make
