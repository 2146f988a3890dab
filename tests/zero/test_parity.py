"""The parity matrix: one recipe on every engine, stage, number of ranks, micro-batches, precision and recompute policy.

Every combination that `config.check` accepts is a case. It runs once, and is held against other runs:

    twin         the same bits: the case without recompute and, for our engine, at the lowest stage that reduces as often (0 and
                 1 reduce the sum of all micro-batches, 2 and 3 each of them; one micro-batch makes them equal)
    base         our stage 0, fp32, as many ranks and micro-batches: the whole state within 1e-6 for our engine, 1e-5 for others
    one process  torch alone, fp32, the whole batch at once: losses, norms and weights within 1e-5 in fp32. A lower precision is
                 no further from it than twice what our stage 0 is with one rank and one micro-batch in that precision

PARITY=all (`make test-parity`) tests all cases; otherwise a draw of them, always the same, is tested (see `draw`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import math
import os
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dist_train.config.check import check
from dist_train.model.build import build_model
from dist_train.remat.policy import POLICIES, apply_remat
from dist_train.train import build
from tests.ranks import run_ranks
from tests.toy import toy_batch, toy_config
from tests.zero.helpers import distance, gathered, max_of, train_steps, weights

LIVE = [11, 1, 7, 3, 2, 11, 5, 9, 4, 0, 6, 10, 8, 2, 1, 1, 12, 5, 0, 3, 7, 12, 2, 9, 6, 1, 4, 8, 10, 3, 5, 11, 2, 6, 1, 9]
STEPS = 3
CLIP = 0.4  # between the norms of the steps: a wrong scale shows in the weights of a step that is not clipped
LR = {"sgd": 1.0, "adamw": 3e-3}
DECAY = {"sgd": 0.0, "adamw": 0.1}
EPS = 1e-4  # of AdamW: with less, it is the rounding of the smallest gradients that decides where their elements go
AXES = {
    "engine": [name for name in build._ENGINES if name != "deepspeed" or importlib.util.find_spec("deepspeed")],
    "stage": [0, 1, 2, 3],
    "ranks": [1, 2, 3, 4],
    "micro": [1, 3],
    "precision": ["fp32", "bf16", "fp16"],
    "remat": list(POLICIES),
    "optimizer": ["sgd", "adamw"],
}


@dataclass(frozen=True)
class Case:
    engine: str
    stage: int
    ranks: int
    micro: int
    precision: str
    remat: str
    optimizer: str

    def __str__(self):
        return f"{self.engine}-{self.stage}-{self.ranks}ranks-{self.micro}micro-{self.precision}-{self.remat}-{self.optimizer}"

    @property
    def twin(self):
        lowest = 2 if self.micro > 1 and self.stage >= 2 else 0
        return replace(self, remat="none", stage=lowest if self.engine == "native" else self.stage)

    @property
    def base(self):
        return replace(self, remat="none", engine="native", stage=0, precision="fp32")

    @property
    def lower(self):
        return replace(self.base, ranks=1, micro=1, precision=self.precision)


@functools.cache
def base_config():
    return toy_config(f"train.clip_norm={CLIP}", f"train.global_batch={len(LIVE)}", f"train.steps={STEPS}", f"optim.eps={EPS}")


def config_of(case):
    """The configuration of a case, in several buckets if the engine has that choice; None where it is refused."""
    config = base_config()
    train = replace(config.train, micro_batch=len(LIVE) // (case.ranks * case.micro))
    optim = replace(config.optim, name=case.optimizer, lr=LR[case.optimizer], weight_decay=DECAY[case.optimizer])
    precision = replace(config.precision, compute=case.precision)
    config = replace(config, train=train, optim=optim, precision=precision, mesh=replace(config.mesh, dp=case.ranks))
    shard = replace(config.shard, engine=case.engine, stage=case.stage)
    for chosen in (replace(shard, bucket_mb=0.004), shard):
        config = replace(config, remat=case.remat, shard=chosen)
        if not check(config, case.ranks):
            return config
    return None


@functools.cache
def every_case():
    return [case for values in itertools.product(*AXES.values()) if config_of(case := Case(*values)) is not None]


def facts(case):
    """What a draw must hold: all pairs of values, each value at each stage of each engine, and of our own the pairs that hang
    together there: micro-batches with any other value."""
    values = [(axis, getattr(case, axis)) for axis in AXES]
    kind = (case.engine, case.stage, case.micro) if case.engine == "native" else (case.engine, case.stage)
    return {*itertools.combinations(values, 2), *((kind, value) for value in values)}


@functools.cache
def draw():
    """A few cases that hold every fact of all of them, the same in every session."""
    left = {case: facts(case) for case in sorted(every_case(), key=lambda case: hashlib.sha256(str(case).encode()).digest())}
    missing, drawn = set().union(*left.values()), []
    while missing:
        drawn.append(max(left, key=lambda case: len(left[case] & missing)))
        missing -= left[drawn[-1]]
    return sorted(drawn, key=str)


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", every_case() if os.environ.get("PARITY") == "all" else draw(), ids=str)


def _train(mesh, comm, config, micro):
    model = build_model(config, seed=0)
    apply_remat(model, config.remat)
    engine = build._ENGINES[config.shard.engine](config, model, mesh, comm)
    engine.loss_scale = 1024.0 if config.precision.compute == "fp16" else 1.0
    log = train_steps(engine, mesh, LIVE, STEPS, micro)
    state = gathered(engine, mesh, comm)
    return log, state if mesh.is_main else None


@functools.cache
def run(case):
    """((loss, norm, skipped) of each step, the whole state at the end) of a case."""
    (log, state), *others = run_ranks(case.ranks, _train, config_of(case), case.micro)
    assert all(other == log for other, _ in others), "ranks report different losses or norms"
    assert not any(skipped for *_, skipped in log)
    # Tensors of another process hold a file descriptor each, and all cases together more than there are.
    return [(loss, norm) for loss, norm, _ in log], {name: value.clone() for name, value in state.items()}


@functools.cache
def one_process(optimizer):
    """The recipe in torch alone: (loss, norm) of each step and the weights at the end."""
    model = build_model(base_config(), seed=0)
    decayed, spared = ([p for p in model.parameters() if (p.ndim >= 2) == wide] for wide in (True, False))
    groups = [{"params": decayed, "weight_decay": DECAY[optimizer]}, {"params": spared, "weight_decay": 0.0}]
    if optimizer == "sgd":
        stepper = torch.optim.SGD(groups, LR[optimizer])
    else:
        stepper = torch.optim.AdamW(groups, LR[optimizer], betas=(0.9, 0.95), eps=EPS)
    log = []
    for step in range(STEPS):
        tokens, labels = toy_batch(LIVE, seed=step)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        for param in model.parameters():
            param.grad *= min(1.0, CLIP / norm.item())
        stepper.step()
        stepper.zero_grad()
        log.append((loss.item(), norm.item()))
    return log, {f"model/{name}": param.detach().clone() for name, param in model.named_parameters()}


def log_error(log, expected):
    """Largest relative difference of any loss or norm."""
    return max_of(abs(a - b) / b for row, exact in zip(log, expected, strict=True) for a, b in zip(row, exact, strict=True))


def weight_error(found, expected):
    """Euclidean distance over all weights."""
    return math.sqrt(math.fsum(float((found[name] - value).double().square().sum()) for name, value in expected.items()))


@functools.cache
def start():
    return {f"model/{name}": param.detach() for name, param in build_model(base_config(), seed=0).named_parameters()}


def movement_error(found, expected):
    """Largest error of any tensor relative to how far it moved: some move by less than the tolerance of their values."""
    return max_of((found[n] - v).abs().max() / (v - start()[n]).abs().max() for n, v in expected.items())


def test_a_case_computes_what_its_references_compute(case):
    log, state = run(case)
    if case != case.twin:
        same_log, same = run(case.twin)
        assert log == same_log and state.keys() == same.keys()
        assert [name for name in same if not torch.equal(state[name], same[name])] == [], f"not the bits of {case.twin}"
    exact_log, exact = one_process(case.optimizer)
    _, base = run(case.base)
    assert {name: (value.shape, value.dtype) for name, value in state.items()} == {n: (v.shape, v.dtype) for n, v in base.items()}
    if case.precision == "fp32":
        assert log_error(log, exact_log) <= 1e-5
        assert distance(weights(state), exact) <= 1e-5 and movement_error(state, exact) <= 1e-3
        assert distance(state, base) <= (1e-6 if case.engine == "native" else 1e-5)
    else:
        lower_log, lower = run(case.lower)
        assert log_error(log, exact_log) <= 2 * log_error(lower_log, exact_log)
        assert weight_error(state, exact) <= 2 * weight_error(lower, exact)


@pytest.mark.parametrize("optimizer", AXES["optimizer"])
def test_the_references_are_worth_comparing_with(optimizer):
    """Clipping acts in some steps only, every tensor moves, and a lower precision shows and is small."""
    log, exact = one_process(optimizer)
    assert min(norm for _, norm in log) < CLIP < max(norm for _, norm in log)
    assert not any(torch.equal(value, start()[name]) for name, value in exact.items())
    for precision in ("bf16", "fp16"):
        _, lower = run(Case("native", 0, 1, 1, precision, "none", optimizer))
        assert 1e-4 < weight_error(lower, exact) / weight_error(start(), exact) < 0.05


def test_the_draw_holds_every_stage_of_every_engine_with_every_value():
    assert {"native", "ddp", "fsdp2"} <= {case.engine for case in draw()}
    for axis, values in AXES.items():
        for kind in {(case.engine, case.stage) for case in every_case()}:
            possible = {getattr(case, axis) for case in every_case() if (case.engine, case.stage) == kind}
            found = {getattr(case, axis) for case in draw() if (case.engine, case.stage) == kind}
            assert found == possible <= set(values)
    assert {(case.stage, case.ranks) for case in draw() if case.engine == "native"} == {*itertools.product(range(4), range(1, 5))}
