"""DDP and FSDP2 behind our engine's protocol: the numbers, the checkpoints and the runs of the native one."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import dist_train as dt
from dist_train import checkpoint
from dist_train.config.check import check, world_size
from dist_train.model.build import build_model
from dist_train.ops.cross_entropy import cross_entropy_sum
from dist_train.remat.policy import apply_remat
from dist_train.zero import Precision, ShardPolicy, ZeroEngine
from dist_train.zero.engines.ddp import DdpEngine
from dist_train.zero.engines.fsdp2 import Fsdp2Engine
from tests.ranks import run_ranks
from tests.toy import toy_batch, toy_config
from tests.train.test_run import launch, losses, metrics, saved
from tests.zero.helpers import distance, gathered, train_steps, weights

LIVE = [11, 1, 7, 3, 2, 11, 5, 9, 4, 0, 6, 10, 8, 2, 1, 1, 12, 5]
OPTIMIZERS = {"sgd": dt.SGD(0.1), "adamw": dt.AdamW(3e-3, eps=1e-5)}  # (with a tiny eps, Adam makes steps out of rounding)
PEERS = ("ddp", "fsdp2")
CLIP = 0.565


@functools.cache
def config_of(*overrides):
    return toy_config(*overrides)  # composing costs more than all the rest of these tests


def model(*overrides):
    return build_model(config_of(*overrides), seed=0)


def make(name, module, optimizer, mesh, comm, dtype=None, clip_norm=0.0):
    options = {"precision": Precision(compute=dtype), "clip_norm": clip_norm}
    if name == "ddp":
        return DdpEngine(module, optimizer, mesh, comm, bucket_bytes=4000, **options)
    if name == "fsdp2":
        return Fsdp2Engine(module, optimizer, mesh, comm, **options)
    return ZeroEngine(module, optimizer, mesh, comm, policy=ShardPolicy.from_stage(int(name[-1])), **options)


def train(mesh, comm, name, micro=1, optimizer="sgd", dtype=None, remat="none", scale=1.0, spoil=None, overrides=()):
    module = model(*overrides)
    apply_remat(module, remat)
    engine = make(name, module, OPTIMIZERS[optimizer], mesh, comm, dtype, clip_norm=CLIP)
    engine.loss_scale = scale
    log = train_steps(engine, mesh, LIVE, 4, micro, spoil=spoil)
    return log, gathered(engine, mesh, comm)


@functools.lru_cache
def run(ranks, name, **options):
    results = run_ranks(ranks, functools.partial(train, name=name, **options))
    assert all(repr(log) == repr(results[0][0]) for log, _ in results)
    return results[0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", PEERS)
def test_losses_norms_and_weights_are_those_of_the_native_engine(name, ranks, micro, optimizer):
    expected_log, expected = run(ranks, "native0", micro=micro, optimizer=optimizer)
    log, found = run(ranks, name, micro=micro, optimizer=optimizer)
    torch.testing.assert_close(torch.tensor(log), torch.tensor(expected_log), rtol=1e-5, atol=0)
    assert min(norm for _, norm, _ in log) < CLIP < max(norm for _, norm, _ in log), "clipping must act, and not always"
    assert distance(weights(found), weights(expected)) <= 1e-5
    assert found.keys() == expected.keys()


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("overrides", [("model.tie_embeddings=true",), ("model.family=gpt", "model.activation=gelu")])
def test_tied_embeddings_and_the_other_family(name, overrides):
    expected, found = (run(3, engine, overrides=overrides)[1] for engine in ("native0", name))
    assert distance(weights(found), weights(expected)) <= 1e-5


@pytest.mark.parametrize("name", PEERS)
def test_F06_the_loss_scale_cancels(name):
    (log, found), (expected_log, expected) = run(2, name, micro=3, scale=1024.0), run(2, "native0", micro=3)
    torch.testing.assert_close(torch.tensor(log), torch.tensor(expected_log), rtol=1e-5, atol=0)
    assert distance(weights(found), weights(expected)) <= 1e-5


@pytest.mark.parametrize("name", PEERS)
def test_F10_all_ranks_leave_out_a_step_that_is_not_finite_on_one(name):
    log, found = run(3, name, micro=3, optimizer="adamw", spoil=2)
    assert [skipped for *_, skipped in log] == [False, False, True, False]
    assert {float(value) for name, value in found.items() if name.endswith("/step")} == {3.0}
    expected_log, expected = run(3, "native0", micro=3, optimizer="adamw", spoil=2)
    assert distance(weights(found), weights(expected)) <= 1e-5 and log[3][0] == pytest.approx(expected_log[3][0], rel=1e-5)


def _left_out(mesh, comm, name):
    engine = make(name, model(), OPTIMIZERS["adamw"], mesh, comm)
    before = gathered(engine, mesh, comm)
    reports = []
    for weight, update in [(1.0, False), (0.0, True)]:
        tokens, labels = toy_batch([5])
        engine.backward(cross_entropy_sum(engine.module(tokens), labels)[0])
        reports.append(engine.step(weight=weight, update=update))
    after = gathered(engine, mesh, comm)
    return [bool(report.skipped) for report in reports], all(torch.equal(after[key], before[key]) for key in before)


@pytest.mark.parametrize("name", PEERS)
def test_F12_a_step_left_out_or_without_weight_changes_nothing(name):
    assert run_ranks(2, _left_out, name) == [([True, True], True)] * 2


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("name", PEERS)
def test_F41_recompute_changes_no_bit(name, dtype):
    (log, found), (expected_log, expected) = run(2, name, dtype=dtype, remat="full"), run(2, name, dtype=dtype)
    assert log == expected_log and all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PEERS)
def test_lower_precision_is_no_further_from_the_native_one_than_that_is_from_fp32(name, dtype):
    exact, native, found = run(2, "native0", micro=3), run(2, "native0", micro=3, dtype=dtype), run(2, name, micro=3, dtype=dtype)
    assert all(value.dtype == torch.float32 for value in found[1].values())
    allowed = distance(weights(native[1]), weights(exact[1]))
    assert 1e-5 < allowed < 0.05
    assert distance(weights(found[1]), weights(native[1])) <= 1.5 * allowed
    for (loss, *_), (native_loss, *_), (exact_loss, *_) in zip(found[0], native[0], exact[0], strict=True):
        assert abs(loss - native_loss) <= 2 * abs(native_loss - exact_loss) + 1e-4


def _exchange(mesh, comm, root, optimizer):
    """Each engine trains and saves; every other one loads that and goes on. By pair: what was saved, what was loaded, and
    what both computed then."""
    names, found = ("native0", "native3", *PEERS), {}
    for first in names:
        old = make(first, model(), OPTIMIZERS[optimizer], mesh, comm)
        train_steps(old, mesh, LIVE, 2, 1)
        before = gathered(old, mesh, comm)
        saved_at = checkpoint.save(f"{root}/{first}", 2, old.pieces(), {}, comm, mesh.world)
        expected = train_steps(old, mesh, LIVE, 1, 1, first=2), gathered(old, mesh, comm)
        for then in names:
            if {first, then} & set(PEERS):
                other = model()
                with torch.no_grad():
                    for param in other.parameters():
                        param.fill_(0.5)
                new = make(then, other, OPTIMIZERS[optimizer], mesh, comm)
                with torch.no_grad():
                    new.module(toy_batch([5])[0])  # what was gathered of the old values must not outlive them
                checkpoint.load(saved_at, new.pieces())
                new.restored()
                after = gathered(new, mesh, comm)
                computed = train_steps(new, mesh, LIVE, 1, 1, first=2), gathered(new, mesh, comm)
                found[first, then] = before, after, expected, computed
    return found


@pytest.mark.parametrize(("ranks", "optimizer"), [(2, "sgd"), (3, "adamw")])
def test_F21_every_engine_goes_on_from_every_other_ones_checkpoint(tmp_path, ranks, optimizer):
    for result in run_ranks(ranks, _exchange, str(tmp_path), optimizer):
        assert len(result) == 12
        for pair, (before, after, (expected_log, expected), (log, found)) in result.items():
            assert before.keys() == after.keys() and any("exp_avg_sq" in key for key in after) == (optimizer == "adamw"), pair
            assert all(torch.equal(after[key], before[key]) for key in before), pair
            torch.testing.assert_close(torch.tensor(log), torch.tensor(expected_log), rtol=1e-5, atol=0)
            assert distance(weights(found), weights(expected)) <= 1e-5, pair


class Odd(nn.Module):
    """Fewer rows than ranks, one element, frozen parameters, a buffer."""

    def __init__(self, shapes):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.blocks = nn.ModuleList([nn.Module()])
        self.blocks[0].weights = nn.ParameterList(torch.randn(shape, generator=draw) for shape in shapes)
        self.blocks[0].forward = lambda x: sum((weight * x).square().sum() for weight in self.blocks[0].weights)
        self.fixed = nn.Parameter(torch.full((2, 1), 0.5), requires_grad=False)
        self.register_buffer("seen", torch.ones(3))

    def forward(self, x):
        return self.blocks[0](x) * self.fixed.sum()


def _odd(mesh, comm, name, shapes):
    engine = make(name, Odd(shapes), dt.AdamW(1e-2), mesh, comm)
    for step in range(3):
        engine.backward(engine.module(torch.tensor(float(step + mesh.rank + 1))))
        engine.step()
    held = engine.held_bytes()
    return gathered(engine, mesh, comm), held


ODD = [(2, 3), (1,), (7,), (5, 1, 2), (1, 1)]


@pytest.mark.parametrize(("name", "shapes"), [("ddp", [*ODD, ()]), ("fsdp2", ODD)])
def test_F05_F08_parameters_of_every_shape(name, shapes):
    (expected, _), (found, _), *_ = *run_ranks(3, _odd, "native0", shapes)[:1], *run_ranks(3, _odd, name, shapes)
    assert found.keys() == expected.keys()
    assert distance(found, expected) <= 1e-5


def _scalar(mesh, comm):
    with pytest.raises(ValueError, match=r"blocks.0.weights.1: FSDP2 cannot shard.*shard.engine=native"):
        make("fsdp2", Odd([(2,), ()]), OPTIMIZERS["sgd"], mesh, comm)


def test_fsdp2_refuses_parameters_without_dimensions_by_name():
    run_ranks(2, _scalar)


def _unused(mesh, comm):
    engine = make("ddp", model(), OPTIMIZERS["sgd"], mesh, comm)
    engine.backward(engine.module.embed(torch.tensor([1])).sum())
    with pytest.raises(RuntimeError, match="blocks.0.attention_norm.weight got no gradient"):
        engine.step()


def test_ddp_says_which_parameter_got_no_gradient():
    run_ranks(2, _unused)


def _held(mesh, comm, name):
    engine = make(name, model(), OPTIMIZERS["adamw"], mesh, comm)
    train_steps(engine, mesh, LIVE, 2, 1)
    between = engine.held_bytes()
    with torch.no_grad():
        engine.module(toy_batch([5])[0])
    return between, engine.held_bytes(), engine.predicted_bytes(), sum(param.numel() for param in model().parameters())


@pytest.mark.parametrize("ranks", [2, 3])
def test_U01_held_bytes_are_counted_from_tensors(ranks):
    for between, _, predicted, psi in run_ranks(ranks, _held, "ddp"):
        assert predicted is None
        assert between == {"parameters": 4 * psi, "masters": 0, "gradients": pytest.approx(4 * psi, abs=64), "moments": 8 * psi}
    for between, gathered_root, _, psi in run_ranks(ranks, _held, "fsdp2"):
        assert sum(between.values()) == pytest.approx(16 * psi / ranks, rel=0.1)
        assert gathered_root["parameters"] > between["parameters"]  # the root unit stays after a forward alone


RUN = ("train.global_batch=12", "train.eval_every=5", "train.micro_batch=2", "checkpoint.every=0", "train.steps=8")
LEARNING = ("optim=adamw", "optim.lr=0.01", "lr=cosine", "lr.warmup_steps=4", "train.clip_norm=0.5")
STAGE = {"ddp": "shard.stage=0", "fsdp2": "shard.stage=3", "native": "shard.stage=2"}


@pytest.mark.parametrize(("name", "precision"), [("fsdp2", "fp32"), ("ddp", "bf16")])
def test_F18_F22_runs_resume_bitwise(tmp_path, name, precision):
    overrides = [*RUN, *LEARNING, "model.dropout=0.2", f"shard.engine={name}", STAGE[name], f"precision={precision}"]
    overrides += ["observe.sample_tokens=4", "remat=full"]
    assert launch(2, tmp_path / "whole", *overrides) == 0
    for stop_at in (3, 6):
        assert launch(2, tmp_path / "cut", *overrides, stop_at=(1, stop_at - 1)) == 75
    assert launch(2, tmp_path / "cut", *overrides) == 0
    whole, cut = metrics(tmp_path / "whole"), metrics(tmp_path / "cut")
    for key in ("step", "loss", "grad_norm", "lr", "live_tokens"):
        assert [record[key] for record in cut] == [record[key] for record in whole], key
    expected, found = saved(tmp_path / "whole", 8), saved(tmp_path / "cut", 8)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_F21_a_run_changes_engine_and_ranks_on_its_way(tmp_path):
    overrides = [*RUN, *LEARNING, "train.steps=6", "train.eval_every=0"]
    assert launch(1, tmp_path / "one", *overrides) == 0
    for ranks, name, stop_at in [(3, "fsdp2", 2), (2, "ddp", 4)]:
        chosen = (f"shard.engine={name}", STAGE[name])
        assert launch(ranks, tmp_path / "moved", *overrides, *chosen, stop_at=(0, stop_at - 1)) == 75
    assert launch(2, tmp_path / "moved", *overrides, STAGE["native"]) == 0
    torch.testing.assert_close(losses(tmp_path / "moved"), losses(tmp_path / "one"), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("engine", "override", "words"),
    [
        ("ddp", "shard.stage=1", "shard.engine=ddp is stage 0"),
        ("ddp", "shard.replicas=2", "set shard.replicas=1"),
        ("fsdp2", "shard.replicas=2", "no such choice"),
        ("ddp", "shard.reduce_dtype=bf16", "set shard.reduce_dtype=fp32, or shard.engine=native"),
        ("ddp", "shard.overlap=false", "no such choice"),
        ("ddp", "precision.grad=bf16", "no such choice"),
        ("ddp", "precision.master=bf16", "no such choice"),
        ("fsdp2", "shard.stage=0", "set shard.stage=3"),
        ("fsdp2", "shard.stage=2", "set shard.stage=3"),
        ("fsdp2", "shard.bucket_mb=50", "set shard.bucket_mb=25.0"),
        ("fsdp2", "shard.overlap=false", "no such choice"),
        ("fsdp2", "precision.master=bf16", "no such choice"),
        ("fsdp2", "mesh.dp=1", "set mesh.dp=2, or shard.engine=native"),
        ("ddp", "mesh.dp=-1", "two ranks or more"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_by_name(engine, override, words):
    accepted = toy_config("mesh.dp=2", f"shard.engine={engine}", STAGE[engine])
    assert [str(problem) for problem in check(accepted, 2)] == []
    config = toy_config("mesh.dp=2", f"shard.engine={engine}", STAGE[engine], override)
    *_, problem = check(config, world_size(config, 0))
    assert words in str(problem) and (problem.key == override.split("=")[0] or "mesh" in override)


@pytest.mark.parametrize(("engine", "override"), [("ddp", "shard.bucket_mb=5"), ("fsdp2", "shard.reduce_dtype=bf16")])
def test_what_an_engine_can_do_is_taken(tmp_path, engine, override):
    overrides = [*RUN, "train.steps=2", f"shard.engine={engine}", STAGE[engine]]
    assert launch(2, tmp_path / "moved", *overrides, override) == 0
    assert launch(2, tmp_path / "default", *overrides) == 0
    torch.testing.assert_close(losses(tmp_path / "moved"), losses(tmp_path / "default"), rtol=1e-3, atol=0)
