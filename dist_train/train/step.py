"""One training step: the page a reader prints.

The loss of a step is Σ token losses ÷ live tokens of the whole global batch. Each micro-batch therefore back-propagates a
*sum* over its tokens, and the engine divides once, by the live tokens that all data ranks saw in all micro-batches. How the
batch was split cannot show. (`scale` only keeps the sums near 1, where fp16 is at home; it cancels.)
"""

from __future__ import annotations

from dataclasses import dataclass

from dist_train.context.split import split_micro_batch
from dist_train.optim.lr import learning_rate
from dist_train.train.build import Run


@dataclass(frozen=True)
class StepFacts:
    """What happened in a step, equal on every rank."""

    loss: float  # nan when no token was live
    grad_norm: float
    lr: float
    loss_scale: float
    skipped: bool
    live_tokens: int
    stop: bool  # some rank was asked to stop
    save: bool  # some rank was asked for a checkpoint
    exposed_seconds: float | None  # time this rank's host waited for communication; None: the engine cannot tell
    input_min: int  # smallest and largest token id of this rank's micro-batches
    input_max: int


def train_step(run: Run) -> StepFacts:
    config, state, engine = run.config, run.state, run.engine
    lr = learning_rate(state.step, config.lr, config.optim.lr, config.train.steps)
    engine.loss_scale = state.loss_scale.scale
    scale = 1.0 / (config.train.global_batch * config.train.seq_len)

    micro_batches = [split_micro_batch(rows, run.mesh.cp) for rows in run.batches.at(state.samples)]
    entropy = run.executor.train([micro.to(run.mesh.device) for micro in micro_batches], scale, config.train.z_loss)
    live = sum(micro.live_tokens for micro in micro_batches)

    asked = run.requests.poll()
    update = state.step + 1 not in run.skipped_steps
    report = engine.step(
        lr, weight=live * scale, sums=(entropy, live if run.mesh.speaks else 0, asked.stop, asked.save), update=update
    )

    total_loss, total_live, stop, save = report.sums.tolist()  # the one read of the device in a step
    skipped = bool(report.skipped)
    facts = StepFacts(
        loss=total_loss / total_live if total_live else float("nan"),
        grad_norm=float(report.grad_norm),
        lr=lr,
        loss_scale=state.loss_scale.scale,
        skipped=skipped,
        live_tokens=int(total_live),
        stop=stop > 0,
        save=save > 0,
        exposed_seconds=report.exposed_seconds,
        input_min=min(int(micro.tokens_BT.min()) for micro in micro_batches),
        input_max=max(int(micro.tokens_BT.max()) for micro in micro_batches),
    )
    if total_live:  # a step without tokens says nothing about overflow
        state.loss_scale.update(finite=bool(report.finite))
    state.step += 1
    state.samples += config.train.global_batch
    state.tokens += config.train.global_batch * config.train.seq_len
    state.live_tokens += facts.live_tokens
    state.skipped += skipped
    state.loss = facts.loss
    return facts
