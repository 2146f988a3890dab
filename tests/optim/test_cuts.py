"""Optimizers that decide where a shard may end, at every stage: whole parameters for Muon and LAMB, whole blocks for moments of 8
bits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import dist_train as dt
from dist_train import checkpoint
from dist_train.optim.blocks import BLOCK, dequantize
from tests.ranks import run_ranks

RECIPES = {"muon": dt.Muon(0.02), "adamw8bit": dt.AdamW8bit(0.02), "lamb": dt.Lamb(0.02)}
VOCAB, HIDDEN, INNER = 53, 12, 37
pytestmark = pytest.mark.filterwarnings("ignore:no gradient in this backward")


class Odd(nn.Module):
    """Shapes that no number of ranks divides, a convolution, parameters of one and of no element, a branch for even steps."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.conv = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(HIDDEN, INNER), nn.LayerNorm(INNER), nn.Tanh(), nn.Linear(INNER, HIDDEN)) for _ in range(3)
        )
        self.sometimes = nn.Linear(HIDDEN, HIDDEN)
        self.scale, self.nothing = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(3, 0, 2))
        self.head = nn.Linear(HIDDEN, VOCAB)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                if param.ndim:
                    param.copy_(torch.randn(param.shape, generator=generator) * 0.2)

    def forward(self, tokens_BT, even):
        x_BTD = self.embed(tokens_BT)
        x_BTD = x_BTD + self.conv(x_BTD.transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            x_BTD = x_BTD + block(x_BTD)
        if even:
            x_BTD = x_BTD + self.sometimes(x_BTD)
        return self.head(x_BTD * self.scale + self.nothing.sum())


def gathered(engine, mesh, comm):
    """Every logical tensor of the state, out of all ranks' pieces. Ranks that hold the same elements must hold the same bits."""
    whole = {}
    for held in comm.all_gather_object([(p.name, p.shape, p.offset, p.tensor.clone()) for p in engine.pieces()], mesh.world):
        for name, shape, offset, part in held:
            target = whole.setdefault(name, torch.full(shape, math.nan, dtype=torch.float64))
            assert target.shape == shape, name
            box = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
            assert (target[box].isnan() | (target[box] == part)).all(), f"{name} differs between ranks"
            target[box] = part.double()
    assert not any(value.isnan().any() for value in whole.values())
    return whole


def make(mesh, comm, recipe, stage, **options):
    options = {"clip_norm": 0.5, "bucket_bytes": 3000} | options
    return dt.ZeroEngine(Odd(), RECIPES[recipe], mesh, comm, policy=dt.zero.ShardPolicy.from_stage(stage), **options)


def advance(engine, mesh, first, stop):
    """Steps `first` to `stop - 1`; in step 2 the last rank's loss is not finite."""
    for step in range(first, stop):
        tokens_BT = torch.randint(0, VOCAB, (6, 9), generator=torch.Generator().manual_seed(step))
        each = 6 // mesh.data.size
        mine_BT = tokens_BT[mesh.data.index * each : (mesh.data.index + 1) * each]
        loss = nn.functional.cross_entropy(engine.module(mine_BT[:, :-1], step % 2 == 0).flatten(0, 1), mine_BT[:, 1:].flatten())
        if step == 2 and mesh.data.index == mesh.data.size - 1:
            loss = loss * math.inf
        engine.backward(loss)
        assert bool(engine.step().skipped) == (step == 2)


def _train(mesh, comm, recipe, stage, options):
    engine = make(mesh, comm, recipe, stage, **options)
    advance(engine, mesh, 0, 5)
    return gathered(engine, mesh, comm), engine.held_bytes(), engine.predicted_bytes()


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_cuts_by_placement_give_the_same_bits_at_every_stage(ranks, recipe):
    (expected, *_), *_ = run_ranks(ranks, _train, recipe, 0, {})
    assert int(expected["optim/conv.weight/step"]) == 4 and int(expected["optim/sometimes.weight/step"]) == 2
    assert not torch.equal(expected["model/conv.weight"], Odd().conv.weight.double())
    for stage in (1, 2, 3):
        for found, held, predicted in run_ranks(ranks, _train, recipe, stage, {}):
            assert_equal(found, expected)
            assert held == predicted


@pytest.mark.parametrize("recipe", RECIPES)
def test_F42_bucket_size_and_overlap_change_no_bit_where_cuts_are_not_free(recipe):
    (expected, *_), *_ = run_ranks(3, _train, recipe, 2, {})
    for options in ({"bucket_bytes": 1e9}, {"bucket_bytes": 100, "overlap": False}):
        (found, *_), *_ = run_ranks(3, _train, recipe, 2, options)
        assert_equal(found, expected)


def _go_on(engine, mesh, comm):
    """The state now, after one step and after another."""
    found = [gathered(engine, mesh, comm)]
    for step in (4, 5):
        advance(engine, mesh, step, step + 1)
        found.append(gathered(engine, mesh, comm))
    return found


def _save(mesh, comm, recipe, folder):
    engine = make(mesh, comm, recipe, 3)
    advance(engine, mesh, 0, 4)
    checkpoint.save(folder, 4, list(engine.pieces()), {}, comm, mesh.world)
    return _go_on(engine, mesh, comm)


def _resume(mesh, comm, recipe, folder, stage):
    engine = make(mesh, comm, recipe, stage)
    checkpoint.load(folder / "step_00000004", engine.pieces())
    engine.restored()
    return _go_on(engine, mesh, comm)


@pytest.mark.parametrize("recipe", RECIPES)
def test_F21_state_of_whole_parts_moves_between_stages_and_ranks(tmp_path, recipe):
    saved, *_ = run_ranks(3, _save, recipe, tmp_path)
    resumed, *_ = run_ranks(3, _resume, recipe, tmp_path, 3)
    for found, expected in zip(resumed, saved, strict=True):
        assert_equal(found, expected)
    for ranks, stage in ((2, 1), (1, 0)):
        for loaded, after, _ in run_ranks(ranks, _resume, recipe, tmp_path, stage):
            assert_equal(loaded, saved[0])
            for name, value in saved[1].items():
                if name.startswith("model/"):  # gradients are added up in another order
                    torch.testing.assert_close(after[name], value, rtol=1e-4, atol=1e-5, msg=name)


def _owned(mesh, comm, recipe, stage):
    """What of each matrix and of each block of moments lies on this rank."""
    engine = make(mesh, comm, recipe, stage)
    return [
        (part.slot.name, segment.group, math.prod(part.slot.shape), part.first, part.at.stop - part.at.start)
        for segment in (each for bucket in engine.buckets for each in bucket.segments())
        for part in segment.parts
    ]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_matrix_lies_on_one_rank_and_each_block_too(stage):
    muon = [part for parts in run_ranks(3, _owned, "muon", stage) for part in parts]
    matrices = [name for name, group, *_ in muon if group == "matrix"]
    assert len(matrices) == len(set(matrices)) == 8
    assert all(first == 0 and held == numel for _, group, numel, first, held in muon if group != "decay")
    assert any(held < numel for _, group, numel, _, held in muon if group == "decay")
    eight = [part for parts in run_ranks(3, _owned, "adamw8bit", stage) for part in parts]
    assert all(first % BLOCK == 0 for *_, first, _ in eight)
    assert any(first > 0 for *_, first, _ in eight)


def test_a_block_at_stage_3_is_one_bucket_under_muon():
    for layout in run_ranks(2, _buckets_of_units):
        assert {unit: count for unit, count in layout.items() if unit.startswith("blocks")} == {
            f"blocks.{i}": 1 for i in range(3)
        }


def _buckets_of_units(mesh, comm):
    engine = make(mesh, comm, "muon", 3)
    found: dict[str, int] = {}
    for bucket in engine.buckets:
        for unit in {".".join(slot.name.split(".")[:2]) for slot in bucket.layout.slots}:
            found[unit] = found.get(unit, 0) + 1
    return found


def test_saved_codes_are_the_moments(tmp_path):
    """The checkpoint holds codes in the parameter's shape and scales by blocks of the flattened parameter."""
    (saved, *_), *_ = run_ranks(3, _save, "adamw8bit", tmp_path)
    codes, scales = saved["optim/head.weight/exp_avg"], saved["optim/head.weight/exp_avg_scale"]
    assert codes.shape == (VOCAB, HIDDEN) and scales.shape == (-(-VOCAB * HIDDEN // BLOCK),)
    padded = nn.functional.pad(codes.flatten(), (0, len(scales) * BLOCK - codes.numel())).to(torch.int8)
    found = dequantize(padded, scales.float())
    assert found.abs().view(-1, BLOCK).amax(1).equal(scales.float())  # the largest of a block is exact


def _refused(mesh, comm):
    from dist_train.zero.engines.ddp import DdpEngine

    for recipe in RECIPES.values():
        with pytest.raises(ValueError, match=r"whole parameters or whole blocks.*shard\.engine=native"):
            DdpEngine(Odd(), recipe, mesh, comm)


def test_engines_that_cut_anywhere_refuse_optimizers_that_need_whole_parts():
    run_ranks(2, _refused)
