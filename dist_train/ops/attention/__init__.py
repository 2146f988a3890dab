"""Causal scaled-dot-product attention with isolated documents and grouped key/value heads, on the best kernel there is.

Shapes: B rows, T queries, S keys, N query heads, K key/value heads (N a multiple of K, GQA arXiv:2305.13245), H head width.

Three rules hold on every backend. The last query sees the last key, so T < S (decoding with a cache) needs no mask. A key
outside a query's document weighs exactly zero. A query that sees no key gives zero, and zero gradient, never nan.

    api         attention, attention_with_lse, and the forward and backward of a chunk for context parallelism
    select      which backend serves a request, and why not the ones before it: a pure function
    documents   the documents of packed rows, as masks and as lengths
    reference   the formula spelled out
    cpu, cuda   kernels, behind one operator that autograd, recompute and torch.compile know (op)
"""

from dist_train.ops.attention.api import attention, attention_with_lse, flash_backward, flash_forward
from dist_train.ops.attention.documents import Documents, causal_mask, document_mask, prepare_documents
from dist_train.ops.attention.select import WANTED

__all__ = [
    "WANTED",
    "Documents",
    "attention",
    "attention_with_lse",
    "causal_mask",
    "document_mask",
    "flash_backward",
    "flash_forward",
    "prepare_documents",
]
