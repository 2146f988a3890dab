"""What a block keeps for backward, and what it computes again (Chen et al., arXiv:1604.06174).

    none        everything is kept
    selective   outputs of matrix products and of fused attention are kept, the cheap rest is computed again
    full        only the block's input is kept, the whole block runs again

Recompute is exact: torch's non-reentrant checkpoint replays the random state, so dropout masks, and with them every
bit of every gradient, are those of "none".
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dist_train.config.compose import ConfigError
from dist_train.ops.attention.op import flash_attention
from dist_train.ops.kept import Keeper

POLICIES = ("none", "selective", "full")

_aten = torch.ops.aten
_KEPT = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        flash_attention,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
    }
)


def apply_remat(model: nn.Module, policy: str) -> None:
    """Set the policy of every module in `model.blocks`; may be called again to change it. Raises ConfigError.

    A block's `forward` is wrapped, not the block: parameter names stay, and hooks on the block run once in forward and
    not again in the recompute.
    """
    if policy not in POLICIES:
        raise ConfigError(f"remat={policy}: no such policy. Choose one of: {', '.join(POLICIES)}.")
    for block in model.get_submodule("blocks").children():
        block.__dict__.pop("forward", None)
        if policy != "none":
            block.forward = partial(_recomputed, block.forward, policy == "selective")  # type: ignore[method-assign]


def _recomputed(forward: Any, selective: bool, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if not selective:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)
    if not torch.compiler.is_compiling():  # what the compiler sees are single operations
        forward = partial(Keeper().run, forward)
    return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts, **kwargs)


def _contexts() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(_choose)


def _choose(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
