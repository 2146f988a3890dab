"""One recipe on any layout of ranks, and in torch alone: losses, norms and the whole state after some steps."""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache

import torch
from torch import nn
from torch.nn import functional as F

from dist_train.comm.trace import TrafficCounter
from dist_train.config.schema import Config
from dist_train.context.split import split_micro_batch
from dist_train.data.batch import MicroBatch
from dist_train.mesh.shape import MeshShape
from dist_train.model.build import build_model
from dist_train.train import build
from tests.ranks import mesh_of
from tests.toy import toy_config
from tests.zero.helpers import gathered


def rows(step: int, count: int, seq_len: int, vocab: int) -> MicroBatch:
    """`count` rows of packed documents of unequal length; the last token of each predicts nothing, nor does padding."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, vocab, (count, seq_len), generator=draw)
    documents, positions, labels = (torch.zeros(count, seq_len, dtype=torch.int64) for _ in range(3))
    for row in range(count):
        cuts = torch.randperm(seq_len - 1, generator=draw)[: row % 3].add(1).sort().values.tolist()
        for number, (start, stop) in enumerate(zip([0, *cuts], [*cuts, seq_len], strict=True)):
            documents[row, start:stop] = number
            positions[row, start:stop] = torch.arange(stop - start)
            labels[row, start : stop - 1] = tokens[row, start + 1 : stop]
            labels[row, stop - 1] = -100
        labels[row, seq_len - row % 4 * 2 :] = -100
    return MicroBatch(tokens, labels, positions, documents.to(torch.int32), tuple(range(count)))


def part(batch: MicroBatch, start: int, stop: int) -> MicroBatch:
    names = ("tokens_BT", "labels_BT", "positions_BT", "documents_BT")
    return replace(batch, sample_ids=batch.sample_ids[start:stop], **{n: getattr(batch, n)[start:stop] for n in names})


def shape_of(config: Config) -> MeshShape:
    return MeshShape(config.mesh.pp, config.mesh.dp, config.mesh.cp, config.mesh.tp)


def traffic(pool, comm, config: Config):
    """Bytes that this rank sends in one step, by collective and axis."""
    comm.recorder = TrafficCounter()
    try:
        train(pool, comm, config, 1)
        return {name: facts["bytes"] for name, facts in comm.recorder.per_step(1).items()}
    finally:
        comm.recorder = None


def train(pool, comm, config: Config, steps: int, first: int = 0, state=None, loss_scale: float = 0.0, frozen=()):
    """((loss, norm, skipped) of each step, whole state on the first rank) of a config's layout on a pool of ranks."""
    mesh = mesh_of(shape_of(config), pool)
    model, executor_of = build.build_parallel_model(config, mesh, comm)
    freeze(model, frozen)
    engine = build._ENGINES[config.shard.engine](config, model, mesh, comm)
    executor = executor_of(engine)
    engine.loss_scale = loss_scale or (1024.0 if config.precision.compute == "fp16" else 1.0)
    torch.manual_seed(mesh.stream)
    if state is not None:
        fill(engine, state)
    log, copies, t = [], [], config.train
    each = t.global_batch // mesh.dp.size
    scale = 1 / (t.global_batch * t.seq_len)
    for step in range(first, first + steps):
        batch = rows(step, t.global_batch, t.seq_len, config.model.vocab)
        starts = range(mesh.dp.index * each, (mesh.dp.index + 1) * each, t.micro_batch)
        micro = [split_micro_batch(part(batch, s, s + t.micro_batch), mesh.cp) for s in starts]
        entropy = executor.train(micro, scale, t.z_loss)
        live = sum(m.live_tokens for m in micro)
        report = engine.step(weight=live * scale, sums=(entropy, live if mesh.speaks else 0))
        copies.append(digests(engine))
        log.append((float(report.sums[0] / report.sums[1]), float(report.grad_norm), bool(report.skipped)))
    for step in zip(*comm.all_gather_object(copies, mesh.world), strict=True):
        require_equal(step)
    whole = gathered(engine, mesh, comm)
    return log, whole if mesh.is_main else None


def digests(engine) -> dict[tuple, bytes]:
    """Of every part of the model that this rank holds."""
    found = {}
    for piece in engine.pieces():
        if piece.name.startswith("model/"):
            bits = piece.tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
            found[piece.name, piece.offset, tuple(piece.tensor.shape)] = hashlib.sha256(bits).digest()
    engine.put_away()
    return found


def require_equal(ranks) -> None:
    """What several ranks hold of the model is the same bits on all of them."""
    seen = {}
    for key, bits in itertools.chain(*(held.items() for held in ranks)):
        assert seen.setdefault(key, bits) == bits, f"copies of {key[0]} differ"


def freeze(model: nn.Module, patterns) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(not any(fnmatch(name, pattern) for pattern in patterns))


def fill(engine, state) -> None:
    """Bring an engine to a gathered state."""
    for piece in engine.pieces():
        if piece.name in state:
            piece.tensor.copy_(
                state[piece.name][tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.tensor.shape, strict=True))]
            )
    engine.restored()


@cache
def base(*overrides: str) -> Config:
    return toy_config("train.seed=0", *overrides)


@cache
def alone(steps: int, *overrides: str, frozen=()):
    """The recipe of `base` in torch alone, all rows at once: (loss, norm) of each step, and the weights at the end."""
    config = base(*overrides)
    o, t = config.optim, config.train
    model = build_model(replace(config, ops="reference"), seed=0)
    freeze(model, frozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    sgd = o.name == "sgd"
    stepper = torch.optim.SGD(groups, o.lr) if sgd else torch.optim.AdamW(groups, o.lr, betas=(o.beta1, o.beta2), eps=o.eps)
    log = []
    for step in range(steps):
        batch = rows(step, t.global_batch, t.seq_len, config.model.vocab)
        logits = model(batch.tokens_BT, batch.positions_BT, batch.documents_BT).flatten(0, 1)
        loss = F.cross_entropy(logits, batch.labels_BT.flatten(), ignore_index=-100)
        live = batch.labels_BT.flatten() != -100
        objective = loss + t.z_loss * logits.logsumexp(-1).square()[live].mean()
        objective.backward()
        norm = nn.utils.get_total_norm([p.grad for p in trained])
        for param in trained:
            param.grad *= min(1.0, t.clip_norm / norm.item()) if t.clip_norm else 1.0
        stepper.step()
        stepper.zero_grad()
        log.append((loss.item(), norm.item()))
    return log, {f"model/{name}": param.detach().clone() for name, param in model.named_parameters()}


def worst(log, weights, exact_log, exact) -> float:
    """Largest relative error of any loss, norm and parameter (of its largest element)."""
    assert weights.keys() == exact.keys() and not any(skipped for *_, skipped in log)
    errors = [abs(a - b) / b for row, sure in zip(log, exact_log, strict=True) for a, b in zip(row[:2], sure, strict=True)]
    errors += [float((weights[n] - v).abs().max() / v.abs().max().clamp(min=1e-3)) for n, v in exact.items()]
    assert not any(math.isnan(error) for error in errors)
    return max(errors)


def distance(log, weights, exact_log, exact) -> float:
    """Euclidean distance of all losses, norms and parameters, each relative to the size of its kind."""
    assert weights.keys() == exact.keys()
    square = sum((a - b) ** 2 for row, sure in zip(log, exact_log, strict=True) for a, b in zip(row[:2], sure, strict=True))
    moved = sum(float((weights[n] - v).double().square().sum()) for n, v in exact.items())
    return math.sqrt(square / len(log) + moved)
