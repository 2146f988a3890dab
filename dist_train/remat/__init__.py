"""Layer 5: recompute activations in backward instead of keeping them."""

from dist_train.remat.policy import apply_remat

__all__ = ["apply_remat"]
