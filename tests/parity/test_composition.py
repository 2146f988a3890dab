"""What goes together: dropout and recompute in flight, tied weights on two stages, overflow, states from layout to layout."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from dist_train.config.check import check
from tests.parity import layouts
from tests.ranks import mesh_of, run_ranks
from tests.zero.helpers import weights

MODEL = ("model.layers=2", "train.global_batch=8", "train.micro_batch=1", "optim.lr=0.5", "train.clip_norm=0.95")


def run(ranks, *overrides, steps=5, **options):
    config = layouts.base(*overrides)
    assert check(config, ranks) == []
    (log, state), *others = run_ranks(ranks, functools.partial(layouts.train, **options), config, steps, timeout=120)
    assert all(repr(other) == repr(log) for other, _ in others)
    return log, state


@pytest.mark.parametrize("bucket_mb", [0.001, 25])
@pytest.mark.parametrize("overlap", [True, False])
def test_F03_a_weight_tied_over_two_stages_stays_one_with_sharded_optimizers(overlap, bucket_mb):
    model = (*MODEL, "model.tie_embeddings=true")
    layout = ("mesh.pp=2", "mesh.dp=2", "shard.stage=1", f"shard.overlap={overlap}", f"shard.bucket_mb={bucket_mb}")
    log, state = run(4, *model, *layout)  # (`layouts.train` compares the copies' bits after every step)
    assert layouts.worst(log, weights(state), *layouts.alone(5, *model)) <= 1e-5


@pytest.mark.parametrize("stage", [0, 3])
def test_a_weight_tied_over_two_stages_on_one_rank_gets_both_gradients(stage):
    model = (*MODEL, "model.layers=4", "model.tie_embeddings=true")
    layout = ("mesh.pp=2", "mesh.dp=2", "pipeline=zero_bubble_v", "mesh.chunks=2", f"shard.stage={stage}")
    log, state = run(4, *model, *layout, steps=3)
    assert layouts.worst(log, weights(state), *layouts.alone(3, *model)) <= 1e-5


@pytest.mark.parametrize("micro", [1, 2, 4, 8])
def test_F38_micro_batches_of_a_pipeline_add_up_however_the_batch_is_divided(micro):
    log, state = run(2, *MODEL, "mesh.pp=2", "mesh.dp=1", f"train.micro_batch={micro}")
    assert layouts.worst(log, weights(state), *layouts.alone(5, *MODEL)) <= 1e-5


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("layout", [("mesh.tp=2",), ("mesh.tp=2", "mesh.sequence=false"), ("mesh.cp=2",)])
def test_other_engines_train_what_one_process_trains_on_tensor_and_context_ranks(engine, layout):
    stage = {"ddp": 0, "fsdp2": 3}[engine]
    log, state = run(4, *MODEL, "mesh.dp=2", *layout, f"shard.engine={engine}", f"shard.stage={stage}")
    assert layouts.worst(log, weights(state), *layouts.alone(5, *MODEL)) <= 1e-5


@pytest.mark.parametrize("layout", [
    ("mesh.pp=2", "mesh.tp=2", "mesh.dp=1", "pipeline=zero_bubble"),
    ("mesh.pp=2", "mesh.dp=2", "shard.stage=3", "remat=full"),
    ("mesh.tp=2", "mesh.cp=2", "mesh.dp=1", "shard.stage=2", "mesh.sequence=false"),
])  # fmt: skip
def test_frozen_parameters_stay_and_the_rest_trains(layout):
    frozen = ("embed.*", "*.q.weight", "*.attention_norm.*", "blocks.1.mlp.*")
    log, state = run(4, *MODEL, *layout, frozen=frozen)
    assert layouts.worst(log, weights(state), *layouts.alone(5, *MODEL, frozen=frozen)) <= 1e-5


LAYOUTS = {
    "dp": ("mesh.dp=2",),
    "tp": ("mesh.tp=2", "mesh.dp=1"),
    "tp_copies": ("mesh.tp=2", "mesh.dp=1", "mesh.sequence=false"),
    "pp": ("mesh.pp=2", "mesh.dp=1"),
    "zero_bubble": ("mesh.pp=2", "mesh.dp=1", "pipeline=zero_bubble"),
    "cp": ("mesh.cp=2", "mesh.dp=1", "context=ulysses", "shard.stage=3"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_F41_recompute_replays_dropout_with_several_micro_batches_in_flight(layout):
    found = {
        remat: run(2, *MODEL, *LAYOUTS[layout], "model.dropout=0.3", f"remat={remat}", steps=3)
        for remat in ("none", "selective", "full")
    }
    log, state = found["none"]
    assert log[0] != layouts.alone(1, *MODEL)[0][0]  # dropout acts
    for remat in ("selective", "full"):
        assert found[remat][0] == log
        assert all(torch.equal(value, state[name]) for name, value in found[remat][1].items())


def _masks(pool, comm, config):
    mesh = mesh_of(layouts.shape_of(config), pool)
    torch.manual_seed(mesh.stream)
    return mesh.shape.coordinates(mesh.rank), torch.nn.functional.dropout(torch.ones(64), 0.5).tolist()


def test_F50_dropout_differs_over_data_and_context_ranks_and_is_common_to_tensor_ranks():
    found = run_ranks(8, _masks, layouts.base("mesh.dp=2", "mesh.cp=2", "mesh.tp=2"))
    for (place, mask), (other, others) in itertools.combinations(found, 2):
        same_tokens = all(place[axis] == other[axis] for axis in ("dp", "cp"))
        assert (mask == others) == same_tokens


@pytest.mark.parametrize("layout", [("mesh.pp=2", "mesh.tp=2"), ("mesh.cp=2", "mesh.dp=2", "shard.stage=3")])
def test_an_overflow_on_one_rank_skips_the_step_on_all(layout):
    overrides = (*MODEL, *layout, "mesh.dp=1") if "mesh.dp=2" not in layout else (*MODEL, *layout)
    _, start = run(4, *overrides, "precision=fp16", steps=0)
    log, state = run(4, *overrides, "precision=fp16", steps=2, loss_scale=1e9)
    assert [skipped for *_, skipped in log] == [True, True]
    assert all(torch.equal(value, start[name]) for name, value in state.items())


def test_a_state_goes_from_layout_to_layout():
    """Four layouts in turn, three steps each, train what one process trains in twelve."""
    model = (*MODEL, "model.layers=4", "optim=adamw", "optim.lr=3e-3", "optim.eps=1e-4", "model.kv_heads=4")
    turns = [
        (4, ("mesh.pp=2", "mesh.tp=2", "mesh.dp=1", "shard.stage=0")),
        (4, ("mesh.dp=2", "mesh.cp=2", "shard.stage=3")),
        (4, ("mesh.tp=4", "mesh.dp=1")),
        (4, ("mesh.pp=4", "mesh.dp=1", "pipeline=zero_bubble")),
    ]
    log, state = [], None
    for turn, (ranks, layout) in enumerate(turns):
        more, state = run(ranks, *model, *layout, steps=3, first=3 * turn, state=state)
        log += more
    assert layouts.worst(log, weights(state), *layouts.alone(12, *model)) <= 1e-5


@pytest.mark.parametrize("sequence", [True, False])
def test_traffic_over_tensor_ranks_is_that_of_the_papers(sequence):
    """arXiv:1909.08053: four all-reduces of B·T·D elements a block. arXiv:2205.05198: two gathers and two reduce-scatters forward
    and the same backward; backward gathers the two inputs of column layers again, since each rank keeps its own tokens only."""
    counts = {}
    for layers in (2, 3):  # the difference is one block
        (found, *_) = run_ranks(
            2,
            layouts.traffic,
            layouts.base(*MODEL, f"model.layers={layers}", "mesh.tp=2", "mesh.dp=1", f"mesh.sequence={sequence}"),
        )
        counts[layers] = found
    more = {key: value - counts[2].get(key, 0) for key, value in counts[3].items() if key.endswith("/tp")}
    block = {key: value for key, value in more.items() if value}
    each = 1 * 12 * 16 * 4  # bytes of B·T·D in fp32; a rank sends half of them for a gather, all for an all-reduce of two
    if sequence:
        norms = 2 * 64 * 4  # their gradients, once a step, each with its padding
        assert block == {"all_gather/tp": 8 * 6 * each / 2, "reduce_scatter/tp": 8 * 4 * each / 2, "all_reduce/tp": norms}
    else:
        assert block == {"all_reduce/tp": 8 * 4 * each}


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize(("stage", "passes"), [(0, 1), (1, 1), (2, 4)])
def test_a_stage_reduces_once_a_step_below_zero_2_and_once_a_micro_batch_from_there(stage, passes, schedule):
    layout = ("mesh.pp=2", "mesh.dp=2", f"shard.stage={stage}", f"pipeline={schedule}")
    op = "all_reduce/dp" if stage == 0 else "reduce_scatter/dp"
    found = run_ranks(4, layouts.traffic, layouts.base(*MODEL, *layout))
    whole = sum(value.numel() for value in layouts.alone(0, *MODEL)[1].values())
    sent = sum(rank[op] for rank in found[::2]) / (2 if stage == 0 else 1)  # of one rank of each stage
    assert passes * whole * 4 / 2 <= sent < passes * (whole + 64 * 60) * 4 / 2  # padding makes up the difference


def test_traffic_between_stages_is_one_stream_a_border_and_direction():
    found = run_ranks(4, layouts.traffic, layouts.base(*MODEL, "model.layers=4", "mesh.pp=4", "mesh.dp=1"))
    each = 1 * 12 * 16 * 4
    assert [rank.get("send/pp", 0) for rank in found] == [8 * each, 16 * each, 16 * each, 8 * each]
