"""What the tests of engines share: one training loop, the whole state out of every rank's pieces, and distances."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from dist_train.ops.cross_entropy import cross_entropy_sum
from tests.toy import toy_batch


def gathered(engine, mesh, comm):
    """Every logical tensor of the engine's state, put together from all ranks' pieces; what no rank holds is nan.

    Ranks that hold the same elements must hold the same bits, but for buffers, which are of each rank's own batch.
    """
    whole, own = {}, {f"model/{name}" for name, _ in engine.module.named_buffers()}
    pieces, parts = [], []
    for piece in engine.pieces():
        part = piece.tensor.detach().contiguous().view(-1).view(torch.uint8)
        pieces.append((piece.name, piece.shape, piece.offset, piece.tensor.shape, piece.tensor.dtype, part.numel()))
        parts.append(F.pad(part, (0, -part.numel() % 8)))
    mine = torch.cat(parts).numpy().tobytes()  # many tensors take long to pickle
    for facts, held in comm.all_gather_object((pieces, mine), mesh.world):
        rest = torch.frombuffer(bytearray(held), dtype=torch.uint8)
        for name, shape, offset, size, dtype, count in facts:
            part, rest = rest[:count].view(dtype).view(size), rest[count + -count % 8 :]
            target = whole.setdefault(name, torch.full(shape, math.nan).to(dtype))
            box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
            assert name in own or (target[box].isnan() | (target[box] == part)).all(), f"{name} differs between ranks"
            target[box] = part
    return whole


def weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The part of a gathered state that is the model."""
    return {name: value for name, value in state.items() if name.startswith("model/")}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of any tensor's elements, relative to the largest element of that tensor; nan if any is nan."""
    assert found.keys() == expected.keys()
    filled = [name for name in expected if expected[name].numel()]
    assert all(found[name].shape == expected[name].shape for name in expected)
    return max_of((found[n] - expected[n]).abs().max() / expected[n].abs().max().clamp(min=1e-3) for n in filled)


def max_of(values) -> float:
    """The largest, or nan if there is one: Python's own `max` may pass over it."""
    return float(torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values]).max())


def train_steps(engine, mesh, live, count, micro=1, first=0, spoil=None):
    """`count` steps on toy batches of `len(live)` rows, each rank's share in `micro` micro-batches of equal size.

    Returns (loss, norm, skipped) of each step. `spoil`: the step in which the last rank's loss is not finite.
    """
    log, each = [], len(live) // mesh.data.size
    mine = range(mesh.data.index * each, (mesh.data.index + 1) * each)
    for step in range(first, first + count):
        tokens, labels = toy_batch(live, seed=step)
        scale, total, counted = 1 / labels.numel(), 0.0, 0  # as in a run: it keeps sums near 1 and cancels
        for start in range(mine.start, mine.stop, each // micro):
            rows = slice(start, start + each // micro)
            objective, entropy = cross_entropy_sum(engine.module(tokens[rows]), labels[rows])
            if spoil == step and mesh.data.index == mesh.data.size - 1:
                objective = objective * math.inf
            engine.backward(objective * scale, last=rows.stop == mine.stop)
            total, counted = total + float(entropy), counted + int((labels[rows] != -100).sum())
        report = engine.step(weight=counted * scale, sums=(total, counted))
        log.append((float(report.sums[0] / report.sums[1]), float(report.grad_norm), bool(report.skipped)))
    return log
