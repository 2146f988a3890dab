"""Layer 7: optimizers over flat segments, learning rates and the loss scale."""

from dist_train.optim.blocks import AdamW8bit
from dist_train.optim.flat import SGD, Adam, AdamW
from dist_train.optim.lamb import Lamb
from dist_train.optim.muon import Muon

__all__ = ["SGD", "Adam", "AdamW", "AdamW8bit", "Lamb", "Muon"]
