"""Where a model is cut into the stages of a pipeline, and what of it belongs to which."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from dist_train.config.schema import Config
from dist_train.model.flops import head_in_blocks
from dist_train.model.transformer import Cut, Transformer
from dist_train.params.geometry import geometry_of, set_geometry
from dist_train.pipeline.schedule import Schedule


def schedule_of(config: Config, microbatches: int, training: bool = True) -> Schedule:
    """What the pipeline ranks of a config that `config.check` accepts do with so many micro-batches."""
    mesh = config.mesh
    return Schedule(config.pipeline if mesh.pp > 1 else "1f1b", mesh.pp, microbatches, mesh.chunks, training)


def layers_of(config: Config, schedule: Schedule) -> list[int]:
    """How many blocks each stage of a schedule has: as the config says, if it speaks of as many stages, or balanced."""
    given = config.mesh.stage_layers
    if len(given) == schedule.stages:
        return given
    return stage_layers(config.model.layers, schedule.stages, head_in_blocks(config.model))


def stage_layers(layers: int, stages: int, head: float = 0.0) -> list[int]:
    """How many blocks each stage has, so that the slowest one is as fast as can be.

    `head`: what the last stage does beside its blocks (final norm, logits, loss), in blocks. What does not divide goes to later
    stages: earlier ones hold the activations of more micro-batches. Raises ValueError for fewer blocks than stages.
    """
    if layers < stages:
        raise ValueError(f"{layers} blocks for {stages} pipeline stages: each stage needs one; set mesh.pp or mesh.chunks lower.")
    if stages == 1:
        return [layers]
    others = stages - 1
    last = min(range(1, layers - others + 1), key=lambda n: (max(-(-(layers - n) // others), n + head), -n))
    each, more = divmod(layers - last, others)
    return [each + (stage >= others - more) for stage in range(others)] + [last]


def cuts_of(rank: int, schedule: Schedule, layers_of_stages: Sequence[int]) -> list[Cut]:
    """What pipeline rank `rank` holds, chunk by chunk."""
    ends = list(itertools.accumulate(layers_of_stages, initial=0))
    stages = [schedule.stage_of(rank, chunk) for chunk in range(schedule.chunks)]
    return [Cut(ends[stage], ends[stage + 1]) for stage in stages]


def units_of(model: Transformer, cut: Cut) -> list[nn.Module]:
    """The modules with parameters that a part of the model runs through."""
    units: list[nn.Module] = []
    if cut.first == 0:
        units += [model.embed] if model.positions is None else [model.embed, model.positions]
    units += [model.blocks.get_submodule(str(layer)) for layer in range(*cut)]
    return [*units, model.norm, model.head] if cut.last == model.config.layers else units


def part_of(model: Transformer, name: str) -> int:
    """Which of the parts that are here a parameter belongs to, by its name; a tied one to that of the embedding."""
    top, _, rest = name.partition(".")
    if top == "blocks":
        layer = int(rest.partition(".")[0])
        return next(index for index, cut in enumerate(model.cuts) if cut.first <= layer < cut.last)
    end = "first" if top in ("embed", "positions") else "last"
    wanted = 0 if end == "first" else model.config.layers
    return next(index for index, cut in enumerate(model.cuts) if getattr(cut, end) == wanted)


def tie_ends(model: Transformer) -> None:
    """Where the first stage has the embedding and the last one, elsewhere, the head that is tied to it: two copies of one
    parameter, the gradient of which is the sum of both."""
    if not model.config.tie_embeddings or model.begins == model.ends:
        return
    weight = model.embed.weight if model.begins else model.head.weight
    known = geometry_of("embed.weight", weight)
    copies, partial = (*known.copies, "ends"), (*known.partial, "ends")
    set_geometry(weight, replace(known, name="embed.weight", copies=copies, partial=partial))
