from __future__ import annotations

import dataclasses

import pytest

from dist_train.config.check import check, require, skipped_steps, world_size
from dist_train.config.compose import ConfigError, compose, configs_dir, dump, keys, load


def problems(*overrides, ranks=None):
    config = compose(["data=synthetic", *overrides])
    return [str(problem) for problem in check(config, world_size(config, 0) if ranks is None else ranks)]


def test_the_defaults_and_every_option_file_can_run():
    assert problems() == []
    for group in ("model", "precision", "optim", "lr"):
        for path in sorted((configs_dir() / group).glob("*.yaml")):
            assert problems(f"{group}={path.stem}") == [], path


def test_U08_batch_arithmetic_names_the_multiple_that_is_needed():
    (text,) = problems("train.global_batch=8", "train.micro_batch=2", "mesh.dp=8")
    assert "train.global_batch=8" in text and "= 16" in text and "set train.global_batch=16" in text
    (text,) = problems("train.global_batch=50", "train.micro_batch=3", "mesh.dp=4")
    assert "= 12" in text and "set train.global_batch=60" in text
    for key in ("train.global_batch", "train.micro_batch"):
        for value in (0, -4):
            assert any(f"{key}={value}: at least 1" in text for text in problems(f"{key}={value}"))
    with pytest.raises(ConfigError, match=r"train.global_batch=2.5"):
        compose(["train.global_batch=2.5"])


def test_all_problems_come_at_once():
    found = problems("model.heads=0", "train.steps=0", "optim.name=adagrad", "lr.schedule=step", "pipeline=none")
    assert len(found) == 5 and all("; set" in text for text in found)
    config = compose(["train.steps=0", "optim.lr=-1"])
    with pytest.raises(ConfigError, match=r"(?s)train.steps.*optim.lr|optim.lr.*train.steps"):
        require(config, 1)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.heads=3", "multiple of model.heads=3"),
        ("model.kv_heads=3", "divides model.heads=4"),
        ("model.activation=relu", "silu"),
        ("model.dropout=1.0", "below 1"),
        ("mesh.pp=0", "at least 1"),
        ("mesh.dp=0", "at least 1, or -1"),
        ("shard.stage=5", "set shard.stage=0"),
        ("launch.nodes=2", "a multiple of launch.nodes"),
        ("launch.ranks_per_node=3", "ranks_per_node"),
        ("optim.eps=0", "above 0"),
        ("optim.lr=nan", "at least 0"),
        ("data.eval_fraction=0.6", "at most 0.5; set data.eval_fraction=0.5 or less"),
        ("data.synthetic_min_tokens=200", "at most data.synthetic_max_tokens"),
        ("data.tokenizer_vocab=5000", "at most model.vocab=4096"),
        ('train.skip_steps=["9-3"]', "ranges of steps"),
    ],
)
def test_each_rule_says_value_rule_and_remedy(override, words):
    found = problems(override) if override != "launch.ranks_per_node=3" else problems(override, ranks=1)
    assert any(words in text and override.split("=")[0] in text for text in found), found


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["mesh.tp=3"], "mesh.tp=3: divides model.heads=4; set mesh.tp=4"),
        (["mesh.tp=4", "model.kv_heads=2"], "mesh.tp=4: divides model.kv_heads=2; set mesh.tp=2"),
        (["mesh.tp=2", "model.ffn=33"], "mesh.tp=2: divides model.ffn=33; set mesh.tp=3"),
        (["mesh.tp=4", "model.vocab=6", "data.tokenizer_vocab=6"], "mesh.tp=4: leaves the last rank no row of model.vocab=6"),
        (["mesh.cp=3", "context=ulysses"], "mesh.cp=3: with context=ulysses it divides the 4 of model.heads"),
        (["mesh.cp=2", "model.dropout=0.1"], "model.dropout=0.1: attention over a ring"),
        (["mesh.pp=8"], "mesh.pp=8: times mesh.chunks=1 it makes 8 stages of model.layers=6; set mesh.pp=6"),
        (["mesh.pp=2", "mesh.chunks=2"], "mesh.chunks=2: pipeline=1f1b has exactly 1 on each rank"),
        (["mesh.pp=2", "mesh.stage_layers=[5,2]"], "mesh.stage_layers=[5, 2]: 2 numbers (mesh.pp × mesh.chunks)"),
        (["mesh.pp=2", "shard.engine=ddp", "mesh.dp=2"], "mesh.pp=2: shard.engine=ddp knows nothing of it; set mesh.pp=1"),
        (["mesh.tp=2", "shard.engine=deepspeed", "mesh.dp=2"], "mesh.tp=2: shard.engine=deepspeed knows nothing of it"),
        (["mesh.tp=2", "mesh.dp=2", "shard.engine=ddp", "precision=bf16"], "precision.compute=bf16: with shard.engine=ddp"),
        (["mesh.tp=2", "optim=muon"], "optim.name=muon: mesh.tp=2 divides parameters"),
    ],
)
def test_F39_an_impossible_layout_is_refused_with_its_numbers_and_the_nearest_one(overrides, text):
    found = problems(*overrides)
    assert any(line.startswith(text) for line in found), found


