"""The held-out loss: every row once, over all ranks, divided once by the tokens that counted."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from dist_train.model.generate import generate
from dist_train.train.build import Run


@dataclass(frozen=True)
class Evaluation:
    loss: float  # nats per token
    bits_per_byte: float  # of UTF-8 text
    tokens: int


def evaluate(run: Run) -> Evaluation | None:
    """Collective; equal on every rank for any number of ranks. None when a rank was asked to stop before the end."""
    sums = torch.zeros(2, dtype=torch.float64, device=run.mesh.device)  # Σ cross entropy, live tokens
    run.model.eval()
    try:
        for micro in run.evaluation:
            stop = torch.tensor(float(run.requests.poll().stop), device=run.mesh.device)
            run.comm.all_reduce(stop, run.mesh.world, op="max").wait()
            if stop > 0:
                return None
            micro = micro.to(run.mesh.device)
            with torch.no_grad():
                inputs = (micro.tokens_BT, micro.positions_BT, micro.documents_BT)
                sums[0] += run.model(*inputs, labels_BT=micro.labels_BT)[1]
            sums[1] += micro.live_tokens
    finally:
        run.model.train()
    run.comm.all_reduce(sums, run.mesh.data).wait()
    total, tokens = sums.tolist()
    loss = total / tokens if tokens else float("nan")
    return Evaluation(loss, loss / math.log(2) / run.corpus.bytes_per_token, int(tokens))


def sample_text(run: Run) -> str:
    """Text that the model writes now, over the ends of documents. Every rank writes it: sharded parameters must be gathered."""
    tokenizer, count = run.corpus.tokenizer, run.config.observe.sample_tokens
    prompt = tokenizer.encode(run.config.observe.sample_prompt) if run.config.observe.sample_prompt else first_tokens(run)
    new = generate(run.model, prompt, count, 0.8, 0.95, run.state.step, None, vocab=tokenizer.vocab_size)
    return f"{tokenizer.decode(prompt)} ⟶ {tokenizer.decode(new)}"


def first_tokens(run: Run, count: int = 12) -> list[int]:
    """The beginning of the held-out text, or of the training text where nothing is held out."""
    splits = [*run.corpus.evaluation, *run.corpus.train]
    tokens = next(split.tokens for split in splits if len(split.tokens) > 1)
    return [int(token) for token in tokens[: min(count, max(1, len(tokens) // 2))]]
