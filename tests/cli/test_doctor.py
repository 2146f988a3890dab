"""`dist-train doctor` tells what is here, and what would run elsewhere."""

from __future__ import annotations

import json
import platform
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dist_train import __version__
from dist_train.cli import doctor
from dist_train.cli.main import main
from dist_train.ops.attention import attention, cpu
from dist_train.ops.attention.select import Machine


def test_it_prints_all_tables_and_leaves_with_0(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    versions = (__version__, platform.python_version(), torch.__version__)
    for text in (*versions, "hydra-core", "Devices", "Fused kernels", "shared memory"):
        assert text in out
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in out.splitlines() if line.startswith("│")]
    told = {(row[0], row[1]): row[2] for row in rows if len(row) == 4 and row[1]}
    assert len(told) == 3 * len(doctor.CASES)
    assert told["training, packed documents", "fp32"] == "cpu_flash"
    assert told["the same with dropout", "fp32"] == "sdpa"
    assert "cpu_flash: has no dropout" in out


def test_what_it_says_is_what_runs(monkeypatch):
    """Where it says fp32, the CPU kernel gets fp32."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "_scaled_dot_product_flash_attention_for_cpu" in str(function):
                seen.append(args[0].dtype)
            return function(*args, **(kwargs or {}))

    original = cpu._forward
    monkeypatch.setattr(
        cpu, "_forward", lambda q, *rest, **more: seen.append(q.dtype) or original(q, *rest, **more)
    )  # inside our operator no mode looks
    rows = {row[:2]: row[2] for row in doctor.attention_rows(Machine("cpu"))}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        q = torch.randn(1, 2, 4, 8, dtype=dtype)
        with Watch():
            attention(q, q, q)
        told = rows["training, one document a row", name]
        assert told.startswith("cpu_flash") and told.endswith(" in fp32") == (seen[-1] != dtype)


def test_other_machines_can_be_asked_about():
    rows = list(doctor.attention_rows(Machine("cuda", (9, 0), (("fa4", "the package flash_attn is not installed"),))))
    told = {(case, dtype): (backend, why) for case, dtype, backend, why in rows}
    assert told["training, packed documents", "bf16"] == ("fa3", "fa4: the package flash_attn is not installed")
    assert told["the same with dropout", "bf16"][0] == "fa2" and told["training, packed documents", "fp32"][0] == "sdpa"


@pytest.mark.parametrize(
    "library, expected",
    [
        (
            SimpleNamespace(loaded=False, missing="no compiler"),
            [("cpu, cuda", "missing, so torch's own operations run: no compiler")],
        ),
        (SimpleNamespace(loaded=True, has_cuda=True, cpu_isa=lambda: "avx2"), [("cpu", "avx2"), ("cuda", "built")]),
    ],
)
def test_the_state_of_the_fused_kernels(library, expected, monkeypatch):
    import dist_train.ops

    monkeypatch.setattr(dist_train.ops, "library", library)
    assert list(doctor.fused_kernels()) == expected


def test_arguments_and_help(capsys):
    for words, code, text in ((["--help"], 0, "usage: dist-train doctor"), (["now"], 2, "unrecognized arguments: now")):
        with pytest.raises(SystemExit) as end:
            main(["doctor", *words])
        said = capsys.readouterr()
        assert end.value.code == code and text in said.out + said.err


def test_a_bad_check_is_exit_code_1_and_the_json_file_says_which(tmp_path, capsys):
    file = tmp_path / "report.json"
    (tmp_path / "taken").write_text("")
    assert main(["doctor", "--run-dir", str(tmp_path / "taken"), "--json", str(file)]) == 1
    assert "bad   run folder" in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert found["state"] == "bad" and file.stat().st_mode & 0o077 == 0
    bad = [each["name"] for each in found["reports"]["0"]["checks"] if each["state"] == "bad"]
    assert bad == [f"run folder {tmp_path / 'taken'}"]


def test_no_secret_is_shown(monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JWT", "first")
    monkeypatch.setenv("TORCH_HUB_TOKEN", "second")
    monkeypatch.setenv("AWS_REGION", "third")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("DIST_TRAIN_MIRROR", "https://me:fourth@host/x?token=fifth&a=1")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "NCCL_DEBUG=INFO" in out and "DIST_TRAIN_MIRROR=https://***host/x?***&a=1" in out
    assert not any(word in out for word in ("first", "second", "third", "fourth", "fifth"))
