"""Context parallelism for a model: its attention cores and what prepares its documents are replaced, nothing else."""

from __future__ import annotations

from functools import partial
from typing import cast

from dist_train.comm.collectives import Collectives
from dist_train.context.ring import RingCore, prepare_ring
from dist_train.context.ulysses import UlyssesCore, prepare_ulysses, require_heads
from dist_train.mesh.mesh import Group
from dist_train.model.attention import Attention, AttentionCore
from dist_train.model.transformer import Transformer

KINDS = ("ring", "ulysses")


def apply_context(model: Transformer, group: Group, kind: str, comm: Collectives) -> None:
    """Let `model` compute rows whose tokens lie on the ranks of `group`, as `split_micro_batch` gives them.

    `kind`: "ring" (keys travel, any number of heads, no dropout of attention) or "ulysses" (heads are exchanged for tokens).
    Parameters stay as they are: each rank's gradients are those of its tokens, and sum up over the group. A call without
    documents, as generation makes it, reads whole rows on each rank. A group of size 1 leaves the model as it is. Works before or
    after a model was split for tensor parallelism. Raises ValueError for what the kind cannot do.
    """
    if kind not in KINDS:
        raise ValueError(f"context={kind}: no such kind of context parallelism. Choose one of: {', '.join(KINDS)}.")
    if group.size == 1:
        return
    config = model.config
    if kind == "ulysses":
        require_heads(config.heads, config.kv_heads, group.size)
        model.prepare_documents = partial(prepare_ulysses, group)  # type: ignore[assignment]
    elif config.dropout:
        raise ValueError(
            f"model.dropout={config.dropout:g} with context=ring: probabilities of attention cannot be dropped part by part. "
            "Set context=ulysses, or model.dropout=0."
        )
    else:
        model.prepare_documents = partial(prepare_ring, group)  # type: ignore[assignment]
    for block in model.blocks.children():
        attention = cast(Attention, block.attention)
        attention.core = _core(attention.core, group, kind, comm)


def _core(old: AttentionCore, group: Group, kind: str, comm: Collectives) -> AttentionCore:
    if kind == "ring":
        return RingCore(old.backend, group, comm)
    return UlyssesCore(old.backend, old.dropout, group, comm)
