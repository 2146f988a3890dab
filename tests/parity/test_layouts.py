"""The parity matrix of layouts: every way to divide a model, its tokens and its state over ranks trains the same model.

A case is a layout with a schedule, a stage, a precision and so on, out of all those that `config.check` accepts. It takes 20
steps and is held against torch alone in one process: losses, norms and all parameters within 1e-5 in fp32; a lower precision
is no further from it than four times what one rank in that precision is (partial sums are rounded before they are added up,
and all losses and norms are few numbers). After every step ranks that hold the same parameter hold
the same bits.

PARITY=all (`make test-parity`) takes a large draw; otherwise a small one, always the same, that holds all pairs of values.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from dist_train.config.check import check
from tests.parity import layouts
from tests.ranks import run_ranks
from tests.zero.helpers import weights

STEPS, MOST_RANKS = 20, 8
AXES = {
    "pp": [1, 2, 4],
    "dp": [1, 2],
    "cp": [1, 2],
    "tp": [1, 2, 4],
    "stage": [0, 1, 2, 3],
    "schedule": ["1f1b", "gpipe", "interleaved", "zero_bubble", "zero_bubble_v"],
    "micro": [1, 2],
    "remat": ["none", "selective", "full"],
    "precision": ["fp32", "bf16", "fp16"],
    "recipe": ["llama", "gpt"],
    "style": ["ring", "ulysses", "stream"],  # how tokens are divided: over cp by either, over tp (sequence) or not
}


@dataclass(frozen=True)
class Case:
    pp: int
    dp: int
    cp: int
    tp: int
    stage: int
    schedule: str
    micro: int
    remat: str
    precision: str
    recipe: str
    style: str

    def __str__(self):
        return "-".join(f"{axis}{getattr(self, axis)}" for axis in AXES)

    @property
    def ranks(self):
        return self.pp * self.dp * self.cp * self.tp

    @property
    def chunks(self):
        return 1 if self.pp == 1 or self.schedule in ("1f1b", "zero_bubble") else 2

    def model(self):
        """What one process is told: everything but the layout."""
        layers = max(2, self.pp * self.chunks)
        common = [f"model.layers={layers}", "train.seq_len=13", "train.global_batch=4"]
        common += ["train.clip_norm=0.95", "train.z_loss=0.001"]
        if self.recipe == "llama":
            kv_heads = 4 if self.tp * (self.cp if self.style == "ulysses" else 1) == 4 else 2
            return (*common, "model.tie_embeddings=true", f"model.kv_heads={kv_heads}", "optim.lr=0.2")
        return (
            *common, "model.family=gpt", "model.activation=gelu", "model.bias=true", "model.kv_heads=4", "optim=adamw",
            "optim.weight_decay=0.1", "optim.lr=3e-3", "optim.eps=1e-4",
        )  # fmt: skip

    def overrides(self):
        return (
            *self.model(), f"mesh.pp={self.pp}", f"mesh.dp={self.dp}", f"mesh.cp={self.cp}", f"mesh.tp={self.tp}",
            f"shard.stage={self.stage}", f"pipeline={self.schedule}", f"mesh.chunks={self.chunks}", "shard.bucket_mb=0.02",
            f"train.micro_batch={self.micro}", f"remat={self.remat}", f"precision={self.precision}",
            f"context={'ulysses' if self.style == 'ulysses' else 'ring'}", f"mesh.sequence={self.style != 'stream'}",
        )  # fmt: skip


@functools.cache
def every_case():
    """All layouts of at most eight ranks that can run; of values that a layout does not feel only the first."""
    found = []
    for values in itertools.product(*AXES.values()):
        case = Case(*values)
        idle = (
            (case.pp == 1 and case.schedule != "1f1b")
            or (case.style == "ulysses" and (case.cp == 1 or case.cp * case.tp > 4))
            or (case.tp == 1 and case.style == "stream")
            or (case.dp * case.cp == 1 and case.stage not in (0, 3))
        )
        if not idle and 1 < case.ranks <= MOST_RANKS and case.pp * case.chunks <= 8:
            found.append(case)
    return sorted(found, key=lambda case: hashlib.sha256(str(case).encode()).digest())


def cost(case):
    """About how long a case takes, in an arbitrary unit: many ranks on few cores wait for each other at every collective."""
    exchanges = 1 + 4 * (case.tp > 1) + 2 * (case.cp > 1) + 2 * (case.stage == 3)
    work = (
        max(2, case.pp * case.chunks) / case.pp * 4 / (case.dp * case.micro) * {"none": 2, "full": 3, "selective": 4}[case.remat]
    )
    return case.ranks**2 * exchanges * work / 8


def draw(least=60):
    """Cases that hold every pair of values, then more of them up to `least`."""
    cases, drawn = every_case()[:: 1 + len(every_case()) // 4000], []
    left = {case: {*itertools.combinations([(axis, getattr(case, axis)) for axis in AXES], 2)} for case in cases}
    missing = set().union(*left.values())
    while missing:
        drawn.append(max(left, key=lambda case: len(left[case] & missing) / (cost(case) + 40)))
        missing -= left.pop(drawn[-1])
    more = sorted(left, key=cost)[:: max(1, len(left) // (20 * least))]
    return sorted(drawn + more[: max(0, least - len(drawn))], key=str)


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", draw(600 if os.environ.get("PARITY") == "all" else 60), ids=str)


@functools.cache
def run(case, steps=STEPS):
    config = layouts.base(*case.overrides())
    assert check(config, case.ranks) == []
    (log, state), *others = run_ranks(case.ranks, layouts.train, config, steps, timeout=120)
    assert all(other == log for other, _ in others), "ranks report different losses or norms"
    return log, {name: value.clone() for name, value in weights(state).items()}


@functools.cache
def one_rank(precision, model):
    """Losses and weights of a lower precision on one rank."""
    ((log, state),) = run_ranks(1, layouts.train, layouts.base(*model, "mesh.dp=1", f"precision={precision}"), STEPS)
    return log, weights(state)


def test_a_layout_trains_what_one_process_trains(case):
    exact = layouts.alone(STEPS, *case.model())
    log, state = run(case)
    assert not any(skipped for *_, skipped in log)
    if case.precision == "fp32":
        assert layouts.worst(log, state, *exact) <= 1e-5
    else:
        assert layouts.distance(log, state, *exact) <= 4 * layouts.distance(*one_rank(case.precision, case.model()), *exact)


def test_the_draw_holds_every_value_and_at_least_sixty_layouts():
    cases = draw()
    assert len(set(cases)) >= 60 and max(case.ranks for case in cases) == MOST_RANKS
    for axis, values in AXES.items():
        assert {getattr(case, axis) for case in cases} == set(values)
    assert {(case.schedule, case.stage) for case in cases} == {*itertools.product(AXES["schedule"], AXES["stage"])}


def test_references_move_and_are_clipped_now_and_then():
    for recipe in AXES["recipe"]:
        case = Case(1, 1, 1, 1, 0, "1f1b", 2, "none", "fp32", recipe, "ring")
        log, end = layouts.alone(STEPS, *case.model())
        _, start = layouts.alone(0, *case.model())
        assert not any(torch.equal(end[name], start[name]) for name in start)
        assert min(norm for _, norm in log) < 0.95 < max(norm for _, norm in log)


SMALL = [degrees for degrees in itertools.product((1, 2, 3), repeat=4) if 1 < math.prod(degrees) <= 4 and degrees[3] < 3]


@pytest.mark.timeout(1200)
@settings(
    max_examples=200 if os.environ.get("PARITY") == "all" else 8,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # (to make a case smaller would take long)
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_any_layout_of_odd_sizes_trains_what_one_process_trains(data):
    pp, dp, cp, tp = data.draw(st.sampled_from(SMALL), label="pp, dp, cp, tp")
    schedule = data.draw(st.sampled_from(AXES["schedule"]), label="schedule")
    chunks = 1 if pp == 1 or schedule in ("1f1b", "zero_bubble") else 2
    layers = data.draw(st.integers(pp * chunks, 7), label="layers")
    model = (
        f"model.layers={layers}", f"train.seq_len={data.draw(st.integers(2, 17), label='seq_len')}", "train.clip_norm=1",
        f"model.vocab={data.draw(st.sampled_from([7, 53]), label='vocab')}", "data.tokenizer_vocab=7",
        "optim.lr=0.1", "train.global_batch=6",
        f"model.tie_embeddings={data.draw(st.booleans(), label='tied')}",
    )  # fmt: skip
    layout = (
        f"mesh.pp={pp}", f"mesh.dp={dp}", f"mesh.cp={cp}", f"mesh.tp={tp}", f"pipeline={schedule}", f"mesh.chunks={chunks}",
        f"shard.stage={data.draw(st.integers(0, 3), label='stage')}",
        f"mesh.sequence={data.draw(st.booleans(), label='sequence')}",
        f"train.micro_batch={data.draw(st.sampled_from([m for m in (1, 2, 3, 6) if 6 % (m * dp) == 0]), label='micro')}",
        f"context={data.draw(st.sampled_from(['ring', 'ulysses'] if tp == 1 and cp < 3 else ['ring']), label='context')}",
    )  # fmt: skip
    config = layouts.base(*model, *layout)
    assert check(config, pp * dp * cp * tp) == []
    (log, state), *_ = run_ranks(pp * dp * cp * tp, layouts.train, config, 3, timeout=120)
    assert layouts.worst(log, weights(state), *layouts.alone(3, *model)) <= 1e-5
