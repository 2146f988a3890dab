"""Every activation and gradient of one micro-batch, traced on the real model under fake tensors: nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from dist_train.config.schema import Config
from dist_train.model.build import empty_model
from dist_train.ops.cross_entropy import cross_entropy_sum

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class TensorFacts:
    shape: tuple[int, ...]
    dtype: torch.dtype
    bytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> TensorFacts:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.numel() * tensor.element_size())


@dataclass
class Traced:
    """A tensor of the forward pass and the gradient it received; `name` is that of a module or parameter."""

    name: str
    value: TensorFacts
    gradient: TensorFacts | None = None


@dataclass
class StepShapes:
    activations: list[Traced] = field(default_factory=list)  # in the order in which they come to be
    parameters: list[Traced] = field(default_factory=list)


def trace_shapes(config: Config) -> StepShapes:
    """Forward and backward of one micro-batch of `train.micro_batch` sequences of `train.seq_len` tokens.

    A row is the output of a module, or what flowed into one and no module made (`blocks.0.mlp.down (input)` is the gated
    product). A tensor that passes through several modules, reshaped or not, has one row, under the first. Raises ConfigError.
    """
    shapes = StepShapes()
    model = empty_model(config).to(DTYPES[config.precision.compute])
    with FakeTensorMode():
        parameters = {n: torch.empty(p.shape, dtype=p.dtype, requires_grad=True) for n, p in model.named_parameters()}
        tokens_BT = torch.zeros(config.train.micro_batch, config.train.seq_len, dtype=torch.int64)
        record = _recorder(shapes.activations)
        record("tokens", tokens_BT)
        _watch(model, record)
        # Of the three inputs only shape, dtype and device matter here.
        logits_BTV = functional_call(model, parameters, (tokens_BT, tokens_BT, tokens_BT))
        loss, _ = cross_entropy_sum(logits_BTV, tokens_BT, config.train.z_loss)
        record("loss", loss)
        loss.backward()
        for name, parameter in parameters.items():
            gradient = None if parameter.grad is None else TensorFacts.of(parameter.grad)
            shapes.parameters.append(Traced(name, TensorFacts.of(parameter), gradient))
    return shapes


Record = Callable[[str, Tensor], None]


def _recorder(rows: list[Traced]) -> Record:
    seen: dict[int, Tensor] = {}  # by storage; holding the tensors keeps their storages' ids from coming twice

    def record(name: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()._cdata
        if storage in seen:
            return
        seen[storage] = tensor
        row = Traced(name, TensorFacts.of(tensor))
        rows.append(row)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: setattr(row, "gradient", TensorFacts.of(gradient)))

    return record


def _watch(model: nn.Module, record: Record) -> None:
    for name, module in model.named_modules():
        if name and not isinstance(module, nn.ModuleList):
            module.register_forward_pre_hook(partial(_on_input, record, f"{name} (input)"))
            module.register_forward_hook(partial(_on_output, record, name))


def _on_input(record: Record, name: str, module: nn.Module, arguments: tuple[Any, ...]) -> None:
    for argument in arguments:
        if isinstance(argument, Tensor):
            record(name, argument)


def _on_output(record: Record, name: str, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
    first, *others = output if isinstance(output, tuple) else (output,)
    record(name, first)
    for number, other in enumerate(others, 2):
        record(f"{name} (output {number})", other)
