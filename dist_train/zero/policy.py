"""What is sharded over data ranks, and in which dtype each role is kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ShardPolicy:
    """The ZeRO stage as three facts (arXiv:1910.02054): which of a bucket's tensors exist only as this rank's slice."""

    optim: bool = False
    grad: bool = False
    param: bool = False

    def __post_init__(self) -> None:
        if (self.param and not self.grad) or (self.grad and not self.optim):
            raise ValueError(f"{self}: sharded parameters need sharded gradients, and those a sharded optimizer.")

    @classmethod
    def from_stage(cls, stage: int) -> ShardPolicy:
        """Stage 0 replicates everything; 1, 2 and 3 shard optimizer state, then gradients, then parameters."""
        return cls(optim=stage >= 1, grad=stage >= 2, param=stage >= 3)


@dataclass(frozen=True)
class Precision:
    """Dtypes by role. `compute=None` leaves each parameter in its own dtype."""

    compute: torch.dtype | None = None
    grad: torch.dtype = torch.float32  # micro-batch gradients accumulate in this
    reduce: torch.dtype = torch.float32  # gradients travel in this; bf16 rounds at every hop
    master: torch.dtype = torch.float32  # the weights that the optimizer updates
    split: bool = False  # fp32 masters as the bf16 weight and the 16 bits that it lacks: 4 bytes for both instead of 6

    def __post_init__(self) -> None:
        if self.split and (self.compute, self.master) != (torch.bfloat16, torch.float32):
            raise ValueError(f"{self}: a split master is the high half of an fp32 number as the bf16 weight; set compute=bf16.")
