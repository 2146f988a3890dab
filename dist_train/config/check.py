"""Every rule that a config alone can break, checked before any rank starts, all problems at once.

This is the only place where two groups of the config meet. It never edits the config: a value is right or refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dist_train.config.compose import ConfigError
from dist_train.config.layouts import CHUNKS, UNCUT, layout_problems
from dist_train.config.problem import Problem
from dist_train.config.schema import Config, PrecisionConfig, ShardConfig

_CHOICES = {
    "model.family": ("llama", "gpt"),
    "model.activation": ("silu", "gelu", "relu"),
    "model.init": ("scaled_normal", "xavier", "he"),
    "data.source": ("stdlib", "text", "jsonl", "parquet", "huggingface", "tokens", "synthetic", "blend"),
    "launch.kind": ("local", "ssh"),
    "launch.device": ("auto", "cpu", "cuda"),
    "shard.engine": ("native", "ddp", "fsdp2", "deepspeed"),
    "shard.stage": (0, 1, 2, 3),
    "shard.reduce_dtype": ("fp32", "bf16"),
    "shard.compress": ("none", "bf16", "int8", "topk"),
    "shard.compress_weights": ("none", "int8"),
    "shard.offload": ("none", "host", "nvme"),
    "shard.offload_params": ("none", "host", "nvme"),
    "precision.compute": ("fp32", "bf16", "fp16"),
    "precision.grad": ("fp32", "bf16"),
    "precision.master": ("fp32", "bf16", "split"),
    "optim.name": ("sgd", "momentum", "adam", "adamw", "adamw8bit", "lamb", "muon"),
    "lr.schedule": ("constant", "linear", "cosine", "wsd"),
    "remat": ("none", "selective", "full"),
    "ops": ("fused", "reference"),
    "attention": ("auto", "flash", "sdpa", "math"),
    "pipeline": tuple(CHUNKS),
    "context": ("ring", "ulysses"),
}

# Other people's engines: the ZeRO stages that they have, and the keys of `shard` that they read beside it.
_PEERS = {
    "ddp": ((0,), ("bucket_mb",)),
    "fsdp2": ((3,), ("reduce_dtype",)),
    "deepspeed": ((0, 1, 2, 3), ("bucket_mb", "reduce_dtype")),
}
_DEEPSPEED = "0.19."  # the series whose insides our engine knows

_AT_LEAST: dict[str, float] = {
    **{f"model.{key}": 1 for key in ("layers", "hidden", "heads", "kv_heads", "ffn", "max_positions")},
    **dict.fromkeys(("train.steps", "train.global_batch", "train.micro_batch", "launch.nodes"), 1),
    "shard.replicas": 1,
    **{f"mesh.{key}": 1 for key in ("pp", "cp", "tp", "chunks")},
    **dict.fromkeys(("data.synthetic_documents", "precision.loss_scale_growth_steps", "precision.loss_scale_hysteresis"), 1),
    **dict.fromkeys(("model.vocab", "train.seq_len", "data.synthetic_min_tokens"), 2),
    **{f"train.{key}": 0 for key in ("clip_norm", "z_loss", "eval_every", "eval_batch", "gc_every", "seed")},
    **{f"launch.{key}": 0 for key in ("ranks_per_node", "max_restarts", "port", "grace_seconds")},
    **{f"optim.{key}": 0 for key in ("lr", "weight_decay")},
    **{f"lr.{key}": 0 for key in ("warmup_steps", "decay_steps")},
    **{f"checkpoint.{key}": 0 for key in ("every", "keep")},
    **dict.fromkeys(("data.workers", "data.max_documents", "precision.loss_scale", "model.dropout", "model.init_std"), 0),
    **dict.fromkeys(("observe.sample_tokens", "observe.peak_tflops", "data.eval_fraction", "lr.min_ratio"), 0),
    **{f"optim.{key}": 0 for key in ("beta1", "beta2", "momentum")},
}
_BELOW: dict[str, float] = {"model.dropout": 1, "optim.beta1": 1, "optim.beta2": 1, "optim.momentum": 1}
_AT_MOST: dict[str, float] = {"data.eval_fraction": 0.5, "shard.compress_fraction": 1}
_ABOVE_ZERO = (
    *("shard.bucket_mb", "shard.compress_fraction", "launch.timeout_seconds", "launch.lost_seconds", "optim.eps"),
    *("model.norm_eps", "model.rope_theta", "precision.loss_scale_min"),
)
_PATH_SOURCES = ("text", "jsonl", "parquet", "huggingface", "tokens")
_FILE_SOURCES = ("text", "jsonl", "parquet")
_NO_SUCH_FILE = "no such file, folder or glob", "give a path that exists, seen from this folder"


def get(config: Config, key: str) -> object:
    """The value of a dotted key."""
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def world_size(config: Config, devices: int) -> int:
    """Number of ranks that this config asks for, with `devices` accelerators on each node (0: CPU).

    `mesh.dp=-1` takes what there is: all ranks of all nodes over the other degrees; one on CPU.
    """
    mesh, launch = config.mesh, config.launch
    rest = max(1, mesh.pp * mesh.cp * mesh.tp)  # (`check` refuses what is below 1)
    if mesh.dp > 0:
        return mesh.dp * rest
    per_node = launch.ranks_per_node or (devices if launch.device != "cpu" else 0)
    return max(rest, launch.nodes * per_node // rest * rest)


def check(config: Config, world_size: int) -> list[Problem]:
    """All problems of this config on `world_size` ranks; empty when it can run."""
    problems = [*_single_values(config)]
    wrong = {problem.key.partition(".")[0] for problem in problems}
    problems += _data(config)
    if not wrong & {"model", "train"}:  # these relations divide by single values, which must be sane
        problems += _model(config)
    if not wrong & {"train", "mesh", "shard", "launch"}:
        problems += [*_batch(config, world_size), *_ranks(config, world_size), *_shard(config), *_engine(config, world_size)]
    if not wrong & {"model", "mesh", "shard", "optim", "pipeline", "context"}:
        problems += layout_problems(config)
    if not wrong & {"optim", "shard", "precision"}:
        problems += _optimizer(config)
    return problems


def one_node(config: Config) -> Iterator[Problem]:
    """What stands against starting all ranks on this node, by this process."""
    if config.launch.nodes > 1:
        rule = "launch.kind=local starts the ranks of one node"
        remedy = "start it on every node: launch.kind=ssh, `dist-train submit` (Slurm), or inside srun, mpirun or torchrun"
        yield Problem("launch.nodes", config.launch.nodes, rule, remedy)


def require(config: Config, world_size: int, others: Iterable[Problem] = ()) -> None:
    """Raise ConfigError listing every problem, `others` included."""
    if problems := [*check(config, world_size), *others]:
        raise ConfigError("\n".join(str(problem) for problem in problems))


def skipped_steps(ranges: list[str]) -> frozenset[int]:
    """`["100", "200-202"]` → {100, 200, 201, 202}: steps (1 is the first) whose update is left out. Raises ValueError."""
    found: set[int] = set()
    for text in ranges:
        first, _, last = str(text).partition("-")
        low, high = int(first), int(last or first)
        if low < 1 or high < low:
            raise ValueError(text)
        found.update(range(low, high + 1))
    return frozenset(found)


def _single_values(config: Config) -> Iterator[Problem]:
    for key, choices in _CHOICES.items():
        value = get(config, key)
        if key == "data.source" and config.data.blend:
            continue
        if value not in choices:
            names = ", ".join(str(choice) for choice in choices)
            rule = f"{names} is what there is" if len(choices) == 1 else f"one of {names}"
            yield Problem(key, value, rule, f"set {key}={choices[0]}")
    for key, low in _AT_LEAST.items():
        value = get(config, key)
        if not value >= low:  # type: ignore[operator]  # (written so that nan is refused too)
            yield Problem(key, value, f"at least {low:g}", f"set {key}={low:g} or more")
    for key, high in _BELOW.items():
        value = get(config, key)
        if not value < high:  # type: ignore[operator]
            yield Problem(key, value, f"below {high:g}", f"set a smaller {key}")
    for key, most in _AT_MOST.items():
        value = get(config, key)
        if not value <= most:  # type: ignore[operator]
            yield Problem(key, value, f"at most {most:g}", f"set {key}={most:g} or less")
    for key in _ABOVE_ZERO:
        value = get(config, key)
        if not value > 0:  # type: ignore[operator]
            yield Problem(key, value, "above 0", f"set a positive {key}")
    if config.mesh.dp != -1 and config.mesh.dp < 1:
        yield Problem("mesh.dp", config.mesh.dp, "at least 1, or -1 for as many ranks as there are devices", "set mesh.dp=1")
    try:
        skipped_steps(config.train.skip_steps)
    except ValueError:
        yield Problem("train.skip_steps", config.train.skip_steps, "steps or ranges of steps", 'write it as ["100","200-220"]')


def _model(config: Config) -> Iterator[Problem]:
    model, seq_len = config.model, config.train.seq_len
    if model.hidden % model.heads:
        near = max(1, round(model.hidden / model.heads)) * model.heads
        yield Problem("model.hidden", model.hidden, f"a multiple of model.heads={model.heads}", f"set model.hidden={near}")
    elif model.family == "llama" and model.hidden // model.heads % 2:
        width = model.hidden // model.heads
        rule = f"rotary positions need an even head width, not {width}"
        yield Problem("model.hidden", model.hidden, rule, "change model.heads")
    if model.heads % model.kv_heads:
        near = math.gcd(model.heads, model.kv_heads)
        yield Problem("model.kv_heads", model.kv_heads, f"divides model.heads={model.heads}", f"set model.kv_heads={near}")
    if config.attention == "flash" and config.launch.device == "cpu" and model.dropout > 0:
        rule = f"has no dropout on launch.device=cpu, and model.dropout={model.dropout:g}"
        yield Problem("attention", "flash", rule, "set attention=auto, or model.dropout=0")
    if model.family == "llama" and model.activation != "silu":
        yield Problem("model.activation", model.activation, "the llama family gates with silu", "set model.activation=silu")
    if model.family == "gpt" and model.activation == "silu":
        yield Problem("model.activation", model.activation, "the gpt family has gelu or relu", "set model.activation=gelu")
    if model.family == "gpt" and seq_len > model.max_positions:
        remedy = f"set model.max_positions={seq_len} or a shorter train.seq_len"
        yield Problem("train.seq_len", seq_len, f"at most the {model.max_positions} learned positions", remedy)


def _data(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.source in _PATH_SOURCES and not data.path and not data.blend:
        yield Problem("data.path", '""', f"data={data.source} reads a path", "set data.path=FILE")
    if data.source == "blend" and not data.blend:
        yield Problem("data.blend", "[]", "names at least one source", "set data.blend=[{source: text, path: a.txt, weight: 1}]")
    if data.source in _FILE_SOURCES and data.path and not _exists(data.path):
        yield Problem("data.path", data.path, *_NO_SUCH_FILE)
    for place, item in enumerate(data.blend):
        values = item if isinstance(item, dict) else {}  # what an item must be is told when it is read
        source, path, part = values.get("source"), values.get("path", data.path), values.get("eval_fraction", 0.0)
        if source in _PATH_SOURCES and not path:
            yield Problem(f"data.blend[{place}].path", '""', f"the source {source} reads a path", "give this item a path")
        elif source in _FILE_SOURCES and "path" in values and not _exists(str(path)):
            yield Problem(f"data.blend[{place}].path", path, *_NO_SUCH_FILE)
        if isinstance(part, (int, float)) and not 0 <= part <= _AT_MOST["data.eval_fraction"]:
            yield Problem(f"data.blend[{place}].eval_fraction", part, "between 0 and 0.5", "set the part to hold out")
    if data.tokenizer_vocab > config.model.vocab:
        remedy = f"set model.vocab={data.tokenizer_vocab} or a smaller data.tokenizer_vocab"
        yield Problem("data.tokenizer_vocab", data.tokenizer_vocab, f"at most model.vocab={config.model.vocab}", remedy)
    if data.synthetic_min_tokens > data.synthetic_max_tokens:
        rule = f"at most data.synthetic_max_tokens={data.synthetic_max_tokens}"
        yield Problem("data.synthetic_min_tokens", data.synthetic_min_tokens, rule, "swap the two")
    if data.tokenizer not in ("bytes", "bpe") and data.source not in ("synthetic", "tokens") and not _exists(data.tokenizer):
        yield Problem("data.tokenizer", data.tokenizer, "bytes, bpe or the path of a tokenizer.json", "give a file that exists")


def _batch(config: Config, world_size: int) -> Iterator[Problem]:
    train, mesh = config.train, config.mesh
    dp = mesh.dp if mesh.dp > 0 else max(1, world_size // (mesh.pp * mesh.cp * mesh.tp))
    multiple = train.micro_batch * dp
    if train.global_batch % multiple:
        near = -(-train.global_batch // multiple) * multiple
        rule = f"a multiple of train.micro_batch={train.micro_batch} × mesh.dp={dp} = {multiple}"
        yield Problem("train.global_batch", train.global_batch, rule, f"set train.global_batch={near}, or a smaller micro-batch")


def _ranks(config: Config, world_size: int) -> Iterator[Problem]:
    mesh, launch = config.mesh, config.launch
    if launch.hostfile and launch.kind != "ssh":
        rule = f"is for launch.kind=ssh, and launch.kind={launch.kind} would start on this host alone"
        yield Problem("launch.hostfile", launch.hostfile, rule, "set launch.kind=ssh, or leave launch.hostfile out")
    if launch.kind == "ssh" and not launch.hostfile:
        yield Problem("launch.kind", "ssh", "no hosts are given", "set launch.hostfile to a file with one host a line")
    if not launch.ssh_command:
        yield Problem("launch.ssh_command", "[]", "names no program", "leave it out, or set it as [ssh,-oBatchMode=yes]")
    degrees = mesh.pp * mesh.cp * mesh.tp * max(1, mesh.dp)
    if (mesh.dp > 0 and degrees != world_size) or world_size % degrees:
        rule = f"the degrees multiply to {degrees} ranks but there are {world_size}"
        yield Problem("mesh.dp", mesh.dp, rule, f"start {degrees} ranks, or set mesh.dp=-1")
    data_ranks = world_size // (mesh.pp * mesh.tp)
    if data_ranks % config.shard.replicas:
        rule = f"divides the {data_ranks} data ranks"
        yield Problem("shard.replicas", config.shard.replicas, rule, f"set shard.replicas to a divisor of {data_ranks}")
    if config.shard.replicas > 1 and config.shard.stage == 0:
        rule = "at shard.stage=0 every rank is a replica already"
        yield Problem("shard.replicas", config.shard.replicas, rule, "set shard.stage=1, 2 or 3, or shard.replicas=1")
    if world_size % launch.nodes:
        rule = f"the {world_size} ranks of the mesh are not the same number on each node"
        yield Problem("launch.nodes", launch.nodes, rule, "set mesh.dp so that the ranks are a multiple of launch.nodes")
    if launch.ranks_per_node and launch.ranks_per_node * launch.nodes != world_size:
        rule = f"times launch.nodes={launch.nodes} it is not the {world_size} ranks of the mesh"
        yield Problem("launch.ranks_per_node", launch.ranks_per_node, rule, "leave launch.ranks_per_node=0")


def _shard(config: Config) -> Iterator[Problem]:
    shard, precision = config.shard, config.precision
    if shard.compress != "none" and shard.reduce_dtype != "fp32":
        rule = f"shard.compress={shard.compress} says already what travels"
        yield Problem("shard.reduce_dtype", shard.reduce_dtype, rule, "set shard.reduce_dtype=fp32")
    if shard.compress_weights != "none" and shard.stage == 0:
        yield Problem("shard.compress_weights", shard.compress_weights, "stage 0 gathers no weights", "set shard.stage=1, 2 or 3")
    if shard.offload_params != "none" and shard.stage != 3:
        rule = f"at shard.stage={shard.stage} the model reads its parameters all the time"
        yield Problem("shard.offload_params", shard.offload_params, rule, "set shard.stage=3, or shard.offload_params=none")
    on_nvme = "nvme" in (shard.offload, shard.offload_params)
    if on_nvme and not (shard.offload_dir and Path(shard.offload_dir).expanduser().is_dir()):
        rule, remedy = "nvme needs an existing folder on a fast local disk", "set shard.offload_dir=FOLDER, or host for nvme"
        yield Problem("shard.offload_dir", shard.offload_dir or '""', rule, remedy)
    if shard.offload_dir and not on_nvme:
        rule = "only nvme uses a folder"
        yield Problem("shard.offload_dir", shard.offload_dir, rule, "set shard.offload=nvme, or leave it empty")
    if precision.master == "split" and precision.compute != "bf16":
        rule = f"splits an fp32 master into a bf16 weight and 16 bits, and precision.compute={precision.compute}"
        yield Problem("precision.master", "split", rule, "set precision.compute=bf16, or precision.master=fp32")


def _engine(config: Config, world_size: int) -> Iterator[Problem]:
    engine = config.shard.engine
    if engine == "native":
        return
    stages, reads = _PEERS[engine]
    if config.shard.stage not in stages:
        rule, remedy = f"shard.engine={engine} is stage {stages[0]}", f"set shard.stage={stages[0]}"
        yield Problem("shard.stage", config.shard.stage, rule, remedy)
    if engine == "deepspeed":
        yield from _deepspeed(config)
    known = {"engine", "stage", *reads}
    defaults = {f"shard.{item.name}": item.default for item in fields(ShardConfig) if item.name not in known}
    defaults |= {f"precision.{item.name}": item.default for item in fields(PrecisionConfig) if item.name in ("grad", "master")}
    for key, value in defaults.items():
        if get(config, key) != value:
            rule, remedy = f"shard.engine={engine} has no such choice", f"set {key}={value}, or shard.engine=native"
            yield Problem(key, get(config, key), rule, remedy)
    if world_size == 1:
        yield Problem("shard.engine", engine, "works over two ranks or more", "set mesh.dp=2, or shard.engine=native")


def _deepspeed(config: Config) -> Iterator[Problem]:
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        found = "none"
    if not found.startswith(_DEEPSPEED):
        remedy = "pip install 'deepspeed>=0.19.8,<0.20', or set shard.engine=native"
        yield Problem("shard.engine", "deepspeed", f"needs the package deepspeed {_DEEPSPEED}x; installed: {found}", remedy)
    compute, stage = config.precision.compute, config.shard.stage
    if compute == "fp16" or (compute == "bf16" and stage < 2):
        rule = f"shard.engine=deepspeed does not compute in it at shard.stage={stage}"
        yield Problem("precision.compute", compute, rule, "set precision=fp32, or precision=bf16 with shard.stage=2 or 3")


def _optimizer(config: Config) -> Iterator[Problem]:
    name, engine = config.optim.name, config.shard.engine
    if name in UNCUT and engine != "native":
        rule = f"needs whole {UNCUT[name]}, and shard.engine=native alone cuts by that"
        yield Problem("optim.name", name, rule, "set shard.engine=native, or optim=adamw")
    if name == "adamw8bit" and config.precision.master != "fp32":
        yield Problem("precision.master", config.precision.master, f"optim={name} updates fp32", "set precision.master=fp32")


def _exists(pattern: str) -> bool:
    path = Path(pattern).expanduser()
    if path.exists():
        return True
    anchor = Path(path.anchor) if path.is_absolute() else Path()
    relative = str(path.relative_to(anchor)) if path.is_absolute() else str(path)
    return any(mark in pattern for mark in "*?[") and any(True for _ in anchor.glob(relative))
