"""The benchmark scripts run, and their figures mean what their names say. Speed is nothing that a test can judge."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
TIMEOUT = 240
pytestmark = pytest.mark.timeout(TIMEOUT + 30)


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)


def load(name: str, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def test_engines_are_counted_alike(tmp_path):
    names = ["plain", "ddp", "fsdp2", "ds2", "stage0", "stage3"]
    figures = tmp_path / "figures.json"
    small = ["--models", "tiny", "--rounds", "1", "--steps", "2"]
    done = run("engines.py", *small, "--engines", ",".join(names), "--json", str(figures))
    assert done.returncode == 0, done.stderr
    if importlib.util.find_spec("deepspeed") is None:
        assert "ds2: left out, since deepspeed is not installed" in done.stdout
        names.remove("ds2")
    result = json.loads(figures.read_text())["tiny"]
    engines = result["engines"]
    assert list(engines) == names
    assert result["loss_difference"] <= 1e-5
    sent = {name: statistics.median(each["sent_bytes"]) for name, each in engines.items()}
    assert sent["plain"] == 0 and engines["plain"]["collectives"] == {}
    for name in ("ddp", "stage0", "stage3"):  # beside the model's 140 kB there are heads of messages, padding and the norm
        assert 1 <= sent[name] / engines[name]["ideal_bytes"] < 1.1, name
    assert engines["stage3"]["ideal_bytes"] == 1.5 * engines["stage0"]["ideal_bytes"]
    assert sent["fsdp2"] > 1.2 * engines["fsdp2"]["ideal_bytes"]  # gloo's reduce-scatter sends twice
    for each in engines.values():
        assert len(each["wall_seconds"]) == len(each["cpu_seconds"]) == 1
        assert each["calls"] > 0
        # Weights and both moments at least, or half of them; activations come on top within a step.
        assert 6 * result["parameters"] < each["held_bytes"] < each["peak_bytes"]
    assert engines["stage3"]["collectives"]["send"] > 1  # its gathers and exchanges
    for name in names:
        assert name in done.stdout


def test_an_engine_of_ones_own_joins_and_other_losses_are_told(tmp_path):
    extra = tmp_path / "extra.py"
    extra.write_text(
        "from contestants import Trainer\n"
        "def make(name, model, loss, mesh, clip):\n"
        "    return Trainer(lambda: float(loss(model).detach()) * 1.001)\n"
    )
    small = ["--models", "tiny", "--rounds", "1", "--steps", "1", "--engines", "ddp,off", "--extra", str(extra)]
    done = run("engines.py", *small)
    assert done.returncode == 1
    assert "tiny: the losses of off and ddp differ by 0.001" in done.stderr


def test_a_run_that_is_stopped_tells_what_it_has(tmp_path):
    figures = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "engines.py"), "--models", "tiny,light", "--rounds", "100000", "--steps", "1"]
    command += ["--engines", "ddp,stage0", "--json", str(figures)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:
        assert process.stderr is not None
        assert any("round 3" in line for line in process.stderr)
        os.killpg(process.pid, signal.SIGTERM)  # as coreutils' timeout does
        out, _ = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    results = json.loads(figures.read_text())
    assert list(results) == ["tiny"]
    assert 3 <= results["tiny"]["rounds"] == len(results["tiny"]["engines"]["stage0"]["wall_seconds"]) < 100000
    assert "stage0" in out


def test_engines_nobody_knows_are_refused():
    done = run("engines.py", "--engines", "stage4", "--models", "huge")
    assert done.returncode == 2
    assert "--engines stage4: not among plain, ddp" in done.stderr
    assert "--engines must name ddp" in done.stderr
    assert "--models huge: not among light" in done.stderr


def test_a_link_has_its_rate_and_leaves_nothing_behind(tmp_path, monkeypatch):
    if why := load("link", monkeypatch).missing():
        pytest.skip(why)
    before = subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout
    figures, steps, rate = tmp_path / "figures.json", 6, 4.0
    small = ["--models", "tiny", "--rounds", "1", "--steps", str(steps), "--engines", "ddp,stage0", "--json", str(figures)]
    done = run("engines.py", "--link", str(rate), *small)
    assert done.returncode == 0, done.stderr
    result = json.loads(figures.read_text())["tiny"]
    for name, each in result["engines"].items():
        at_once = 256 * 1024  # bytes that the shaper lets through before it shapes
        least = (each["sent_bytes"][0] * steps - at_once) * 8 / (rate * 1e6)
        assert each["wall_seconds"][0] * steps > least > 0.5, name
    assert subprocess.run(["ip", "-o", "link"], capture_output=True, text=True).stdout == before


def test_section_zero_runs_without_a_card(tmp_path):
    done = run("device.py", "--section", "zero", "--device", "cpu", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "zero.json").read_text())
    assert figures["device"] == "cpu"
    assert figures["checks"]["losses of two ranks are those of one, at every stage"] is True
    assert figures["checks"]["stage3: the host waits for nothing in a step"] is None
    assert "not on this device  stage3: the host waits for nothing in a step" in done.stdout
    assert set(figures["stages"]) == {"stage0", "stage1", "stage2", "stage3"}
    bytes_of = {name: {op: each["bytes"] for op, each in stage["traffic"].items()} for name, stage in figures["stages"].items()}
    # Seven eighths of the model, twice by an all-reduce; once by each of the others, and gathered twice at stage 3.
    whole = bytes_of["stage0"]["all_reduce/dp"]
    assert whole == pytest.approx(2 * 4 * figures["parameters"] * 7 / 8, rel=0.05)
    assert bytes_of["stage3"]["all_gather/dp"] == pytest.approx(whole, rel=0.05)
    assert bytes_of["stage3"]["reduce_scatter/dp"] == pytest.approx(whole / 2, rel=0.05)
    for stage in figures["stages"].values():
        with gzip.open(tmp_path / stage["trace"]["file"], "rt") as trace:
            assert {"traced step", "forward", "backward", "update"} <= {e.get("name") for e in json.load(trace)["traceEvents"]}


def test_what_a_trace_of_a_card_says(tmp_path, monkeypatch):
    def event(category, name, start, stop, stream=None):
        return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": stop - start, "args": {"stream": stream}}

    events = [
        event("user_annotation", "traced step", 0, 1000),
        event("kernel", "gemm", 100, 300, stream=7),
        event("kernel", "gemm", 250, 400, stream=7),  # touches the last
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 350, 500, stream=13),  # 50 of its 150 µs behind a kernel
        event("kernel", "fill", 500, 520, stream=13),  # a collective's own
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 700, 800, stream=13),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 700, 900, stream=7),
        event("cuda_runtime", "cudaStreamSynchronize", 600, 700),
        event("cuda_runtime", "cudaDeviceSynchronize", 1100, 1200),  # after the step
        {"ph": "i", "name": "something else"},
    ]
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = load("device_zero", monkeypatch).read_trace(tmp_path / "trace.json.gz")
    assert found["compute_seconds"] == pytest.approx(300e-6)
    assert found["communication_seconds"] == pytest.approx(250e-6)
    assert found["overlapped_seconds"] == pytest.approx(50e-6)
    assert found["exposed_seconds"] == pytest.approx(200e-6)
    assert found["host_waits"] == ["cudaStreamSynchronize"]


def test_ops_are_timed_side_by_side(tmp_path):
    figures = tmp_path / "figures.json"
    small = ["--device", "cpu", "--rounds", "2", "--ops", "rms_norm,top_k", "--dtype", "bf16", "--json", str(figures)]
    done = run("ops.py", *small)
    assert done.returncode == 0, done.stderr
    result = json.loads(figures.read_text())
    assert [each["op"] for each in result["ops"]] == ["rms_norm", "top_k"]
    for each, others in zip(result["ops"], ({"ours", "eager", "copy"}, {"ours", "eager"})):
        assert each["seconds"].keys() == others and not each["failures"]
        assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in each["seconds"].values())
    rows, columns = result["ops"][0]["sizes"]
    assert result["ops"][0]["traffic"] == 5 * 2 * rows * columns  # x, y, dy, x again and dx
    assert "rms_norm" in done.stdout


def test_ops_nobody_knows_are_refused():
    done = run("ops.py", "--ops", "softmax", "--dtype", "int3")
    assert done.returncode == 2
    assert "--ops softmax: not among rms_norm" in done.stderr and "--dtype int3: not among fp32" in done.stderr


def test_what_an_op_must_move_and_who_takes_part(monkeypatch):
    """Bytes by hand for updates, and that whoever fails beside ours is told and left out."""
    ops, cases = load("ops", monkeypatch), load("op_cases", monkeypatch)
    import torch

    cpu = torch.device("cpu")
    moved = {"adamw": 28, "sgd": 20, "norm": 4, "accumulate": 12}
    for name, bytes_ in moved.items():
        assert ops.make(name, (1024,), cases.Maker(torch.float32, cpu)).traffic == bytes_ * 1024, name
    assert ops.make("adamw", (1024,), cases.Maker(torch.bfloat16, cpu)).traffic == 28 * 1024  # a gradient and a copy of 2 bytes

    def no_compiler(function):
        def call(*_):
            raise RuntimeError("no compiler")

        return call

    maker = cases.Maker(torch.float32, cpu, cases.Others(compile=no_compiler))
    found = ops.compare("rms_norm", (8, 64), maker, 3)
    assert found["failures"] == {"compile": "RuntimeError: no compiler"}
    assert found["seconds"].keys() == {"ours", "eager", "copy"}


def test_the_peak_of_linear_cross_entropy(monkeypatch):
    import torch

    sizes = (2048, 8, 8192)  # logits of 64 MiB
    peaks = load("ops", monkeypatch).memory(torch.float32, torch.device("cpu"), sizes)
    if None in peaks.values():
        pytest.skip("the peak of a process cannot be set back here")
    assert peaks["ours"] < 32 << 20 < 128 << 20 < peaks["eager"]


def test_section_ops_runs_without_a_card(tmp_path):
    done = run("device.py", "--section", "ops", "--device", "cpu", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads((tmp_path / "ops.json").read_text())
    names = {what.split(":")[0] for what in figures["checks"] if "fp64" in what}
    assert names == {each["op"] for each in figures["ops"]} and len(names) >= 20
    for name in names:
        assert any(what.startswith(f"{name} bf16") and "unaligned" in what for what in figures["errors"])
    assert isinstance(figures["attention"]["cpu_flash"], float) and isinstance(figures["attention"]["fa2"], str)
    assert not figures["left_out"]
    assert set(figures["targets"].values()) == {None}  # a CPU does not tell
    assert "rms_norm bf16: not slower than compile" in figures["targets"]


def test_section_ops_tells_a_wrong_kernel_and_a_missed_target(monkeypatch):
    import torch

    device_ops, cases = load("device_ops", monkeypatch), load("op_cases", monkeypatch)
    case = device_ops.ops.make("swiglu", (7, 1000), cases.Maker(torch.float32, torch.device("cpu")))
    assert device_ops.excess(case) <= 1
    ours = case.calls["ours"]
    case.calls["ours"] = lambda *tensors: tuple(x * (1 + 1e-5) for x in ours(*tensors))
    assert device_ops.excess(case) > 1
    case.calls["ours"] = lambda *tensors: tuple(x / 0 for x in ours(*tensors))
    assert not device_ops.excess(case) <= 1
    seconds = {"ours": [1.0, 1.0], "copy": [0.8, 0.8], "eager": [2.0, 2.0], "compile": [0.9, 0.9]}
    timed = {"device": "cuda", "memory": {"bf16": {"ours": 1, "eager": 8}}}
    timed["ops"] = [{"op": "swiglu", "dtype": "bf16", "sizes": [8, 4096], "traffic": 8, "seconds": seconds}]
    assert device_ops.targets(timed) == {
        "swiglu bf16: 90% of a copy's bandwidth": False,
        "swiglu bf16: not slower than eager": True,
        "swiglu bf16: not slower than compile": False,
        "swiglu bf16: not slower than liger": None,
        "linear_cross_entropy: peak of memory at most an eighth of eager's": True,
    }