@pytest.mark.parametrize("optim", ["muon", "adamw8bit"])
def test_an_optimizer_that_needs_whole_parts_is_refused_where_an_engine_cuts_anywhere(optim):
    for engine, stage in (("ddp", 0), ("fsdp2", 3)):
        (text,) = problems(f"optim={optim}", f"shard.engine={engine}", f"shard.stage={stage}", "mesh.dp=2")
        assert text.startswith(f"optim.name={optim}: needs whole ") and "set shard.engine=native, or optim=adamw" in text
    assert problems(f"optim={optim}", "shard.stage=3", "mesh.dp=2") == []


def test_moments_of_eight_bits_go_with_fp32_masters():
    (text,) = problems("optim=adamw8bit", "precision=bf16", "precision.master=bf16")
    assert text.startswith("precision.master=bf16: optim=adamw8bit updates fp32")


def test_flash_attention_with_dropout_is_refused_on_a_cpu_before_ranks_start():
    given = ("attention=flash", "model.dropout=0.1", "launch.device=cpu")
    assert problems(*given) == [
        "attention=flash: has no dropout on launch.device=cpu, and model.dropout=0.1; set attention=auto, or model.dropout=0."
    ]
    for change in ("attention=auto", "model.dropout=0", "launch.device=cuda"):
        assert problems(*given, change) == []


def test_F39_ranks_and_degrees_must_agree():
    assert any("multiply to 2 ranks but there are 3" in text for text in problems("mesh.dp=2", ranks=3))
    assert problems("mesh.dp=-1", ranks=4) == problems("mesh.dp=-1", ranks=2) == problems("mesh.dp=-1") == []


def test_paths_that_are_not_there_are_named():
    config = compose(["data=text", "data.path=/nonexistent/file.txt"])
    assert any("data.path=/nonexistent/file.txt: no such file" in str(p) for p in check(config, 1))
    assert any("data.path" in str(p) for p in check(compose(["data=text"]), 1))
    assert any("tokenizer.json" in str(p) for p in check(compose(["data.tokenizer=nowhere.json"]), 1))


def test_what_is_wrong_inside_a_blend_is_named_by_its_place(tmp_path):
    (tmp_path / "here.txt").write_text("text")
    first, second = f"{{source: text, path: {tmp_path}/here.txt}}", "{source: jsonl, path: gone.jsonl, eval_fraction: 0.7}"
    assert problems(f"data.blend=[{first},{second},{{source: synthetic}}]", "data.eval_fraction=0.51", "train.steps=0") == [
        "train.steps=0: at least 1; set train.steps=1 or more.",
        "data.eval_fraction=0.51: at most 0.5; set data.eval_fraction=0.5 or less.",
        "data.blend[1].path=gone.jsonl: no such file, folder or glob; give a path that exists, seen from this folder.",
        "data.blend[1].eval_fraction=0.7: between 0 and 0.5; set the part to hold out.",
    ]
    assert problems(f"data.blend=[{{source: text}},{second},{{source: synthetic}}]") == [
        'data.blend[0].path="": the source text reads a path; give this item a path.',
        "data.blend[1].path=gone.jsonl: no such file, folder or glob; give a path that exists, seen from this folder.",
        "data.blend[1].eval_fraction=0.7: between 0 and 0.5; set the part to hold out.",
    ]


def test_world_size_follows_degrees_and_devices():
    assert world_size(compose([]), 0) == 1
    assert world_size(compose([]), 8) == 8
    assert world_size(compose(["launch.device=cpu"]), 8) == 1
    assert world_size(compose(["mesh.dp=3", "mesh.tp=2"]), 8) == 6
    assert world_size(compose(["mesh.tp=2", "launch.nodes=2"]), 8) == 16
    assert world_size(compose(["launch.ranks_per_node=4"]), 0) == 4


def test_skip_ranges():
    assert skipped_steps(["100", "200-202"]) == {100, 200, 201, 202}
    for bad in ("0", "3-1", "x", "-4"):
        with pytest.raises(ValueError):
            skipped_steps([bad])


def test_a_written_config_reads_back_equal(tmp_path):
    config = compose(["model=gpt2_124m", "run.dir=a b", "data.blend=[{source: text, path: x.txt, weight: 0.5}]", "optim.lr=3e-4"])
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load(tmp_path / "config.yaml") == config
    (tmp_path / "bad.yaml").write_text("model: [")
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        load(tmp_path / "bad.yaml")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.layrs=3", "Did you mean model.layers"),
        ("trian.steps=3", "Did you mean train.steps"),
        ("+model.layrs=3", "Did you mean model.layers"),
        ("model=toy_10", "Did you mean toy_10m"),
        ("optim=adamx", "Did you mean adam"),
        ("model.layers=abc", "model.layers=abc"),
        ("train.steps=", "train.steps"),
        ("steps", "steps: not understood; what is to change is given as KEY=VALUE, for example: dist-train train data=text"),
    ],
)
def test_unknown_keys_and_wrong_types_are_answered_with_the_nearest_name(override, words):
    with pytest.raises(ConfigError) as caught:
        compose([override])
    assert words in str(caught.value)


def test_every_key_is_dotted_and_known():
    assert {"model.layers", "train.global_batch", "mesh.dp", "remat", "run.dir"} <= set(keys())
