"""From a config and a mesh to everything a run needs, in named lines."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dist_train import checkpoint, data
from dist_train.checkpoint import rng
from dist_train.comm.collectives import Collectives
from dist_train.comm.compress import Bf16Wire, Exact, ExactWeights, Int8Blocks, Int8Weights, TopK, WireRecipe
from dist_train.comm.trace import TrafficCounter
from dist_train.config.check import skipped_steps
from dist_train.config.schema import Config
from dist_train.context.apply import apply_context
from dist_train.mesh.mesh import ParallelMesh
from dist_train.model.build import build_model, empty_model
from dist_train.model.init import init_weight
from dist_train.model.transformer import Transformer
from dist_train.observe.observer import Observer
from dist_train.optim import SGD, Adam, AdamW, AdamW8bit, Lamb, Muon
from dist_train.pipeline.executor import Executor
from dist_train.pipeline.stage import cuts_of, layers_of, part_of, schedule_of, tie_ends
from dist_train.remat.policy import apply_remat
from dist_train.tensor import WeightGradients, apply_tensor_plan, defer_weight_gradients, stream_shape
from dist_train.train.requests import Requests
from dist_train.train.resume import Start, began_at, order, restore
from dist_train.train.state import TrainState
from dist_train.zero import DTYPES, Precision, ShardPolicy, ZeroEngine
from dist_train.zero.protocol import Engine, Optimizer
from dist_train.zero.residency import Residency


@dataclass
class Run:
    """One rank's side of a run. What changes during it is in `state`, in the engine's tensors and in the random streams."""

    config: Config
    run_dir: Path
    mesh: ParallelMesh
    comm: Collectives
    traffic: TrafficCounter
    corpus: data.Corpus
    batches: data.TrainBatches
    evaluation: data.EvalBatches
    model: Transformer
    engine: Engine
    executor: Executor
    start: Start | None  # the checkpoint that this process went on from
    state: TrainState
    requests: Requests
    observer: Observer
    skipped_steps: frozenset[int]

    @property
    def checkpoints(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def layout(self) -> dict[str, int]:
        return layout_of(self.config, self.mesh)


def build_run(config: Config, run_dir: Path, mesh: ParallelMesh) -> Run:
    """Build the run and bring it to where `checkpoint.resume` says. Raises ConfigError."""
    _set_determinism(config)
    requests = Requests(run_dir / "save_now" if mesh.is_main else None)
    traffic = TrafficCounter()
    comm = Collectives(traffic)

    corpus = data.prepare(config.data)
    if mesh.is_main:
        corpus.tokenizer.save(run_dir / "tokenizer.json")
        (run_dir / "tokenizer.json").chmod(0o600)  # a vocabulary can tell what the text was about
    batches = data.TrainBatches(corpus, config.train, config.data.shuffle, mesh.dp.size, mesh.dp.index)
    eval_batch = config.train.eval_batch or config.train.micro_batch
    evaluation = data.EvalBatches(corpus, config.train.seq_len, eval_batch, mesh.dp.size, mesh.dp.index)

    model, executor_of = build_parallel_model(config, mesh, comm)
    engine = _ENGINES[config.shard.engine](config, model, mesh, comm)
    executor = executor_of(engine)
    rng.reseed(config.train.seed, 0, mesh.stream, mesh.device)
    start, state = restore(config, run_dir / "checkpoints", engine, mesh, comm, layout_of(config, mesh))
    observer = Observer(config, run_dir, mesh.is_main, state.step)
    if start is not None:
        observer.note(f"going on from {start.path} at step {state.step}")
    skipped = skipped_steps(config.train.skip_steps)
    return Run(
        config, run_dir, mesh, comm, traffic, corpus, batches, evaluation, model, engine, executor, start, state,
        requests, observer, skipped,
    )  # fmt: skip


def build_parallel_model(config: Config, mesh: ParallelMesh, comm: Collectives) -> tuple[Transformer, Callable[[Any], Executor]]:
    """What this rank holds of the model, still without values for our engine, and how it will be run by an engine over it."""
    schedule = partial(schedule_of, config)
    once = schedule(1)
    cuts = cuts_of(mesh.pp.index, once, layers_of(config, once))
    native = config.shard.engine == "native"  # ours fills parameters bucket by bucket, so the whole model is never there
    model = empty_model(config, cuts=cuts) if native else build_model(config).to(mesh.device)
    apply_context(model, mesh.cp, config.context, comm)
    apply_tensor_plan(model, mesh.tp, config.mesh.sequence, comm)
    tie_ends(model)
    queue = WeightGradients() if once.splits else None
    if queue is not None:
        defer_weight_gradients(model, queue)
    apply_remat(model, config.remat)
    stream = partial(stream_shape, hidden=config.model.hidden, group=mesh.tp, sequence=config.mesh.sequence)
    dtype = DTYPES[config.precision.compute]
    return model, lambda engine: Executor(model, engine, mesh, comm, schedule, stream, dtype, queue)


def layout_of(config: Config, mesh: ParallelMesh) -> dict[str, int]:
    """What must be equal for random streams to go on where they were."""
    pp, dp, cp, tp = mesh.shape.degrees
    return {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "stage": config.shard.stage}


def _native(config: Config, model: Transformer, mesh: ParallelMesh, comm: Collectives) -> Engine:
    return ZeroEngine(
        model,
        make_optimizer(config),
        mesh,
        comm,
        policy=ShardPolicy.from_stage(config.shard.stage),
        precision=make_precision(config),
        clip_norm=config.train.clip_norm,
        bucket_bytes=config.shard.bucket_mb * 1e6,
        overlap=config.shard.overlap,
        replicas=config.shard.replicas,
        publish_ahead=config.shard.overlap,
        skip_unused=False,  # this model uses all its parameters
        residency=_residency(config),
        wire=_WIRES[config.shard.compress](config),
        weight_wire=Int8Weights(fused=_fused(config)) if config.shard.compress_weights == "int8" else ExactWeights(),
        init=lambda name, values: init_weight(name, values, config.model, config.train.seed),
        fused=_fused(config),
        part_of=partial(part_of, model),
    )


_WIRES: dict[str, Callable[[Config], WireRecipe]] = {
    "none": lambda config: Exact(DTYPES[config.shard.reduce_dtype]),
    "bf16": lambda config: Bf16Wire(_fused(config)),
    "int8": lambda config: Int8Blocks(fused=_fused(config)),
    "topk": lambda config: TopK(config.shard.compress_fraction, _fused(config)),
}


def _residency(config: Config) -> Residency:
    shard = config.shard
    state, store = ("device" if place == "none" else place for place in (shard.offload, shard.offload_params))
    return Residency(state, store, Path(shard.offload_dir).expanduser() if shard.offload_dir else None)


def _ddp(config: Config, model: Transformer, mesh: ParallelMesh, comm: Collectives) -> Engine:
    from dist_train.zero.engines.ddp import DdpEngine

    precision, clip, size = make_precision(config), config.train.clip_norm, config.shard.bucket_mb * 1e6
    return DdpEngine(model, make_optimizer(config), mesh, comm, precision=precision, clip_norm=clip, bucket_bytes=size)


def _fsdp2(config: Config, model: Transformer, mesh: ParallelMesh, comm: Collectives) -> Engine:
    from dist_train.zero.engines.fsdp2 import Fsdp2Engine

    precision, clip = make_precision(config), config.train.clip_norm
    return Fsdp2Engine(model, make_optimizer(config), mesh, comm, precision=precision, clip_norm=clip)


def _deepspeed(config: Config, model: Transformer, mesh: ParallelMesh, comm: Collectives) -> Engine:
    from dist_train.zero.engines.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(
        model,
        make_optimizer(config),
        mesh,
        comm,
        stage=config.shard.stage,
        precision=make_precision(config),
        clip_norm=config.train.clip_norm,
        bucket_bytes=config.shard.bucket_mb * 1e6,
    )


_ENGINES: dict[str, Callable[[Config, Transformer, ParallelMesh, Collectives], Engine]] = {
    "native": _native,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
}


def make_optimizer(config: Config) -> Optimizer:
    """The recipe that `optim=` names."""
    o, fused = config.optim, _fused(config)
    recipes: dict[str, Optimizer] = {
        "sgd": SGD(o.lr, 0.0, o.weight_decay, fused=fused),
        "momentum": SGD(o.lr, o.momentum, o.weight_decay, fused=fused),
        "adam": Adam(o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, fused=fused),
        "adamw": AdamW(o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, fused=fused),
        "adamw8bit": AdamW8bit(o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, fused=fused),
        "lamb": Lamb(o.lr, o.beta1, o.beta2, o.eps, o.weight_decay, fused=fused),
        "muon": Muon(
            o.lr, o.momentum, weight_decay=o.weight_decay, beta1=o.beta1, beta2=o.beta2, eps=o.eps, fused=fused
        ),
    }  # fmt: skip
    return recipes[o.name]


def _fused(config: Config) -> bool:
    return config.ops == "fused"


def make_precision(config: Config) -> Precision:
    p = config.precision
    split, master = p.master == "split", "fp32" if p.master == "split" else p.master
    return Precision(DTYPES[p.compute], DTYPES[p.grad], DTYPES[config.shard.reduce_dtype], DTYPES[master], split)


def save_checkpoint(run: Run) -> Path:
    """Write everything that a resume needs; collective over the world. Raises CheckpointError on every rank alike."""
    pieces = [*run.engine.pieces(), *rng.pieces(run.mesh.rank, rng.capture(run.mesh.device))]
    state: dict[str, Any] = {
        "train": run.state.to_json(),
        "layout": run.layout,
        "data": run.corpus.fingerprint,
        "order": order(run.config),
        "optim": run.config.optim.name,
        "began_at": began_at(run.config),
    }
    keep, best = run.config.checkpoint.keep, run.state.best_step
    try:
        return checkpoint.save(run.checkpoints, run.state.step, pieces, state, run.comm, run.mesh.world, keep, (best,))
    finally:
        run.engine.put_away()


def _set_determinism(config: Config) -> None:
    if config.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("warn")  # as use_deterministic_algorithms, which would load all of torch._inductor
        # Filling every new tensor only serves to find reads of memory that nobody wrote, at the price of a pass over it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
