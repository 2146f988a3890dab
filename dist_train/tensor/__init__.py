"""Layer 5: tensor and sequence parallelism: layers that several ranks share, and the one function that puts them into a model."""

from dist_train.tensor.apply import apply_tensor_plan, defer_weight_gradients
from dist_train.tensor.check import check_states
from dist_train.tensor.deferred import WeightGradients
from dist_train.tensor.stream import stream_shape

__all__ = ["WeightGradients", "apply_tensor_plan", "check_states", "defer_weight_gradients", "stream_shape"]
