"""DeepSpeed behind our engine's protocol: numbers, checkpoints and runs of the native one, and no trace in the process."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import dist_train as dt
from dist_train import checkpoint
from dist_train.cli.main import main
from dist_train.config.check import check, world_size
from dist_train.model.build import build_model
from dist_train.ops.cross_entropy import cross_entropy_sum
from dist_train.remat.policy import apply_remat
from dist_train.zero import Precision, ShardPolicy, ZeroEngine
from dist_train.zero.layout import WHOLE
from tests.launcher.jobs import run as run_command
from tests.ranks import run_ranks
from tests.toy import TOY, toy_batch, toy_config
from tests.train.test_run import launch, losses, metrics, saved
from tests.zero.helpers import distance, gathered, train_steps, weights

installed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="make setup installs deepspeed")

LIVE = [11, 1, 7, 3, 2, 11, 5, 9, 4, 0, 6, 10, 8, 2, 1, 1, 12, 5]
OPTIMIZERS = {"sgd": dt.SGD(0.1), "adamw": dt.AdamW(3e-3, eps=1e-5)}  # (with a tiny eps, Adam makes steps out of rounding)
STAGES = (0, 1, 2, 3)
FAMILIES = {"tied": ("model.tie_embeddings=true",), "gpt": ("model.family=gpt", "model.activation=gelu", "model.bias=true")}
CLIP = 0.565


@functools.cache
def config_of(*overrides):
    return toy_config(*overrides)


def model(*overrides):
    return build_model(config_of(*overrides), seed=0)


def make(name, module, optimizer, mesh, comm, bucket_bytes=4000, persistent=0, **options):
    """`deepspeed2` or `native0`: an engine at a stage. By default nothing is so small that stage 3 leaves it whole."""
    stage = int(name[-1])
    if name.startswith("native"):
        return ZeroEngine(module, optimizer, mesh, comm, policy=ShardPolicy.from_stage(stage), **options)
    from dist_train.zero.engines.deepspeed import DeepSpeedEngine

    size = {"bucket_bytes": bucket_bytes, "persistent_numel": persistent}
    return DeepSpeedEngine(module, optimizer, mesh, comm, stage=stage, **size, **options)


def train(mesh, comm, name, micro=1, optimizer="sgd", count=4, remat="none", scale=1.0, spoil=None, overrides=(), **options):
    module = model(*overrides)
    apply_remat(module, remat)
    engine = make(name, module, OPTIMIZERS[optimizer], mesh, comm, clip_norm=CLIP, **options)
    engine.loss_scale = scale
    log = train_steps(engine, mesh, LIVE, count, micro, spoil=spoil)
    return log, gathered(engine, mesh, comm)


@functools.lru_cache
def run(ranks, name, **options):
    results = run_ranks(ranks, functools.partial(train, name=name, **options))
    assert all(repr(log) == repr(results[0][0]) for log, _ in results)
    return results[0]


def assert_close(found, expected):
    """Losses, norms and skips, and the whole state."""
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-5, atol=0, equal_nan=True)
    assert distance(weights(found[1]), weights(expected[1])) <= 1e-5
    assert distance(found[1], expected[1]) <= 1e-4  # second moments are squares


@installed
@pytest.mark.parametrize(("ranks", "micro", "optimizer"), [(2, 3, "adamw"), (3, 1, "sgd")])
@pytest.mark.parametrize("stage", STAGES)
def test_F02_F18_F38_losses_norms_and_weights_are_those_of_the_native_engine(stage, ranks, micro, optimizer):
    same = {"micro": micro, "optimizer": optimizer, "count": 10}
    expected, found = run(ranks, "native0", **same), run(ranks, f"deepspeed{stage}", **same)
    assert_close(found, expected)
    assert min(norm for _, norm, _ in found[0]) < CLIP < max(norm for _, norm, _ in found[0]), "clipping must act, and not always"


@installed
@pytest.mark.parametrize("stage", STAGES)
def test_F42_buckets_smaller_than_parameters_do_not_matter(stage):
    assert_close(run(3, f"deepspeed{stage}", micro=3, bucket_bytes=400), run(3, "native0", micro=3))


@installed
def test_small_parameters_that_stage_3_leaves_whole_change_nothing():
    assert run(3, "deepspeed3", optimizer="adamw", persistent=100_000)[0] == run(3, "deepspeed3", optimizer="adamw")[0]


@installed
@pytest.mark.parametrize(("stage", "family"), [(1, "tied"), (2, "gpt"), (3, "tied"), (3, "gpt")])
def test_F07_tied_embeddings_and_the_other_family(stage, family):
    assert_close(run(3, f"deepspeed{stage}", overrides=FAMILIES[family]), run(3, "native0", overrides=FAMILIES[family]))


@installed
@pytest.mark.parametrize("stage", [1, 3])
def test_F06_the_loss_scale_cancels(stage):
    assert_close(run(3, f"deepspeed{stage}", scale=1024.0), run(3, "native0"))


@installed
@pytest.mark.parametrize(("stage", "persistent"), [*((stage, 0) for stage in STAGES), (3, 100_000)])
def test_F10_all_ranks_leave_out_a_step_that_is_not_finite_on_one(stage, persistent):
    log, found = run(3, f"deepspeed{stage}", optimizer="adamw", spoil=2, persistent=persistent)
    assert [skipped for *_, skipped in log] == [False, False, True, False]
    assert {float(value) for name, value in found.items() if name.endswith("/step")} == {3.0}
    assert_close((log, found), run(3, "native0", optimizer="adamw", spoil=2))


def _left_out(mesh, comm, name):
    engine = make(name, model(), OPTIMIZERS["adamw"], mesh, comm)
    train_steps(engine, mesh, LIVE, 1)
    before = gathered(engine, mesh, comm)
    reports = []
    for weight, update in [(1.0, False), (0.0, True)]:
        tokens, labels = toy_batch([5])
        engine.backward(cross_entropy_sum(engine.module(tokens), labels)[0])
        reports.append(engine.step(weight=weight, update=update))
    after = gathered(engine, mesh, comm)
    return [bool(report.skipped) for report in reports], all(torch.equal(after[key], before[key]) for key in before)


@installed
@pytest.mark.parametrize("stage", STAGES)
def test_F12_a_step_left_out_or_without_weight_changes_nothing(stage):
    assert run_ranks(2, _left_out, f"deepspeed{stage}") == [([True, True], True)] * 2


@installed
@pytest.mark.parametrize(("stage", "policy"), [(2, "full"), (3, "full"), (3, "selective")])
def test_F41_recompute_changes_no_bit(stage, policy):
    (log, found), (expected_log, expected) = (run(2, f"deepspeed{stage}", remat=remat) for remat in (policy, "none"))
    assert log == expected_log and all(torch.equal(found[key], expected[key]) for key in expected)


@installed
@pytest.mark.parametrize(("stage", "role"), [(2, "compute"), (3, "compute"), (1, "reduce"), (3, "reduce")])
def test_bf16_is_at_most_twice_as_far_from_fp32_as_the_native_one_is(stage, role):
    precision = Precision(**{role: torch.bfloat16})
    exact, native = run(3, "native0"), run(3, f"native{stage}", precision=precision)
    found = run(3, f"deepspeed{stage}", precision=precision)
    assert all(value.dtype == torch.float32 for value in found[1].values())
    allowed = distance(weights(native[1]), weights(exact[1]))
    assert 1e-5 < allowed < 0.05
    assert 1e-5 < distance(weights(found[1]), weights(exact[1])) <= 2 * allowed


def _first_masters(mesh, comm, stage):
    engine = make(f"deepspeed{stage}", model(), OPTIMIZERS["sgd"], mesh, comm, precision=Precision(compute=torch.bfloat16))
    return gathered(engine, mesh, comm)


@installed
@pytest.mark.parametrize("stage", [2, 3])
def test_F13_masters_begin_with_the_exact_weights(stage):
    found = run_ranks(2, _first_masters, stage)[0]
    assert all(torch.equal(found[f"model/{name}"], param) for name, param in model().named_parameters())


def _repeated(mesh, comm, name):
    """1, 3 and 2 micro-batches a step, none of them announced as the last."""
    engine = make(name, model(), OPTIMIZERS["sgd"], mesh, comm)
    for step, micro in enumerate((1, 3, 2)):
        for index in range(micro):
            tokens, labels = toy_batch([5 + mesh.rank, 2], seed=10 * step + index)
            engine.backward(cross_entropy_sum(engine.module(tokens), labels)[0], last=index == 0)
        engine.step(weight=7.0)
    return gathered(engine, mesh, comm)


@installed
@pytest.mark.parametrize("stage", STAGES)
def test_F43_every_backward_before_a_step_counts(stage):
    expected, found = (run_ranks(2, _repeated, name)[0] for name in ("native2", f"deepspeed{stage}"))
    assert distance(found, expected) <= 1e-5


def _exchange(mesh, comm, root, stage):
    """Engines train and save; others load that and go on. By pair: what was saved, what was loaded, what both computed then."""
    here, after = f"deepspeed{stage}", f"deepspeed{(stage + 1) % 4}"
    found = {}
    for first, others in {"native3": [here], here: ["native0", here, after]}.items():
        old = make(first, model(), OPTIMIZERS["adamw"], mesh, comm)
        train_steps(old, mesh, LIVE, 2)
        before = gathered(old, mesh, comm)
        saved_at = checkpoint.save(f"{root}/{first}", 2, old.pieces(), {}, comm, mesh.world)
        expected = train_steps(old, mesh, LIVE, 1, first=2), gathered(old, mesh, comm)
        for then in others:
            other = model()
            with torch.no_grad():
                for param in other.parameters():
                    param.fill_(0.5)
            new = make(then, other, OPTIMIZERS["adamw"], mesh, comm, persistent=600)  # some of the parameters stay gathered
            with torch.no_grad():
                new.module(toy_batch([5])[0])  # what was gathered of the old values must not outlive them
            checkpoint.load(saved_at, new.pieces())
            new.restored()
            loaded = gathered(new, mesh, comm)
            found[first, then] = before, loaded, expected, (train_steps(new, mesh, LIVE, 1, first=2), gathered(new, mesh, comm))
    return found


@installed
@pytest.mark.parametrize("stage", STAGES)
def test_F21_every_stage_goes_on_from_our_checkpoints_and_those_of_other_stages_and_we_from_its(tmp_path, stage):
    for result in run_ranks(2 + stage % 2, _exchange, str(tmp_path), stage):
        assert len(result) == 4
        for pair, (before, loaded, expected, found) in result.items():
            assert before.keys() == loaded.keys() and any("exp_avg_sq" in key for key in loaded), pair
            assert all(torch.equal(loaded[key], before[key]) for key in before), pair
            assert_close(found, expected)


class Odd(nn.Module):
    """Parameters of these shapes, a frozen one, a buffer."""

    def __init__(self, shapes):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.inner = nn.Module()
        self.inner.weights = nn.ParameterList(torch.randn(shape, generator=draw) for shape in shapes)
        self.inner.forward = lambda x: sum((weight * x).square().sum() for weight in self.inner.weights)
        self.fixed = nn.Parameter(torch.full((5, 1), 0.2), requires_grad=False)
        self.register_buffer("seen", torch.ones(3))

    def forward(self, x):
        return self.inner(x) * self.fixed.sum()


def _odd(mesh, comm, name, shapes):
    engine = make(name, Odd(shapes), dt.AdamW(1e-2, eps=1e-5), mesh, comm)
    for step in range(3):
        engine.backward(engine.module(torch.tensor(float(step + mesh.rank + 1))))
        engine.step()
    return gathered(engine, mesh, comm)


@installed
@pytest.mark.parametrize("stage", STAGES)
def test_F04_F08_parameters_of_every_shape(stage):
    shapes = [(2, 3), (1,), (7,), (5, 1, 2), (1, 1)]
    expected, found = (run_ranks(3, _odd, name, shapes)[0] for name in ("native0", f"deepspeed{stage}"))
    assert found.keys() == expected.keys()
    assert distance(found, expected) <= 1e-5


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, right):
        return (self.right if right else self.left)(x).square().sum()


def _branches(mesh, comm, name):
    options = {"skip_unused": False} if name.startswith("native") else {}
    engine = make(name, Branches(), dt.AdamW(1e-2, eps=1e-5), mesh, comm, **options)
    for right in (True, False, False, True):
        engine.backward(engine.module(torch.full((2, 4), 1.0 + mesh.rank), right))
        engine.step()
    return gathered(engine, mesh, comm)


@installed
@pytest.mark.filterwarnings("ignore:no gradient in this backward")
@pytest.mark.parametrize("stage", STAGES)
def test_F05_a_parameter_that_no_rank_uses_has_a_gradient_of_zero(stage):
    expected, found = (run_ranks(2, _branches, name)[0] for name in ("native0", f"deepspeed{stage}"))
    assert distance(found, expected) <= 1e-5


def _diverging(mesh, comm, stage):
    """Ranks that use other branches, and ranks that use the same ones in other micro-batches."""
    for branches in [[mesh.rank == 0], [mesh.rank == 0, mesh.rank == 1]]:
        engine = make(f"deepspeed{stage}", Branches(), dt.SGD(0.1), mesh, comm)
        engine.backward(engine.module(torch.ones(2, 4), True))
        assert float(engine.step(sums=(3.0,)).sums) == 6.0
        for right in branches:
            engine.backward(engine.module(torch.ones(2, 4), right))
        before = gathered(engine, mesh, comm)
        with pytest.raises(RuntimeError, match="gradients of different parameters.*shard.engine=native"):
            engine.step()
        after = gathered(engine, mesh, comm)
        assert all(torch.equal(after[name], value) for name, value in before.items())


@installed
@pytest.mark.parametrize("stage", [1, 2])
def test_F05_ranks_that_use_different_parameters_are_stopped_before_they_mix_them(stage):
    run_ranks(2, _diverging, stage)


def _held(mesh, comm, stage, dtype):
    precision = Precision(compute=dtype)
    engine = make(f"deepspeed{stage}", model(), OPTIMIZERS["adamw"], mesh, comm, precision=precision)
    train_steps(engine, mesh, LIVE, 2)
    return engine.held_bytes(), engine.predicted_bytes(), sum(param.numel() for param in model().parameters())


@installed
@pytest.mark.parametrize(
    ("stage", "dtype", "parameters", "masters", "gradients", "moments"),
    [
        (0, None, 4, 0, 0, 8),
        (1, None, 4, 4 / 3, 0, 8 / 3),
        (2, None, 4, 4 / 3, 0, 8 / 3),
        (3, None, 4 / 3, 4 / 3, 4 / 3, 8 / 3),
        (2, torch.bfloat16, 2, 4 / 3, 0, 8 / 3),
        (3, torch.bfloat16, 2 / 3, 4 / 3, 4 / 3, 8 / 3),
    ],
)
def test_U01_held_bytes_are_counted_from_tensors(stage, dtype, parameters, masters, gradients, moments):
    each = {"parameters": parameters, "masters": masters, "gradients": gradients, "moments": moments}
    for held, predicted, psi in run_ranks(3, _held, stage, dtype):
        assert predicted is None
        assert held == {kind: pytest.approx(psi * bytes_each, rel=0.01) for kind, bytes_each in each.items()}


WATCHED = [
    *((torch, name) for name in ("empty", "zeros", "ones", "full", "tensor", "arange", "eye", "randn")),
    *((nn.functional, name) for name in ("linear", "embedding")),
    *((nn.Module, name) for name in ("__init__", "__init_subclass__", "apply", "_apply", "__call__", "__setattr__", "to_empty")),
    *((nn.Linear, "__init__"), (nn.Linear, "forward"), (torch.Tensor, "__new__"), (torch.optim.Optimizer, "step")),
]


def process_state():
    values = [getattr(holder, name, None) for holder, name in WATCHED]
    return [repr(value) for value in values], dict(os.environ), gc.isenabled(), torch.is_grad_enabled(), torch.get_default_dtype()


def _confined(mesh, comm, stage):
    module = model()
    expected = train(mesh, comm, "native3", micro=3)
    before = process_state()
    engine = make(f"deepspeed{stage}", module, OPTIMIZERS["adamw"], mesh, comm)
    seen = [process_state() == before]
    train_steps(engine, mesh, LIVE, 2)
    seen.append(process_state() == before)
    engine.restored()
    with pytest.raises(IndexError):
        engine.module(torch.full((1, 3), 53))  # no such token: forward ends with an exception
    seen.append(process_state() == before)
    del engine, module
    gc.collect()
    log, found = train(mesh, comm, "native3", micro=3)
    same = log == expected[0] and all(torch.equal(found[name], value) for name, value in expected[1].items())
    return seen, same, process_state() == before


@installed
@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_leaves_no_trace_in_the_process(stage):
    assert run_ranks(2, _confined, stage) == [([True] * 3, True, True)] * 2


def _inside(mesh, comm):
    """What a forward and a recompute in backward see of `linear`."""
    module, seen = model(), set()
    apply_remat(module, "full")
    module.blocks[0].mlp.register_forward_pre_hook(lambda *_: seen.add(nn.functional.linear.__name__))
    engine = make("deepspeed3", module, OPTIMIZERS["sgd"], mesh, comm)
    train_steps(engine, mesh, LIVE, 1)
    return seen


@installed
def test_stage_3_computes_with_the_linear_that_keeps_no_gathered_weight():
    assert run_ranks(2, _inside) == [{"zero3_linear_wrap"}] * 2


RUN = ("train.global_batch=12", "train.eval_every=5", "train.micro_batch=2", "checkpoint.every=0", "train.steps=6")
LEARNING = ("optim=adamw", "optim.lr=0.01", "optim.eps=1e-5", "lr=cosine", "lr.warmup_steps=4", "train.clip_norm=0.5")
DEEPSPEED = "shard.engine=deepspeed"


@installed
@pytest.mark.parametrize(("stage", "precision"), [(1, "fp32"), (3, "bf16")])
def test_F22_runs_resume_bitwise(tmp_path, stage, precision):
    overrides = [*RUN, *LEARNING, "model.dropout=0.2", DEEPSPEED, f"shard.stage={stage}", f"precision={precision}"]
    overrides += ["observe.sample_tokens=4", "remat=full"]
    assert launch(2, tmp_path / "whole", *overrides) == 0
    for stop_at in (2, 4):
        assert launch(2, tmp_path / "cut", *overrides, stop_at=(1, stop_at - 1)) == 75
    assert launch(2, tmp_path / "cut", *overrides) == 0
    whole, cut = metrics(tmp_path / "whole"), metrics(tmp_path / "cut")
    for key in ("step", "loss", "grad_norm", "lr", "live_tokens"):
        assert [record[key] for record in cut] == [record[key] for record in whole], key
    expected, found = saved(tmp_path / "whole", 6), saved(tmp_path / "cut", 6)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@installed
def test_F21_a_run_changes_engine_stage_and_ranks_on_its_way(tmp_path):
    overrides = [*RUN, *LEARNING, "train.steps=8", "train.eval_every=0"]
    assert launch(1, tmp_path / "one", *overrides) == 0
    for ranks, stage, stop_at in [(3, 3, 2), (2, 1, 4), (3, 0, 6)]:
        assert launch(ranks, tmp_path / "moved", *overrides, DEEPSPEED, f"shard.stage={stage}", stop_at=(0, stop_at - 1)) == 75
    assert launch(2, tmp_path / "moved", *overrides, "shard.stage=2") == 0
    torch.testing.assert_close(losses(tmp_path / "moved"), losses(tmp_path / "one"), rtol=1e-5, atol=0)


@installed
def test_the_command_trains_with_it_and_writes_metrics_and_a_summary(tmp_path):
    overrides = [*TOY, "mesh.dp=2", DEEPSPEED, "shard.stage=2", "train.global_batch=8", "train.steps=3", "train.eval_every=3"]
    code, text = run_command(tmp_path, "train", *overrides, f"data.cache_dir={tmp_path / 'tokens'}", "run.dir=run", seconds=100)
    assert code == 0, text
    assert "untested optimizer" not in text
    assert [record["step"] for record in metrics(tmp_path / "run")] == [1, 2, 3]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "done" and summary["layout"]["stage"] == 2 and summary["eval_loss"] > 0
    assert summary["memory"]["predicted"] is None and summary["memory"]["measured"]["masters"] > 0


@pytest.fixture
def pretend(monkeypatch):
    """Let the package have a version, or be absent."""
    real = importlib.metadata.version

    def answer(found):
        def version(name):
            if name == "deepspeed" and found is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found if name == "deepspeed" else real(name)

        monkeypatch.setattr("dist_train.config.check.version", version)

    return answer


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("shard.replicas=2", "set shard.replicas=1"),
        ("shard.overlap=false", "no such choice"),
        ("precision.grad=bf16", "no such choice"),
        ("precision.master=bf16", "no such choice"),
        ("precision=fp16", "set precision=fp32"),
        ("precision=bf16", "precision=bf16 with shard.stage=2 or 3"),
        ("mesh.dp=1", "set mesh.dp=2, or shard.engine=native"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(pretend, override, words):
    pretend("0.19.8")
    for stage in STAGES:
        assert [str(problem) for problem in check(toy_config("mesh.dp=2", DEEPSPEED, f"shard.stage={stage}"), 2)] == []
    config = toy_config("mesh.dp=2", DEEPSPEED, "shard.stage=1", override)
    *_, problem = check(config, world_size(config, 0))
    assert words in str(problem)


@pytest.mark.parametrize("override", ["shard.bucket_mb=5", "shard.reduce_dtype=bf16", "precision=bf16"])
def test_what_it_can_do_is_taken(pretend, override):
    pretend("0.19.8")
    assert check(toy_config("mesh.dp=2", DEEPSPEED, "shard.stage=3", override), 2) == []


@pytest.mark.parametrize(("found", "words"), [(None, "installed: none"), ("0.17.2", "installed: 0.17.2")])
def test_without_the_package_the_command_says_what_to_install(pretend, capsys, tmp_path, found, words):
    pretend(found)
    assert main(["train", *TOY, "mesh.dp=2", DEEPSPEED, f"run.dir={tmp_path / 'run'}"]) == 2
    said = capsys.readouterr().err
    assert words in said and "pip install 'deepspeed>=0.19.8,<0.20', or set shard.engine=native" in said
    assert not (tmp_path / "run").exists()


def test_an_engine_that_there_is_not_is_answered_with_those_that_there_are():
    (problem,) = check(toy_config("mesh.dp=2", "shard.engine=horovod"), 2)
    assert "one of native, ddp, fsdp2, deepspeed" in str(problem)


class Whole(dt.SGD):
    def cut(self, group):
        return WHOLE


def _refused(mesh, comm):
    wide = model()
    wide.head.weight.data = wide.head.weight.data.double()
    for module, optimizer, options, words in [
        (model(), dt.SGD(0.1), {"precision": Precision(compute=torch.float16)}, "does not compute in torch.float16 at stage 1"),
        (model(), dt.SGD(0.1), {"precision": Precision(compute=torch.bfloat16)}, "bf16 at stage 2 or 3"),
        (model(), Whole(0.1), {}, "Whole: it needs whole parameters.*shard.engine=native"),
        (wide, dt.SGD(0.1), {}, "head.weight is torch.float64"),
        (Odd([(2,), ()]), dt.SGD(0.1), {}, r"inner.weights.1 has the shape \[\]: DeepSpeed.*shard.engine=native"),
        (Odd([(2,), (3, 0)]), dt.SGD(0.1), {}, r"inner.weights.1 has the shape \[3, 0\]: DeepSpeed.*shard.engine=native"),
        (model().requires_grad_(False), dt.SGD(0.1), {}, "nothing to train"),
    ]:
        with pytest.raises(ValueError, match=words):
            make("deepspeed1", module, optimizer, mesh, comm, **options)
    engine = make("deepspeed1", model(), dt.SGD(0.1), mesh, comm)
    with pytest.raises(RuntimeError, match="without a backward"):
        engine.step()


@installed
def test_what_the_engine_cannot_do_is_refused_when_it_is_made():
    run_ranks(2, _refused)


def _alone(mesh, comm):
    with pytest.raises(ValueError, match="two data ranks or more"):
        make("deepspeed1", model(), dt.SGD(0.1), mesh, comm)


def test_one_rank_is_refused():
    run_ranks(1, _alone)


def test_nothing_imports_deepspeed_before_the_engine_is_chosen():
    code = "import sys, dist_train.train.main, dist_train.zero.engines.deepspeed; print('deepspeed' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout
    assert said.strip() == "False"
