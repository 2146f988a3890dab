"""What users and their scripts hold on to: keys, commands, the commands that the README shows."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

from dist_train.cli import main
from dist_train.config import compose

ROOT = Path(__file__).resolve().parents[2]
KEYS = """
attention context pipeline
checkpoint.every checkpoint.keep checkpoint.resume checkpoint.same_data checkpoint.weights_only
data.blend data.cache_dir data.eval_fraction data.max_documents data.path data.shuffle data.source data.split
data.synthetic_documents data.synthetic_max_tokens data.synthetic_min_tokens data.text_field data.tokenizer
data.tokenizer_vocab data.workers
launch.device launch.forward_env launch.grace_seconds launch.hostfile launch.kind launch.lost_seconds launch.max_restarts
launch.nodes launch.port launch.ranks_per_node launch.ssh_command launch.timeout_seconds
lr.decay_steps lr.min_ratio lr.schedule lr.warmup_steps
mesh.chunks mesh.cp mesh.dp mesh.pp mesh.sequence mesh.stage_layers mesh.tp
model.activation model.bias model.dropout model.family model.ffn model.heads model.hidden model.init model.init_std
model.kv_heads model.layers model.max_positions model.norm_eps model.rope_theta model.tie_embeddings model.vocab
observe.check_states observe.peak_tflops observe.progress observe.sample_prompt observe.sample_tokens
observe.tensorboard observe.wandb
ops
optim.beta1 optim.beta2 optim.eps optim.lr optim.momentum optim.name optim.weight_decay
precision.compute precision.grad precision.loss_scale precision.loss_scale_growth_steps precision.loss_scale_hysteresis
precision.loss_scale_min precision.master
remat
run.dir
shard.bucket_mb shard.compress shard.compress_fraction shard.compress_weights shard.engine shard.offload shard.offload_dir
shard.offload_params shard.overlap shard.reduce_dtype shard.replicas shard.stage
slurm.account slurm.constraint slurm.container slurm.cpus_per_task slurm.exclusive slurm.extra slurm.gpus_per_node
slurm.memory slurm.partition slurm.qos slurm.requeue slurm.reservation slurm.signal_seconds slurm.tasks slurm.time
train.clip_norm train.deterministic train.eval_batch train.eval_every train.gc_every train.global_batch train.micro_batch
train.seed train.seq_len train.skip_steps train.steps train.z_loss
"""


def test_the_keys_of_the_configuration_are_these() -> None:
    """A key added, renamed or taken away is a change for every user: it is made here too, on purpose."""
    assert compose.keys() == sorted(KEYS.split())


def test_the_defaults_file_and_every_option_compose() -> None:
    groups = [folder for folder in (ROOT / "configs").iterdir() if folder.is_dir()]
    options = [f"{folder.name}={file.stem}" for folder in groups for file in sorted(folder.glob("*.yaml"))]
    assert len(options) > 10
    for option in options:
        compose.compose([option])


def test_every_command_of_the_table_exists_and_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"train", "launch"} <= main.commands().keys()
    assert main.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name in main.commands():
        assert re.search(rf"^  {name} +\S", shown, re.MULTILINE)


def test_an_unknown_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["trian"]) == 2
    assert "Did you mean train?" in capsys.readouterr().err


def test_a_user_error_is_said_once_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["launch", "missing.py"]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("dist-train launch: missing.py: no such file") and shown.err.count("\n") == 1
    assert shown.out == ""


def commands_in(text: str) -> list[list[str]]:
    """The words of each command line in the fenced blocks of a Markdown text, without prompt, comment and `VAR=value`."""
    found = []
    for block in re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("$ ")
            if re.match(r"(\w+=\S* )*(\S*/)?(dist-train|make)( |$)", line):
                words = shlex.split(line, comments=True)
                while "=" in words[0]:
                    words.pop(0)
                found.append([words[0].rpartition("/")[2], *words[1:]])
    return found


def targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def wrong_commands(text: str) -> list[str]:
    wrong = []
    for program, *words in commands_in(text):
        plain = [word for word in words if not word.startswith("-") and "=" not in word]
        if program == "make":
            wrong += [f"make {word}" for word in plain if word not in targets()]
        elif words and not words[0].startswith("-") and words[0] not in main.commands():
            wrong.append(f"dist-train {words[0]}")
    return wrong


def test_the_readme_shows_only_commands_that_exist() -> None:
    assert wrong_commands((ROOT / "README.md").read_text()) == []


def test_the_readme_check_sees_what_is_wrong() -> None:
    text = "```bash\n$ make train ARGS=x  # a comment\nA=1 .venv/bin/dist-train trian \\\n  x=1\nmake nonsense\n```\nmake prose\n"
    assert commands_in(text) == [["make", "train", "ARGS=x"], ["dist-train", "trian", "x=1"], ["make", "nonsense"]]
    assert wrong_commands(text) == ["dist-train trian", "make nonsense"]


def test_make_help_lists_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    assert targets() == set(re.findall(r"^([a-z][\w-]*):.*## ", text, re.MULTILINE))
    assert {"help", "setup", "train", "test", "lint"} <= targets()


def test_no_parametrize_is_empty() -> None:
    """pytest is told to fail at an empty one, and no test module takes that back or writes one down."""
    assert re.search(r'^empty_parameter_set_mark = "fail_at_collect"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    empty = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.parametrize") and len(node.args) > 1:
                if isinstance(node.args[1], (ast.List, ast.Tuple, ast.Set)) and not node.args[1].elts:
                    empty.append(f"{path}:{node.lineno}")
    assert not empty
