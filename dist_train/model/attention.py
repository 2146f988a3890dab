"""The attention layer: project, rotate, attend, project back. Shapes: see transformer.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from dist_train.config.schema import ModelConfig
from dist_train.model.fan_out import FanOut
from dist_train.ops.attention import attention
from dist_train.ops.rotary import rotary_pair

if TYPE_CHECKING:
    from dist_train.model.transformer import Context


class LayerCache:
    """Keys and values of the tokens one layer has seen while generating: 2·B·K·capacity·H elements, taken at the first."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0

    def append(self, k_BKTH: Tensor, v_BKTH: Tensor) -> tuple[Tensor, Tensor]:
        """Store T more tokens; views of all S seen so far."""
        if self.length == 0:  # they know the dtype and the device, which parameters that are sharded or cast do not
            rows, heads, _, width = k_BKTH.shape
            self.keys_BKSH, self.values_BKSH = (x.new_empty(rows, heads, self.capacity, width) for x in (k_BKTH, v_BKTH))
        start, self.length = self.length, self.length + k_BKTH.size(2)
        self.keys_BKSH[:, :, start : self.length] = k_BKTH
        self.values_BKSH[:, :, start : self.length] = v_BKTH
        return self.keys_BKSH[:, :, : self.length], self.values_BKSH[:, :, : self.length]


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, backend: str, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.head_width = config.hidden // config.heads
        self.q = nn.Linear(config.hidden, config.heads * self.head_width, config.bias)
        self.k = nn.Linear(config.hidden, config.kv_heads * self.head_width, config.bias)
        self.v = nn.Linear(config.hidden, config.kv_heads * self.head_width, config.bias)
        self.out = nn.Linear(config.heads * self.head_width, config.hidden, config.bias)
        self.project = FanOut()
        self.core = AttentionCore(backend, config.dropout)

    def forward(self, x_BTD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        projected = self.project(x_BTD, self.q, self.k, self.v)
        q_BTNH, k_BTKH, v_BTKH = (self.split_heads(x_BTD, context.shape) for x_BTD in projected)
        if context.rotation is not None:
            q_BTNH, k_BTKH = rotary_pair(q_BTNH, k_BTKH, *context.rotation, self.fused)

        q_BNTH, k_BKSH, v_BKSH = q_BTNH.transpose(1, 2), k_BTKH.transpose(1, 2), v_BTKH.transpose(1, 2)
        if cache is not None:
            k_BKSH, v_BKSH = cache.append(k_BKSH, v_BKSH)
        o_BNTH = self.core(q_BNTH, k_BKSH, v_BKSH, context)
        return self.out(o_BNTH.transpose(1, 2).flatten(2))

    def split_heads(self, x_BTD: Tensor, shape: tuple[int, int]) -> Tensor:
        rows, tokens = shape
        if x_BTD.dim() == 2:  # tokens in a line, perhaps with padding behind them
            x_BTD = x_BTD[: rows * tokens]
        return x_BTD.view(rows, tokens, -1, self.head_width)


class AttentionCore(nn.Module):
    """Attention proper, without weights: a module so that it can be watched, or replaced where keys live on other ranks."""

    def __init__(self, backend: str, dropout: float) -> None:
        super().__init__()
        self.backend, self.dropout = backend, dropout

    def forward(self, q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, context: Context) -> Tensor:
        return attention(q_BNTH, k_BKSH, v_BKSH, context.documents, self.dropout if self.training else 0.0, self.backend)
