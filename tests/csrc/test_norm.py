"""RMSNorm and LayerNorm, with and without the residual: on the CPU, and the CUDA kernels in the shim."""

from __future__ import annotations

import torch

from tests.csrc.harness import Kernels, build


def quick_check(kernels: Kernels) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 1000), torch.randn(1000)
    y, rstd = torch.empty_like(x), torch.empty(5)
    kernels.dt_norm_forward(x, None, weight, None, y, None, None, rstd, 5, 1000, 1e-6, x.dtype, weight.dtype)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (1000,), weight, 1e-6))


def test_kernels_run_in_every_order_of_warps():
    kernels = Kernels(build())
    for _ in kernels.orders():
        quick_check(kernels)
