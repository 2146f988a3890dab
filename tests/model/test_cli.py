"""`dist-train check shapes` and `dist-train generate`, called as the command line calls them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from dist_train.checkpoint import Piece, save
from dist_train.cli.main import main
from dist_train.comm.collectives import Collectives
from dist_train.config.compose import compose, dump
from dist_train.config.schema import Config
from dist_train.data.tokenizer import ByteTokenizer
from dist_train.mesh.mesh import ParallelMesh
from dist_train.model import build_model, generate, parameter_count
from dist_train.model.shapes import trace_shapes
from tests.model.toy import toy


def rows_of(output: str) -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in output.splitlines() if line.startswith("│")]
    return {row[0]: row[1:] for row in cells}


@pytest.mark.parametrize("precision, dtype, size", [("fp32", "float32", 4), ("bf16", "bfloat16", 2)])
def test_shapes_of_a_small_model(precision, dtype, size, capsys):
    shape = ["model.layers=2", "model.hidden=16", "model.heads=4", "model.kv_heads=2", "model.ffn=32", "model.vocab=53"]
    assert main(["check", "shapes", *shape, "train.micro_batch=3", "train.seq_len=12", f"precision={precision}"]) == 0
    rows = rows_of(capsys.readouterr().out)

    def both(shape: str, elements: int) -> list[str]:
        return [shape, dtype, f"{elements * size:,}"] * 2

    assert rows["tokens"] == ["3 x 12", "int64", "288", "-", "", ""]
    assert rows["embed"] == rows["blocks.1"] == both("3 x 12 x 16", 3 * 12 * 16)
    assert rows["blocks.0.attention.k"] == both("3 x 12 x 8", 3 * 12 * 8)
    assert rows["blocks.0.attention.core"] == both("3 x 4 x 12 x 4", 3 * 12 * 16)
    assert rows["blocks.1.mlp.down (input)"] == both("3 x 12 x 32", 3 * 12 * 32)
    assert rows["head"] == both("3 x 12 x 53", 3 * 12 * 53)
    assert rows["loss"] == ["scalar", "float32", "4"] * 2
    assert rows["blocks.1.mlp.gate.weight"] == both("32 x 16", 32 * 16)
    assert rows["norm.weight"] == both("16", 16)


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_shapes_are_those_of_a_real_step(family):
    config = toy(family, dropout=0.1)
    traced = trace_shapes(config)
    model, real = build_model(config), {}
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            module.register_forward_hook(lambda m, a, out, name=name: real.update({name: out}) or out.retain_grad())
    tokens = torch.zeros(config.train.micro_batch, config.train.seq_len, dtype=torch.int64)
    model(tokens, tokens, tokens).sum().backward()
    seen = {row.name: row for row in traced.activations}
    for name, out in real.items():
        for facts, tensor in ((seen[name].value, out), (seen[name].gradient, out.grad)):
            assert (facts.shape, facts.dtype, facts.bytes) == (tuple(tensor.shape), tensor.dtype, tensor.nbytes)
    assert {row.name: row.value.shape for row in traced.parameters} == {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert all(row.gradient == row.value for row in traced.parameters)


def test_shapes_of_a_published_model_take_no_memory():
    config = compose(["model=llama3_405b", "model.layers=8", "train.micro_batch=2", "train.seq_len=64", "precision=bf16"])
    traced = trace_shapes(config)
    assert sum(row.value.bytes for row in traced.parameters) == 2 * parameter_count(config.model) > 50e9
    assert max(row.value.bytes for row in traced.activations) == 2 * 64 * 128256 * 2


def test_check_says_what_is_wrong(capsys):
    assert main(["check"]) == 2 and "usage" in capsys.readouterr().out
    assert main(["check", "--help"]) == 0 and "check shapes" in capsys.readouterr().out
    assert main(["check", "sizes"]) == 2 and "no such command; give shapes" in capsys.readouterr().err
    assert main(["check", "shapes", "model.layer=2"]) == 2 and "model.layers" in capsys.readouterr().err
    assert main(["check", "shapes", "model.heads=3"]) == 2 and "model.hidden=320" in capsys.readouterr().err


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Config, torch.nn.Module]:
    """The folder of a run with two checkpoints, the newer from seed 5, its config and that model."""
    config = toy(vocab=300, tie_embeddings=True)
    mesh = ParallelMesh.single()
    for step, seed in ((10, 4), (20, 5)):
        model = build_model(config, seed)
        pieces = [Piece.whole(f"model/{name}", p.detach()) for name, p in model.named_parameters()]
        save(tmp_path / "checkpoints", step, pieces, {}, Collectives(), mesh.world)
    (tmp_path / "config.yaml").write_text(dump(config))
    ByteTokenizer().save(tmp_path / "tokenizer.json")
    return tmp_path, config, model


def test_generate_writes_from_the_newest_checkpoint(run, capsys):
    folder, config, model = run
    options = ["--tokens", "12", "--temperature", "1.5", "--top-p", "0.9", "--seed", "7"]
    command = ["generate", str(folder), "--prompt", "aé", *options]
    assert main(command) == 0
    out, err = capsys.readouterr()
    tokenizer = ByteTokenizer()
    prompt = tokenizer.encode("aé")
    expected = generate(model, prompt, 12, 1.5, 0.9, 7, tokenizer.eos, vocab=257)
    assert out == tokenizer.decode(prompt + expected) + "\n" and "step_00000020" in err
    assert main([*command[:-1], "8"]) == 0 and capsys.readouterr().out != out


def test_generate_without_a_prompt_starts_a_document(run, capsys):
    folder, _, model = run
    assert main(["generate", str(folder), "--tokens", "9", "--temperature", "0"]) == 0
    expected = generate(model, [256], 9, 0.0, 1.0, 0, 256, vocab=257)
    assert capsys.readouterr().out == ByteTokenizer().decode(expected) + "\n"


def test_generate_cuts_a_long_prompt_and_says_so(run, capsys):
    folder, _, _ = run
    assert main(["generate", str(folder), "--prompt", "x" * 40, "--tokens", "3"]) == 0
    assert "the prompt has 40 tokens: its last 32 are used" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option, value, words",
    [
        ("--temperature", "-1", "--temperature -1: must be 0"),
        ("--temperature", "nan", "--temperature nan: must be 0"),
        ("--temperature", "inf", "--temperature inf: must be 0"),
        ("--top-p", "2", "--top-p 2: must be above 0"),
        ("--top-p", "nan", "--top-p nan: must be above 0"),
        ("--tokens", "-1", "--tokens -1: cannot be negative"),
        ("--seed", str(2**64), f"--seed {2**64}: must be between 0 and 2^64 - 1"),
        ("--seed", "-1", "--seed -1: must be between"),
        ("--prompt", "caf\udce9", r"--prompt 'caf\udce9': is not UTF-8"),
    ],
)
def test_generate_refuses_in_one_line_before_it_loads_a_model(run, capsys, monkeypatch, option, value, words):
    monkeypatch.setattr("dist_train.cli.generate.load_model", lambda *_: pytest.fail("the model was loaded"))
    assert main(["generate", str(run[0]), option, value]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"dist-train generate: {words}") and err.count("\n") == 1


def test_generate_takes_the_largest_seed(run, capsys):
    assert main(["generate", str(run[0]), "--tokens", "2", "--seed", str(2**64 - 1)]) == 0
    assert main(["generate", str(run[0]), "--tokens", "0", "--prompt", "a"]) == 0


def test_generate_says_what_is_wrong(run, capsys):
    folder, config, _ = run

    def refused(*arguments: str) -> str:
        assert main(["generate", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == "" and "Traceback" not in err
        return err

    assert "no such run folder" in refused(str(folder / "missing"))
    assert "holds no config.yaml" in refused(str(folder / "checkpoints"))
    assert "RUN_DIR" in refused()
    assert "invalid int value" in refused(str(folder), "--tokens", "many")
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, ffn=48))
    (folder / "config.yaml").write_text(dump(wider))
    assert "model/blocks.0.mlp.gate.weight" in refused(str(folder))
    for checkpoint in (folder / "checkpoints").iterdir():
        checkpoint.rename(folder / f"moved_{checkpoint.name}")
    assert "holds no whole checkpoint" in refused(str(folder))
