"""What one accelerator can show: a section for each part of the system. JSON and traces go into a folder.

    python benchmarks/device.py --section zero|ops --out results [--device auto|cpu|cuda]

Without a CUDA card the same code runs on the CPU in a small size, and says which checks that leaves out. Exit code 1 when a check
fails.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import device_ops
import device_zero

# (device, folder) → figures, with the outcome of each check under "checks"
SECTIONS = {"zero": device_zero.run, "ops": device_ops.run}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", required=True, choices=SECTIONS)
    parser.add_argument("--out", type=Path, required=True, help="folder for <section>.json and traces")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    there = torch.cuda.is_available()
    if arguments.device == "cuda" and not there:
        print("--device cuda: torch sees no CUDA device; set --device cpu to try the script in a small size.", file=sys.stderr)
        return 2
    device = torch.device("cpu" if arguments.device == "cpu" or not there else "cuda")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    arguments.out.mkdir(parents=True, exist_ok=True)
    figures = {"device": name, "torch": torch.__version__} | SECTIONS[arguments.section](device, arguments.out)
    target = arguments.out / f"{arguments.section}.json"
    target.write_text(json.dumps(figures, indent=1) + "\n")
    for check, passed in figures["checks"].items():
        print(f"{'not on this device' if passed is None else 'passed' if passed else 'FAILED':>18}  {check}")
    print(f"figures in {target}")
    return 1 if False in figures["checks"].values() else 0


if __name__ == "__main__":
    sys.exit(main())
