"""Layer 5: rows too long for one rank, over several (context parallelism).

split      which tokens of a row a rank has
visible    which queries of one rank see which keys of another
ring       attention with keys and values that go round
ulysses    attention with heads exchanged for tokens
apply      a model, made to run on it
"""

from dist_train.context.apply import KINDS, apply_context
from dist_train.context.split import Split, split_micro_batch

__all__ = ["KINDS", "Split", "apply_context", "split_micro_batch"]
