"""Layer 8: what a run shows of itself: metrics, TensorBoard, the terminal, warnings. Only the main rank writes."""

from __future__ import annotations

from dist_train.observe.flops import peak_flops
from dist_train.observe.memory import peak_bytes
from dist_train.observe.observer import Observer

__all__ = ["Observer", "peak_bytes", "peak_flops"]
