"""Text from a model, one token at a time.

The window: a model sees at most its `max_positions` last tokens. A longer prompt loses its beginning. When the window is
full, its older half is dropped and the newer half is read again from position 0, so a long text costs one full pass each
`max_positions / 2` tokens. What the model sees is thus a function of the tokens alone, with the cache or without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dist_train.config.compose import ConfigError
from dist_train.model.attention import LayerCache
from dist_train.model.transformer import Transformer


def generate(
    model: Transformer,
    tokens: list[int],
    count: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    eos: int | None = None,
    *,
    vocab: int | None = None,
    cached: bool = True,
    forward: Callable[..., Tensor] | None = None,
) -> list[int]:
    """At most `count` new tokens after the prompt `tokens`; stops before `eos`. An empty prompt starts from `eos`.

    `temperature` 0 takes the likeliest token and needs no seed; above, tokens are drawn from the smallest set that holds
    `top_p` of the probability (arXiv:1904.09751), by a generator of its own seeded with `seed`. `vocab` keeps ids below it
    when the tokenizer has fewer than the model has rows. `cached=False` runs the whole window for each token: slow, equal.
    `forward` runs the model where it lies on several ranks, and is called as the model would be. Raises ConfigError for a value
    out of range.
    """
    tokens = _checked_prompt(model, tokens, count, temperature, top_p, eos)
    generator = torch.Generator().manual_seed(seed)
    window = _Window(model, forward or model, tokens, count, cached)
    result: list[int] = []
    with torch.no_grad(), _evaluating(model):
        while len(result) < count:
            token = choose_token(window.logits()[:vocab], temperature, top_p, generator)
            if token == eos:
                break
            result.append(token)
            window.append(token)
    return result


def choose_token(logits_V: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One token id drawn from fp32 logits on the CPU; see `generate`."""
    if temperature == 0.0:
        return int(logits_V.argmax())
    probabilities_V, order_V = (logits_V / temperature).softmax(-1).sort(descending=True, stable=True)
    # The mass before a token decides, so the likeliest always stays.
    beyond_V = probabilities_V.cumsum(-1) - probabilities_V >= top_p
    return int(order_V[torch.multinomial(probabilities_V.masked_fill(beyond_V, 0.0), 1, generator=generator)])


class _Window:
    """The tokens a model sees, and the caches of those it has already read."""

    def __init__(self, model: Transformer, forward: Callable[..., Tensor], tokens: list[int], count: int, cached: bool) -> None:
        self.model, self.forward, self.cached = model, forward, cached
        self.device = next(model.parameters()).device
        self.limit = model.config.max_positions
        self.capacity = min(self.limit, len(tokens) + count)
        self.tokens = tokens[-self.limit :]
        self.caches: list[LayerCache] = []
        self.read = 0  # tokens of the window that are in the caches

    def append(self, token: int) -> None:
        self.tokens.append(token)
        if len(self.tokens) > self.limit:
            self.tokens = self.tokens[-max(1, self.limit // 2) :]
            self.caches, self.read = [], 0

    def logits(self) -> Tensor:
        """logits_V after the last token, fp32 on the CPU."""
        start = self.read if self.cached else 0
        tokens_1T = torch.tensor([self.tokens[start:]], device=self.device)
        positions_1T = torch.arange(start, len(self.tokens), device=self.device)[None]
        if self.cached and not self.caches:
            self.caches = [LayerCache(self.capacity) for _ in range(self.model.config.layers)]
        logits_1TV = self.forward(tokens_1T, positions_1T, caches=self.caches if self.cached else None)
        self.read = len(self.tokens)
        return logits_1TV[0, -1].float().cpu()


def _checked_prompt(
    model: Transformer, tokens: list[int], count: int, temperature: float, top_p: float, eos: int | None
) -> list[int]:
    if count < 0:
        raise ConfigError(f"tokens={count}: the number of tokens to generate cannot be negative.")
    if not 0.0 <= temperature < float("inf"):
        raise ConfigError(f"temperature={temperature}: must be 0 (the likeliest token) or a number above it.")
    if not 0.0 < top_p <= 1.0:
        raise ConfigError(f"top_p={top_p}: must be above 0 and at most 1, which keeps every token.")
    if not tokens and eos is None:
        raise ConfigError("prompt='': an empty prompt needs an end-of-document token to start from; give some text.")
    tokens = tokens or [int(eos or 0)]
    vocab = model.config.vocab
    if bad := [token for token in tokens if not 0 <= token < vocab]:
        raise ConfigError(f"prompt: token id {bad[0]} is outside the model's {vocab} ids; use the tokenizer of its own run.")
    return list(tokens)


@contextmanager
def _evaluating(model: Transformer) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
