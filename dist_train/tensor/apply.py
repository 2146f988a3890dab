"""The one function that applies a tensor-parallel plan to a model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dist_train.comm.collectives import Collectives
from dist_train.mesh.mesh import Group
from dist_train.model.fan_out import FanOut
from dist_train.model.plan import Layer, State, expand, tensor_plan
from dist_train.model.transformer import Transformer
from dist_train.params.geometry import ParamGeometry, set_geometry
from dist_train.tensor.deferred import WeightGradients
from dist_train.tensor.linear import ColumnFanOut, RowLinear, SharedLayer
from dist_train.tensor.random import OwnDraws
from dist_train.tensor.vocabulary import OwnPositions, VocabularyEmbedding, VocabularyHead, vocabulary_parts


def apply_tensor_plan(
    model: Transformer, group: Group, sequence: bool, comm: Collectives, plan: Sequence[Layer] | None = None
) -> None:
    """Leave this rank's part of every layer in `model`, and tell each parameter its geometry.

    The model has the same values on all ranks, or is on the meta device and stays there. `sequence`: the residual stream is
    split along tokens. `plan`: the model's own (`model/plan.py`) by default. Forward then gives every rank the same logits or
    loss, and each rank back-propagates it once; gradients of parameters that are `partial` over the group's axis are then to be
    added up over it. A group of size 1 leaves the model as it is. Raises ValueError, before anything has changed, for a plan
    that does not fit the model and for heads, widths or vocabularies that do not fit the ranks.
    """
    if group.size == 1:
        return
    layers = expand(tensor_plan(model, sequence) if plan is None else plan, model)
    for name, layer in layers.items():
        _require_parts(name, layer, model, group)
    new = _Parameters(group)
    for name, layer in layers.items():
        _APPLY[layer.style](model, name, layer, new, comm)
    model.tensor_layers = layers  # type: ignore[assignment]  # what `check_states` looks after


def defer_weight_gradients(model: Transformer, queue: WeightGradients | None) -> None:
    """Let backward leave gradients of the linear layers in blocks to `queue`; None: it computes them at once.

    Works on a model with a plan and on one without; there it puts the same layers in place, for one rank.
    """
    alone, comm = Group("tp", (0,), 0), Collectives()
    for block in model.blocks.children():
        for path, module in list(block.named_modules()):
            if type(module) is FanOut:
                block.set_submodule(path, ColumnFanOut(alone, comm, sequence=False))
            elif path in ("attention.out", "mlp.down") and isinstance(module, nn.Linear):
                block.set_submodule(path, RowLinear(module, alone, comm, sequence=False))
        for module in block.modules():
            if isinstance(module, SharedLayer):
                module.queue = queue


def _require_parts(name: str, layer: Layer, model: Transformer, group: Group) -> None:
    for linear, field in layer.cuts:
        value = getattr(model.config, field)
        if value % group.size:
            beside = f"{name.rpartition('.')[0]}.{linear}" if linear else name
            raise ValueError(
                f"model.{field}={value}: {beside} is shared by mesh.tp={group.size} ranks, which does not divide it; "
                f"set model.{field} to a multiple of {group.size}, or mesh.tp to a divisor of {value}."
            )
    if layer.style in ("embedding", "head"):
        vocabulary_parts(model.config.vocab, group)


class _Parameters:
    """New parameters in the place of old ones. One that is used in several places stays one."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self._cut: dict[nn.Parameter, nn.Parameter] = {}

    def cut(self, module: nn.Module, key: str, name: str, dim: int, part: slice) -> None:
        """Leave `part` of dim `dim`."""
        whole = module.get_parameter(key)
        if whole not in self._cut:
            index = [slice(None)] * whole.dim()
            index[dim] = part
            mine = nn.Parameter(whole.detach()[tuple(index)].clone(), requires_grad=whole.requires_grad)
            offset = tuple(part.start if each == dim else 0 for each in range(whole.dim()))
            set_geometry(mine, ParamGeometry(name, tuple(whole.shape), offset, copies=()))
            self._cut[whole] = mine
        setattr(module, key, self._cut[whole])

    def copy(self, module: nn.Module, name: str, partial: bool) -> None:
        """Keep parameters whole: the same on every rank, with a whole gradient or a part of it."""
        axes = (self.group.axis,)
        for key, parameter in module.named_parameters(recurse=False):
            shape = tuple(parameter.shape)
            set_geometry(parameter, ParamGeometry(f"{name}.{key}", shape, (0,) * len(shape), axes, axes if partial else ()))

    def equal(self, extent: int) -> slice:
        """This rank's equal part of so many."""
        each = extent // self.group.size
        return slice(self.group.index * each, (self.group.index + 1) * each)


