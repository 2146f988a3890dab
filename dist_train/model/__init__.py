"""Layer 4: the language models: plain modules on one device that know nothing of ranks."""

from dist_train.model.build import build_model, empty_model
from dist_train.model.flops import flops_per_token, parameter_count
from dist_train.model.generate import generate
from dist_train.model.transformer import Transformer

__all__ = ["Transformer", "build_model", "empty_model", "flops_per_token", "generate", "parameter_count"]
