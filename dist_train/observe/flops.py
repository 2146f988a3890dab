"""Peak arithmetic of known accelerators, the denominator of MFU (PaLM, arXiv:2204.02311, appendix B)."""

from __future__ import annotations

import re

import torch

# Dense bf16 with fp32 accumulation (fp16 where a chip has no bf16), TFLOP/s of one device, from the makers' data sheets.
# A device matches the first line whose words all occur in its name, so the more specific line stands first.
PEAK_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("V100 PCIe", 112.0),
    ("V100", 125.0),
    ("T4", 65.0),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
    ("MI300X", 1307.4),
    ("MI250X", 383.0),
)


def peak_flops(device: torch.device, peak_tflops: float = 0.0) -> float | None:
    """Peak FLOP/s of one device: `peak_tflops` (observe.peak_tflops) when given, else by the device's name; None if unknown.

    A slice of a shared GPU (MIG) and every CPU count as unknown: a wrong denominator is worse than none.
    """
    if peak_tflops > 0:
        return peak_tflops * 1e12
    return peak_of_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_of_name(name: str) -> float | None:
    """Peak FLOP/s of the device that calls itself `name`, such as `NVIDIA H100 80GB HBM3`."""
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    if "mig" in words:
        return None
    return next((tflops * 1e12 for key, tflops in PEAK_TFLOPS if words.issuperset(key.lower().split())), None)
