"""What the degrees of parallelism ask of the rest of a config. Every refusal names both numbers and the nearest layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from dist_train.config.problem import Problem
from dist_train.config.schema import Config

# Stages on each pipeline rank that a schedule has; None: any number.
CHUNKS: dict[str, int | None] = {"gpipe": None, "1f1b": 1, "interleaved": None, "zero_bubble": 1, "zero_bubble_v": 2}
# The axes over which other people's engines cannot train.
_PEERS_LACK = {"ddp": ("pp",), "fsdp2": ("pp",), "deepspeed": ("pp", "cp", "tp")}
# Optimizers that cannot do with any part of a parameter, and what they need of it.
UNCUT = {"adamw8bit": "blocks of 256 elements", "lamb": "parameters", "muon": "matrices"}


def layout_problems(config: Config) -> Iterator[Problem]:
    """For a config whose single values and model are sane."""
    yield from _tensor(config)
    yield from _context(config)
    yield from _pipeline(config)
    yield from _together(config)


def _tensor(config: Config) -> Iterator[Problem]:
    model, tp = config.model, config.mesh.tp
    for key in ("heads", "kv_heads", "ffn"):
        value = getattr(model, key)
        if value % tp:
            near = _nearest(tp, _divides(value))
            yield Problem("mesh.tp", tp, f"divides model.{key}={value}", f"set mesh.tp={near}, or another model.{key}")
    rows = -(-model.vocab // tp)
    if rows * (tp - 1) >= model.vocab:
        rule = f"leaves the last rank no row of model.vocab={model.vocab} ({rows} a rank)"
        near = _nearest(tp, lambda degree: -(-model.vocab // degree) * (degree - 1) < model.vocab)
        yield Problem("mesh.tp", tp, rule, f"set mesh.tp={near}")


def _context(config: Config) -> Iterator[Problem]:
    model, mesh = config.model, config.mesh
    if config.context == "ulysses":
        for key in ("heads", "kv_heads"):
            each, rest = divmod(getattr(model, key), mesh.tp)
            if not rest and each % mesh.cp:
                rule = f"with context=ulysses it divides the {each} of model.{key} that each rank of mesh.tp={mesh.tp} has"
                near = _nearest(mesh.cp, _divides(each))
                yield Problem("mesh.cp", mesh.cp, rule, f"set mesh.cp={near}, or context=ring")
    if config.context == "ring" and mesh.cp > 1 and model.dropout:
        rule = "attention over a ring of mesh.cp ranks has no dropout"
        yield Problem("model.dropout", model.dropout, rule, "set model.dropout=0, or context=ulysses")


def _pipeline(config: Config) -> Iterator[Problem]:
    model, mesh, wanted = config.model, config.mesh, CHUNKS[config.pipeline]
    if wanted not in (None, mesh.chunks) and mesh.pp > 1:
        rule = f"pipeline={config.pipeline} has exactly {wanted} on each rank"
        yield Problem("mesh.chunks", mesh.chunks, rule, f"set mesh.chunks={wanted}, or pipeline=interleaved")
    if mesh.chunks > 1 and mesh.pp == 1:
        yield Problem("mesh.chunks", mesh.chunks, "with mesh.pp=1 there is one part", "set mesh.chunks=1, or mesh.pp=2 or more")
    stages = mesh.pp * mesh.chunks
    if stages > model.layers:
        near = _nearest(mesh.pp, lambda degree: degree * mesh.chunks <= model.layers)
        rule = f"times mesh.chunks={mesh.chunks} it makes {stages} stages of model.layers={model.layers}"
        yield Problem("mesh.pp", mesh.pp, rule, f"set mesh.pp={near}")
    given = mesh.stage_layers
    if given and (len(given) != stages or sum(given) != model.layers or min(given) < 1):
        rule = f"{stages} numbers (mesh.pp × mesh.chunks) of at least 1 that add up to model.layers={model.layers}"
        yield Problem("mesh.stage_layers", given, rule, "leave it empty for a balanced cut")


def _together(config: Config) -> Iterator[Problem]:
    mesh, engine, optim = config.mesh, config.shard.engine, config.optim.name
    for key in _PEERS_LACK.get(engine, ()):
        if getattr(mesh, key) > 1:
            rule = f"shard.engine={engine} knows nothing of it"
            yield Problem(f"mesh.{key}", getattr(mesh, key), rule, f"set mesh.{key}=1, or shard.engine=native")
    if engine == "ddp" and mesh.tp > 1 and config.precision.compute != "fp32":
        rule = "with shard.engine=ddp a lower precision is torch's autocast, which layers shared over mesh.tp do not follow"
        yield Problem("precision.compute", config.precision.compute, rule, "set precision=fp32, or shard.engine=native")
    if mesh.tp > 1 and optim in UNCUT:
        rule = f"mesh.tp={mesh.tp} divides parameters over ranks, and it needs whole ones or whole blocks"
        yield Problem("optim.name", optim, rule, "set mesh.tp=1, or optim=adamw")


def _divides(number: int) -> Callable[[int], bool]:
    return lambda degree: number % degree == 0


def _nearest(degree: int, possible: Callable[[int], bool]) -> int:
    """The possible degree that is closest; of two the larger one. 1 is always possible."""
    candidates = [other for other in range(1, 2 * degree + 1) if possible(other)]
    return min(candidates, key=lambda other: (abs(other - degree), -other), default=1)
