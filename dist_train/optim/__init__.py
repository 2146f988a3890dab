"""Layer 7: optimizers over flat segments, learning rates and the loss scale."""

from dist_train.optim.flat import SGD, Adam, AdamW

__all__ = ["SGD", "Adam", "AdamW"]
