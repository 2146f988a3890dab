"""`ops=fused` beside `ops=reference`: the same training, by the kernels of csrc/ and by plain torch."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dist_train.ops import library
from tests.train.test_run import launch, losses, metrics

SMALL = ("train.global_batch=8", "train.eval_every=0", "checkpoint.every=0", "train.steps=50", "lr=constant")


@pytest.mark.parametrize("family", ["llama", "gpt"])
@pytest.mark.parametrize("ranks, more", [(1, ()), (2, ("shard.stage=2", "train.z_loss=1e-4", "remat=selective"))])
def test_losses_of_fused_and_reference_agree_over_50_steps(tmp_path, family, ranks, more):
    model = ("model.family=gpt", "model.activation=gelu", "model.kv_heads=4") if family == "gpt" else ()
    curves = {}
    for ops in ("fused", "reference"):
        assert launch(ranks, tmp_path / ops, *SMALL, "optim=adamw", "optim.lr=1e-3", *model, *more, f"ops={ops}") == 0
        curves[ops] = losses(tmp_path / ops)
    assert curves["fused"][-1] < curves["fused"][0] - 0.1
    assert (curves["fused"] / curves["reference"] - 1).abs().max() < 1e-5
    norms = [torch.tensor([record["grad_norm"] for record in metrics(tmp_path / ops)]) for ops in curves]
    assert (norms[0] / norms[1] - 1).abs().max() < 1e-4


class Ours(TorchDispatchMode):
    """Names of the operators of csrc/ that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        space, _, name = function._schema.name.partition("::")
        if space == "dist_train":
            self.names.add(name.removesuffix("_").removesuffix("_backward"))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("ops", ["fused", "reference"])
def test_a_run_takes_our_kernels_or_none(tmp_path, ops):
    assert library.loaded, library.missing
    with Ours() as seen:
        assert launch(1, tmp_path, *SMALL, "train.steps=1", "optim=adamw", f"ops={ops}") == 0
    attention = {"flash_attention"}  # has a key of its own
    kernels = {"rms_norm", "add_rms_norm", "swiglu", "rotary_pair", "adam", "sum_of_squares"}
    kernels |= {"cross_entropy_terms", "cross_entropy"}
    assert seen.names - attention == (kernels if ops == "fused" else set())
