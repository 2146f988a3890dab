"""The held-out loss: every row once, over all ranks, divided once by the tokens that counted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from dist_train.context.split import split_micro_batch
from dist_train.data.batch import MicroBatch
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
        mine = (split_micro_batch(rows, run.mesh.cp) for rows in run.evaluation)
        for micro_batches in _groups(mine, run.mesh.pp.size):
            stop = torch.tensor(float(run.requests.poll().stop), device=run.mesh.device)
            run.comm.all_reduce(stop, run.mesh.world, op="max").wait()
            if stop > 0:
                return None
            sums[0] += run.executor.evaluate([micro.to(run.mesh.device) for micro in micro_batches])
            sums[1] += sum(micro.live_tokens for micro in micro_batches) if run.mesh.speaks else 0
    finally:
        run.model.train()
    run.comm.all_reduce(sums, run.mesh.world).wait()
    total, tokens = sums.tolist()
    loss = total / tokens if tokens else float("nan")
    return Evaluation(loss, loss / math.log(2) / run.corpus.bytes_per_token, int(tokens))


def _groups(batches: Iterable[MicroBatch], size: int) -> Iterator[list[MicroBatch]]:
    """As many at a time as fill a pipeline."""
    left = iter(batches)
    while group := list(itertools.islice(left, size)):
        yield group


def sample_text(run: Run) -> str:
    """Text that the model writes now, over the ends of documents. Every rank writes it: sharded parameters must be gathered."""
    tokenizer, count = run.corpus.tokenizer, run.config.observe.sample_tokens
    prompt = tokenizer.encode(run.config.observe.sample_prompt) if run.config.observe.sample_prompt else first_tokens(run)
    vocab, forward = tokenizer.vocab_size, run.executor.logits
    new = generate(run.model, prompt, count, 0.8, 0.95, run.state.step, None, vocab=vocab, forward=forward)
    return f"{tokenizer.decode(prompt)} ⟶ {tokenizer.decode(new)}"


def first_tokens(run: Run, count: int = 12) -> list[int]:
    """The beginning of the held-out text, or of the training text where nothing is held out."""
    splits = [*run.corpus.evaluation, *run.corpus.train]
    tokens = next(split.tokens for split in splits if len(split.tokens) > 1)
    return [int(token) for token in tokens[: min(count, max(1, len(tokens) // 2))]]
