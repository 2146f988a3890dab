"""Which backend serves what: a pure function, asked about machines that are not here."""

from __future__ import annotations

import pytest
import torch

from dist_train.config.compose import ConfigError
from dist_train.ops.attention.select import BACKENDS, KINDS, WANTED, Machine, Request, choose, this_machine

CPU = Machine("cpu")
A100, H100, B200 = (Machine("cuda", (major, 0)) for major in (8, 9, 10))
BF16 = torch.bfloat16


def without(machine: Machine, *names: str) -> Machine:
    return Machine(machine.device, machine.capability, tuple((name, "the package is not installed") for name in names))


@pytest.mark.parametrize(
    "machine, request_, expected",
    [
        (B200, Request(BF16, 128, "causal"), "fa4"),
        (H100, Request(BF16, 128, "packed"), "fa4"),
        (A100, Request(BF16, 128, "packed"), "fa2"),
        (H100, Request(BF16, 192, "packed"), "fa3"),
        (H100, Request(BF16, 64, "causal", dropout=0.1), "fa2"),
        (without(H100, "fa4"), Request(torch.float16, 64, "tail"), "fa3"),
        (without(H100, "fa4", "fa3", "fa2"), Request(BF16, 64, "packed"), "torch_flash"),
        (without(H100, "fa4", "fa3", "fa2", "torch_flash"), Request(BF16, 64, "causal"), "cudnn"),
        (without(H100, "fa4", "fa3", "fa2", "torch_flash"), Request(BF16, 64, "packed"), "sdpa"),
        (without(H100, "fa4", "fa3", "fa2", "torch_flash"), Request(BF16, 64, "packed", lse=True), "math"),
        (H100, Request(torch.float32, 64, "packed"), "sdpa"),
        (H100, Request(BF16, 512, "causal"), "sdpa"),
        (H100, Request(BF16, 64, "mask"), "sdpa"),
        (Machine("cuda", (7, 5)), Request(torch.float16, 64, "causal"), "sdpa"),
        (CPU, Request(torch.float32, 64, "packed"), "cpu_flash"),
        (CPU, Request(torch.float64, 64, "mask", lse=True), "cpu_flash"),
        (CPU, Request(torch.float32, 64, "packed", dropout=0.1), "sdpa"),
        (Machine("meta"), Request(torch.float32, 64, "packed"), "sdpa"),
        (Machine("meta"), Request(torch.float32, 64, "packed", lse=True), "math"),
    ],
)
def test_auto_takes_the_first_that_qualifies(machine, request_, expected):
    choice = choose(request_, machine)
    assert choice.backend == expected
    assert [name for name, _ in choice.refused] == list(BACKENDS[: BACKENDS.index(expected)])
    assert all(why for _, why in choice.refused)


def test_the_reason_names_each_rule():
    reason = choose(Request(torch.float32, 64, "causal"), without(H100, "fa4")).reason
    assert reason.startswith("fa4: the package is not installed; fa3, fa2, torch_flash, cudnn: takes float16, bfloat16; ")
    assert choose(Request(BF16, 64, "causal"), A100).reason.startswith(
        "fa4: needs compute capability 9.x to 10.x, not 8.0; fa3: "
    )
    assert choose(Request(BF16, 64, "causal"), B200).reason == "first choice"
    assert "cpu_flash: has no dropout" in choose(Request(torch.float32, 64, "packed", 0.1), CPU).reason


def test_a_name_is_an_order():
    assert choose(Request(torch.float32, 64, "packed"), CPU, "flash").backend == "cpu_flash"
    assert choose(Request(BF16, 64, "packed"), H100, "sdpa").backend == "sdpa"
    assert choose(Request(BF16, 64, "packed", lse=True), H100, "math").backend == "math"
    for request, machine, words in [
        (Request(torch.float32, 64, "packed", 0.1), CPU, ["dropout 0.1 on cpu", "cpu_flash: has no dropout"]),
        (Request(torch.float32, 64, "causal"), H100, ["float32 attention", "torch_flash: takes float16, bfloat16"]),
        (Request(BF16, 300, "causal"), H100, ["head width 300", "fa3, fa2, torch_flash: takes heads up to 256 wide"]),
    ]:
        with pytest.raises(ConfigError, match="attention=flash cannot compute") as caught:
            choose(request, machine, "flash")
        assert all(word in str(caught.value) for word in [*words, "Set attention=auto"])
    with pytest.raises(ConfigError, match="attention=sdpa cannot compute .* that returns the log-sum-exp .* no log-sum-exp"):
        choose(Request(BF16, 64, "packed", lse=True), H100, "sdpa")


def test_everything_is_served_everywhere():
    for machine in (CPU, A100, H100, B200, Machine("cuda"), Machine("meta"), Machine("xpu")):
        for kind in KINDS:
            for lse in (False, True):
                request = Request(torch.float32, 1000, kind, 0.0, lse)
                assert choose(request, machine).backend in WANTED["auto"]


def test_a_tracer_without_a_device_gets_torchs_own():
    machine = this_machine(torch.device("cuda", 0))
    if not torch.cuda.is_available():
        assert machine.capability is None and choose(Request(BF16, 64, "causal"), machine).backend == "sdpa"
    assert this_machine(torch.device("cpu")) == CPU
