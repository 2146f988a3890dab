"""AdamW whose moments take a byte each, scaled by blocks of 256 elements (arXiv:2110.02861): 2.03 bytes of state an element.

A code is the top of the bits of a small float: of |x| ÷ (largest |x| of its block), which is at most 1, the exponent and the
first bits of the mantissa. Steps are so relative to the value, as in the paper's dynamic map, but there is no table to look
in: integer operations on the bits of fp32 make and read codes exactly, with the same result on every device.

    exp_avg       int8   sign, 8 codes for each power of two: 1 to 2^-16 of the block's largest; what is smaller becomes 0
    exp_avg_sq    uint8  16 codes for each power of two: 1 to 2^-16 (1 to 1/256 in the update's denominator); what is smaller but
                         not 0 becomes the smallest code, as a zero would let a small numerator make a huge update
    *_scale       fp32   the largest |x| of each block

Codes are rounded at random, without bias. A moving average changes by 1 - beta a step: less than half the distance of two
codes, so rounding to the nearest would hold it where it is, or let it only grow. The dice are a hash of the value's own bits and
the count of updates, hence the same on any layout and after any resume.

A block is never cut (`Cut(block=256)`), since all its elements share a scale. One kernel (csrc/optim) decodes,
updates and encodes; the functions here are its reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dist_train.ops import library
from dist_train.ops.optim import Run
from dist_train.optim.flat import AdamW, FlatAdam
from dist_train.zero.layout import Cut
from dist_train.zero.protocol import BoundOptimizer, FlatSegment

BLOCK = 256  # elements
# Elements that are fp32 at a time. On CPU they stay in cache, and one thread does them: where threads would divide the work
# vector loops have tails, which may round differently, and where tails lie depends on the stage.
_CHUNK = {"cpu": 1 << 15, "cuda": 1 << 22}
_ONE = 127  # the exponent field of 1.0 in fp32
_SHIFT = {torch.int8: 20, torch.uint8: 19}  # bits of an fp32 mantissa that a code leaves out
_TOP = {torch.int8: 127, torch.uint8: 255}  # the code of 1.0
_GOLDEN = 0x9E3779B1 - (1 << 32)  # Knuth's multiplicative hash, 2^32 ÷ golden ratio, as int32


class AdamW8bit(AdamW):
    """`AdamW` with moments of 8 bits. Masters must be fp32, which `bind` checks (ValueError)."""

    def cut(self, group: str) -> Cut:
        return Cut(block=BLOCK)

    def state_bytes(self, group: str, master_bytes: int) -> float:
        return 2 * (1 + 4 / BLOCK)

    def bind(self, segments: Sequence[FlatSegment]) -> BoundOptimizer:
        for segment in segments:
            if segment.master.dtype != torch.float32:
                raise ValueError(f"AdamW8bit: masters are {segment.master.dtype} and must be fp32; set precision.master=fp32.")
        return _AdamW8bit(self, segments)


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """The fp32 values of `codes`, flat int8 or uint8, a multiple of 256 of them; `scales` fp32, one for each 256."""
    shift = _SHIFT[codes.dtype]
    bits = codes.to(torch.int32).abs_().add_((_ONE << (23 - shift)) - _TOP[codes.dtype]).bitwise_left_shift_(shift)
    values = bits.view(torch.float32).mul_(codes.sign())
    values.view(-1, BLOCK).mul_(scales[:, None])
    return values


def quantize(values: Tensor, dtype: torch.dtype, step: Tensor) -> tuple[Tensor, Tensor]:
    """(codes, scales) of flat fp32 `values`, a multiple of 256 of them: `dtype` int8, or uint8 for values that are not negative.

    A value is rounded up or down by chance, as near as it lies to each; `step`, a scalar, throws the dice anew.
    """
    shift, top = _SHIFT[dtype], _TOP[dtype]
    blocks = values.view(-1, BLOCK)
    scales = blocks.abs().amax(1).clamp_(min=torch.finfo(torch.float32).tiny)
    unit = (blocks / scales[:, None]).flatten()
    dice = (unit.view(torch.int32) + step.to(torch.int32)).mul_(_GOLDEN).bitwise_and_((1 << shift) - 1)
    bits = unit.abs().view(torch.int32).add_(dice).bitwise_right_shift_(shift).sub_((_ONE << (23 - shift)) - top)
    bits.clamp_(min=0 if dtype == torch.int8 else 1)
    return bits.to(dtype).mul_(unit.sign().to(dtype)), scales  # (zero has sign zero)


class _AdamW8bit(FlatAdam):
    alignment = BLOCK

    def _new_state(self, segment: FlatSegment) -> dict[str, Tensor]:
        numel = segment.master.numel()
        blocks = numel // BLOCK
        return {
            "exp_avg": segment.zeros("exp_avg", numel, torch.int8),
            "exp_avg_sq": segment.zeros("exp_avg_sq", numel, torch.uint8),
            "exp_avg_scale": segment.zeros("exp_avg_scale", blocks, torch.float32),
            "exp_avg_sq_scale": segment.zeros("exp_avg_sq_scale", blocks, torch.float32),
        }

    def _launch(self, runs: Sequence[Run], lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        o = self._adam
        for run in runs:
            if o.fused and library.usable(run.master, run.grad, run.copy):
                options = (lr, o.beta1, o.beta2, o.eps, run.weight_decay)
                tensors = (run.master, run.grad, *run.moments, run.copy, run.step)
                torch.ops.dist_train.adamw8bit_(*tensors, grad_scale, found_inf, *options)
            else:
                self._launch_reference(run, lr, grad_scale, found_inf)

    def _launch_reference(self, run: Run, lr: float, grad_scale: Tensor, found_inf: Tensor) -> None:
        chunk, skip = _CHUNK["cuda" if run.master.is_cuda else "cpu"], found_inf > 0
        codes, scales = run.moments[:2], run.moments[2:]
        for start in range(0, run.master.numel(), chunk):
            part, blocks = slice(start, start + chunk), slice(start // BLOCK, (start + chunk) // BLOCK)
            held = [(code[part], scale[blocks]) for code, scale in zip(codes, scales, strict=True)]
            wide = [dequantize(code, scale) for code, scale in held]
            chunk_run = Run(run.master[part], run.grad[part], wide, run.step, run.weight_decay)
            super()._launch([chunk_run], lr, grad_scale, found_inf)
            for values, (code, scale) in zip(wide, held, strict=True):
                for old, new in zip((code, scale), quantize(values, code.dtype, run.step), strict=True):
                    old, new = old.view(torch.int32), new.view(torch.int32)  # four codes at once
                    old.copy_(torch.where(skip, old, new))
        if run.copy is not None:
            run.copy.copy_(run.master)


if library.loaded:
    torch.library.register_fake("dist_train::adamw8bit_", lambda *_args: None)