def _column(model: Transformer, name: str, layer: Layer, new: _Parameters, comm: Collectives) -> None:
    parent = name.rpartition(".")[0]
    for linear_name, _ in layer.cuts:
        linear = model.get_submodule(f"{parent}.{linear_name}")
        assert isinstance(linear, nn.Linear)
        part = new.equal(linear.out_features)
        linear.out_features = part.stop - part.start
        new.cut(linear, "weight", f"{parent}.{linear_name}.weight", 0, part)
        if linear.bias is not None:
            new.cut(linear, "bias", f"{parent}.{linear_name}.bias", 0, part)
    model.set_submodule(name, ColumnFanOut(new.group, comm, layer.takes is State.TOKENS))


def _row(model: Transformer, name: str, layer: Layer, new: _Parameters, comm: Collectives) -> None:
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    new.copy(linear, name, partial=layer.gives is State.TOKENS)
    new.cut(linear, "weight", f"{name}.weight", 1, new.equal(linear.in_features))
    model.set_submodule(name, RowLinear(linear, new.group, comm, layer.gives is State.TOKENS))


def _embedding(model: Transformer, name: str, layer: Layer, new: _Parameters, comm: Collectives) -> None:
    embed, vocab, group = model.get_submodule(name), model.config.vocab, new.group
    assert isinstance(embed, nn.Embedding)
    new.cut(embed, "weight", f"{name}.weight", 0, vocabulary_parts(vocab, group)[group.index])
    model.set_submodule(name, VocabularyEmbedding(embed, vocab, group, comm, layer.gives is State.TOKENS))


def _positions(model: Transformer, name: str, layer: Layer, new: _Parameters, comm: Collectives) -> None:
    positions = model.get_submodule(name)
    assert isinstance(positions, nn.Embedding)
    split = layer.takes is not State.COPY
    new.copy(positions, name, partial=split)
    if split:
        model.set_submodule(name, OwnPositions(positions, new.group))


def _head(model: Transformer, name: str, layer: Layer, new: _Parameters, comm: Collectives) -> None:
    head, vocab, group = model.get_submodule(name), model.config.vocab, new.group
    # A tied weight has the embedding's name, also where the embedding is on another stage of a pipeline.
    stored = "embed.weight" if model.config.tie_embeddings else f"{name}.weight"
    new.cut(head, "weight", stored, 0, vocabulary_parts(vocab, group)[group.index])
    model.set_submodule(name, VocabularyHead(head, vocab, group, comm, layer.takes is State.TOKENS))  # type: ignore[arg-type]


def _local(model: Transformer, name: str, layer: Layer, new: _Parameters, comm: Collectives) -> None:
    new.copy(model.get_submodule(name), name, partial=layer.takes is not State.COPY)


def _random(model: Transformer, name: str, layer: Layer, new: _Parameters, comm: Collectives) -> None:
    if layer.takes is not State.COPY and model.config.dropout > 0:
        model.set_submodule(name, OwnDraws(model.get_submodule(name), new.group))


_APPLY = {
    "column": _column,
    "row": _row,
    "embedding": _embedding,
    "positions": _positions,
    "head": _head,
    "local": _local,
    "random": _random,
}
