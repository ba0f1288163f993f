"""The training loop."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import trainable_candle as tc
from trainable_candle.errors import NonFiniteError
from trainable_candle.train import state as run_state
from trainable_candle.train.interrupt import InterruptGuard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainable_candle import Tensor, Var
    from trainable_candle.train.callbacks import Callback

Batch = TypeVar("Batch", contravariant=True)
BatchOut = TypeVar("BatchOut", covariant=True)


class BatchSource(Protocol[BatchOut]):
    """Batches by number: the same number always gives the same batch, so a run can continue anywhere."""

    def batch(self, index: int) -> BatchOut:
        """Batch number `index`, from 0."""


@dataclass(frozen=True)
class StepReport:
    """What happened in one optimizer step."""

    step: int
    """1 for the first."""
    loss: float
    """Mean over the accumulated batches."""
    lr: float
    grad_norm: float
    """Before clipping."""
    seconds: float


class Trainer:
    """Minimises `loss(batch)` over `parameters`.

    One step: the gradients of `gradient_accumulation` batches, averaged; clipping; the optimizer; the
    schedule. With a `scaler` (f16) the loss is scaled and steps with overflow are skipped.

    Args:
        loss: from a batch to a single-element tensor.
        parameters: the trainable variables by name.
        optimizer: over these variables.
        data: where batches come from.
        steps: optimizer steps in all.
        scheduler: sets the learning rate; stepped after every optimizer step.
        gradient_accumulation: batches in a step, at least 1.
        max_grad_norm: clip the global norm to this; 0 leaves it alone.
        scaler: for f16.
        output: folder for checkpoints; None keeps none.
        save_every: steps between checkpoints; 0 saves at the end only.
        keep_checkpoints: how many to keep.
        callbacks: called in order.
        describe: settings stored in checkpoints, for people.

    Raises:
        NonFiniteError: by `train`, if a loss is NaN or infinite (without a scaler).
    """

    def __init__(
        self,
        loss: Callable[[Batch], Tensor],
        parameters: Mapping[str, Var],
        optimizer: tc.optim.Optimizer,
        data: BatchSource[Batch],
        *,
        steps: int,
        scheduler: tc.optim.lr_scheduler.LRScheduler | None = None,
        gradient_accumulation: int = 1,
        max_grad_norm: float = 0.0,
        scaler: tc.optim.GradScaler | None = None,
        output: Path | None = None,
        save_every: int = 0,
        keep_checkpoints: int = 3,
        callbacks: Sequence[Callback] = (),
        describe: dict[str, object] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.optimizer = optimizer
        self.steps = steps
        self.step = 0
        self.output = output
        self.interrupted = False
        self._loss = loss
        self._data = data
        self._batches = 0
        self._scheduler = scheduler
        self._accumulation = gradient_accumulation
        self._max_grad_norm = max_grad_norm
        self._scaler = scaler
        self._save_every = save_every
        self._keep = keep_checkpoints
        self._callbacks = list(callbacks)
        self._describe = describe or {}

    def train(self) -> bool:
        """Run to the last step.

        Ctrl-C ends the step in progress, saves a checkpoint and returns; a second one raises
        KeyboardInterrupt at once.

        Returns:
            Whether the last step was reached.
        """
        with InterruptGuard() as guard:
            for callback in self._callbacks:
                callback.on_train_begin(self)
            try:
                while self.step < self.steps and not guard.requested:
                    report = self._one_step()
                    for callback in self._callbacks:
                        callback.on_step_end(self, report)
                    if self._save_every and self.step % self._save_every == 0:
                        self.save()
                self.interrupted = self.step < self.steps
                if not (self._save_every and self.step % self._save_every == 0):
                    self.save()
            finally:
                for callback in self._callbacks:
                    callback.on_train_end(self)
        return not self.interrupted

    def _one_step(self) -> StepReport:
        started = time.perf_counter()
        self.optimizer.zero_grad()
        losses = [self._backward() for _ in range(self._accumulation)]
        lr = self.optimizer.lr
        norm = self._update()
        if self._scheduler is not None:
            self._scheduler.step()
        self.step += 1
        return StepReport(self.step, math.fsum(losses) / len(losses), lr, norm, time.perf_counter() - started)

    def _backward(self) -> float:
        loss = self._loss(self._data.batch(self._batches))
        value = loss.item()
        if not math.isfinite(value) and self._scaler is None:
            raise NonFiniteError(
                f"training: the loss of step {self.step + 1} (batch {self._batches}) is {value}; "
                "lower the learning rate, or train in f32 or bf16"
            )
        self._batches += 1
        share = loss if self._accumulation == 1 else loss * (1.0 / self._accumulation)
        (share if self._scaler is None else self._scaler.scale(share)).backward()
        return value

    def _update(self) -> float:
        """Clip and step; returns the gradient's norm."""
        limit = self._max_grad_norm or math.inf
        variables = list(self.parameters.values())
        if self._scaler is None:
            norm = tc.optim.clip_grad_norm_(variables, limit)
            self.optimizer.step()
            return norm
        self._scaler.unscale_(self.optimizer)
        norm = tc.optim.clip_grad_norm_(variables, limit)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        return norm

    def save(self) -> Path | None:
        """Write a checkpoint of the present step, if there is an output folder."""
        if self.output is None:
            return None
        folder = run_state.checkpoint_path(self.output, self.step)
        run_state.save(
            folder,
            self.parameters,
            self.optimizer,
            {
                "step": self.step,
                "batches": self._batches,
                "rng": tc.get_rng_state(),
                "scaler": None if self._scaler is None else self._scaler.state_dict(),
                "run": self._describe,
            },
        )
        run_state.prune(self.output, self._keep)
        for callback in self._callbacks:
            callback.on_save(self, folder)
        return folder

    def resume(self, folder: Path) -> None:
        """Continue from a checkpoint: what follows equals an uninterrupted run, on the CPU bit for bit.

        Raises:
            WeightsFormatError: the checkpoint is damaged or of another run.
        """
        state = run_state.load(folder, self.parameters, self.optimizer)
        self.step, self._batches = state.step, state.batches
        tc.set_rng_state(state.rng)
        if self._scaler is not None and state.scaler is not None:
            self._scaler.load_state_dict(state.scaler)
        if self._scheduler is not None:
            self._scheduler.set_step(state.step)
