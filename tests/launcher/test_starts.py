"""Many ranks start without hammering the store they meet in or the file system they load from: counts of the real code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dist_train import data
from dist_train.config import compose
from tests.launcher.test_train import TOY

STARTS = Path(__file__).resolve().parents[2] / "benchmarks" / "starts.py"
PER_GROUP = 2  # own address in, the others' out
UNNEEDED = {  # hundreds of modules each, and nothing that a rank of a plain run needs
    *("torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.distributed.elastic"),
    *("torch.distributed.checkpoint", "torch.onnx", "torch.utils.tensorboard", "sympy", "triton", "tensorboard", "deepspeed"),
    *("transformers", "datasets", "pyarrow", "pandas", "scipy", "matplotlib", "tokenizers", "wandb", "hydra", "mpi4py"),
}


def test_operations_on_the_store_do_not_grow_with_the_number_of_ranks(tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    command = [sys.executable, str(STARTS), "--ranks", "2,4,8", "--layouts", "dp,tp=2,pp=2", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    rows = json.loads(file.read_text())
    assert [(row["layout"], row["ranks"]) for row in rows] == [(each, n) for each in ("dp", "tp=2", "pp=2") for n in (2, 4, 8)]
    for layout, groups in (("dp", 3), ("tp=2", 5), ("pp=2", 6)):  # torch's own; world, dp, data and tp; or back and ends
        counts = [row["per_rank"] for row in rows if row["layout"] == layout]
        assert max(counts) <= PER_GROUP * groups, (layout, rows)
        assert counts[1] == counts[2], "8 ranks need as many each as 4"
    assert all(row["total"] <= row["ranks"] * row["per_rank"] for row in rows)


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_a_rank_imports_no_heavy_module_that_it_does_not_need(tmp_path: Path, family: str) -> None:
    """Nor does any of its first steps: what builds a model or calls an operator can import torch's compiler."""
    kind = ["model.family=llama"] if family == "llama" else ["model.family=gpt", "model.activation=gelu"]
    config = compose.compose([*TOY, *kind, "train.steps=2", f"data.cache_dir={tmp_path / 'tokens'}"])
    (tmp_path / "config.yaml").write_text(compose.dump(config))
    data.prepare(config.data, progress=False)
    program = "import json, sys; from dist_train.launcher import rank; code = rank.main(sys.argv[1:])"
    command = [sys.executable, "-c", program + "; print(json.dumps(list(sys.modules))); sys.exit(code)", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert {"torch", "dist_train.train.loop"} <= loaded and (tmp_path / "summary.json").exists()
    assert not UNNEEDED & loaded
    assert not [name for name in loaded if name.partition(".")[0] == "dist_train" and name.split(".")[1:2] in (["cli"], ["plan"])]
