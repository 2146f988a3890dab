"""The life of a run: steps, and between them evaluation, samples, checkpoints and the wish to stop."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from typing import Any

import torch

from dist_train.data.show import render_rows
from dist_train.model.flops import flops_per_token, parameter_count
from dist_train.observe.flops import peak_flops
from dist_train.observe.memory import peak_bytes
from dist_train.pipeline.timeline import ideal_bubble
from dist_train.train.build import Run, save_checkpoint
from dist_train.train.evaluate import evaluate, sample_text
from dist_train.train.start_checks import prove_isolation
from dist_train.train.step import StepFacts, train_step

DONE, PREEMPTED = 0, 75


class Loop:
    """Drives one run to its end. `run()` returns the exit code: 0 when done, 75 when stopped after saving."""

    def __init__(self, run: Run) -> None:
        self.r = run
        self.seconds: dict[str, float] = defaultdict(float)  # by phase
        self.saved_step = run.state.step if run.start is not None and run.start.own else -1
        self.first_step = run.state.step
        self.stopping = False
        self._flops_per_token = flops_per_token(run.config.model, run.config.train.seq_len)
        peak = peak_flops(run.mesh.device, run.config.observe.peak_tflops)
        self._peak_flops = None if peak is None else peak * run.mesh.world.size

    def run(self) -> int:
        r, config = self.r, self.r.config
        with _GcOff(config.train.gc_every > 0):
            self._start()
            while r.state.step < config.train.steps and not self.stopping:
                self._step()
                if self._due(config.train.eval_every) and not self.stopping:
                    self._evaluate()
                if self._due(config.checkpoint.every):
                    self._save()
            if r.state.evaluated_step != r.state.step and not self.stopping:
                self._evaluate()
            if self.saved_step != r.state.step:
                self._save()
        stopped = self.stopping and r.state.step < config.train.steps
        idle = self.saved_step == self.first_step == r.state.step and r.start is not None and r.start.own
        r.observer.close(None if idle else self._summary("preempted" if stopped else "done"))  # a done run keeps its summary
        return PREEMPTED if stopped else DONE

    def _due(self, every: int) -> bool:
        return every > 0 and self.r.state.step % every == 0

    def _start(self) -> None:
        r, started = self.r, time.perf_counter()
        if not len(r.evaluation):
            r.observer.note("no held-out text, so there is no evaluation: the corpus is small, or data.eval_fraction=0.")
        first = r.batches.at(r.state.samples)[0]
        r.observer.first_batch(render_rows(first, r.corpus.tokenizer))
        if r.mesh.cp.size == 1:  # (else rows lie on several ranks, and this one does not)
            prove_isolation(r.model, r.executor.logits, first.tokens_BT[0].to(r.mesh.device), r.config.model.vocab)
        r.traffic.reset()
        r.traffic.active = False
        self.seconds["start"] += time.perf_counter() - started

    def _step(self) -> None:
        r, started = self.r, time.perf_counter()
        r.traffic.active = True  # what a step costs: evaluation and saving are not part of it
        facts = train_step(r)
        r.traffic.active = False
        if r.config.train.gc_every and r.state.step % r.config.train.gc_every == 0:
            gc.collect()
        elapsed = time.perf_counter() - started
        self.seconds["train"] += elapsed
        if facts.exposed_seconds is not None:
            self.seconds["exposed_communication"] += facts.exposed_seconds
        r.observer.step(self._record(facts, elapsed))
        self.stopping = self.stopping or facts.stop
        if facts.save:
            self._save()
            r.requests.saved()

    def _record(self, facts: StepFacts, elapsed: float) -> dict[str, Any]:
        train = self.r.config.train
        tokens = train.global_batch * train.seq_len
        flops = self._flops_per_token * tokens / elapsed
        return {
            "step": self.r.state.step,
            "loss": facts.loss,
            "grad_norm": facts.grad_norm,
            "lr": facts.lr,
            "loss_scale": facts.loss_scale,
            "skipped": facts.skipped,
            "tokens": tokens,
            "live_tokens": facts.live_tokens,
            "step_seconds": elapsed,
            "tokens_per_second": tokens / elapsed,
            "model_flops_per_second": flops,
            "mfu": None if self._peak_flops is None else flops / self._peak_flops,
            "memory_peak_bytes": peak_bytes(self.r.mesh.device),
            "input_min": facts.input_min,
            "input_max": facts.input_max,
        }

    def _evaluate(self) -> None:
        r, started = self.r, time.perf_counter()
        found = evaluate(r)
        if found is None:
            self.stopping = True
        elif found.tokens:
            state = r.state
            state.eval_loss, state.evaluated_step = found.loss, state.step
            if state.best_loss is None or found.loss < state.best_loss:
                state.best_loss, state.best_step = found.loss, state.step
            r.observer.evaluation(state.step, found.loss, found.bits_per_byte)
            if r.config.observe.sample_tokens:
                r.observer.sample(state.step, sample_text(r))
        self.seconds["evaluate"] += time.perf_counter() - started

    def _save(self) -> None:
        r, started = self.r, time.perf_counter()
        if self.saved_step != r.state.step:
            save_checkpoint(r)
            self.saved_step = r.state.step
        self.seconds["checkpoint"] += time.perf_counter() - started

    def _summary(self, status: str) -> dict[str, Any]:
        r = self.r
        return {
            "status": status,
            "final_loss": r.state.loss,
            "eval_loss": r.state.eval_loss,
            "best": {"step": r.state.best_step, "eval_loss": r.state.best_loss},
            "steps": r.state.step,
            "skipped": r.state.skipped,
            "layout": {**r.layout, "ranks": r.mesh.world.size, "device": str(r.mesh.device)},
            "parameters": parameter_count(r.config.model),
            "tokens": r.state.tokens,
            "live_tokens": r.state.live_tokens,
            "pipeline": self._pipeline(),
            "comm": r.traffic.per_step(r.state.step - self.first_step),
            "memory": {
                "predicted": r.engine.predicted_bytes(),
                "measured": r.engine.held_bytes(),
                "peak_bytes": peak_bytes(r.mesh.device),
            },
            "seconds": dict(self.seconds),
            "measured_steps": [self.first_step + 1, r.state.step],  # those that comm and seconds are of: the last process's
            "run_dir": str(r.run_dir),
        }

    def _pipeline(self) -> dict[str, Any]:
        """The schedule and its bubble: the share of all ranks' time in which they did not compute. Collective."""
        r = self.r
        r.executor.read_clocks()
        times = torch.tensor([r.executor.busy_seconds, r.executor.step_seconds], dtype=torch.float64, device=r.mesh.device)
        r.comm.all_reduce(times, r.mesh.world).wait()
        busy, elapsed = times.tolist()
        schedule = r.executor.schedule(len(r.batches), True)
        measured = 1 - busy / elapsed if elapsed else 0.0
        return {"schedule": schedule.name, "bubble": measured, "bubble_by_formula": ideal_bubble(schedule)}


class _GcOff:
    """Python's cyclic collector out of the step: what stands at the start is never scanned again, and no rank stalls the
    others by collecting when it likes. The loop collects on all ranks together."""

    def __init__(self, active: bool) -> None:
        self._active = active

    def __enter__(self) -> None:
        if self._active:
            gc.collect()
            gc.freeze()
            gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._active:
            gc.enable()
            gc.unfreeze()
