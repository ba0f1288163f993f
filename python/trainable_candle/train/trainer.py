"""The training loop."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

import trainable_candle as tc
from trainable_candle.errors import NonFiniteError
from trainable_candle.train import state as run_state
from trainable_candle.train.interrupt import InterruptGuard

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from trainable_candle import Tensor, Var
    from trainable_candle.optim import GradScaler, Optimizer
    from trainable_candle.optim.lr_scheduler import LRScheduler
    from trainable_candle.train.callbacks import Callback

Batch = TypeVar("Batch")
BatchOut = TypeVar("BatchOut", covariant=True)

MAX_SKIPPED: Final = 50
"""Steps that a loss scaler may skip in a row: from 65536 the scale has then fallen below 1e-10."""


class BatchSource(Protocol[BatchOut]):
    """Batches by number; a number always gives the same batch, so a run can continue anywhere."""

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
    """The learning rate of the step."""
    grad_norm: float
    """Before clipping; not finite if a loss scaler skipped the step."""
    seconds: float
    """How long it took."""


class Trainer(Generic[Batch]):
    """Minimises `loss(batch)` over `parameters`.

    One step: the gradients of `gradient_accumulation` batches, averaged; clipping; the optimizer;
    the schedule. With a `scaler` (f16) the loss is scaled and steps with overflow are skipped.

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
        keep_checkpoints: how many to keep, at least 1.
        callbacks: called in order.
        settings: stored in checkpoints, for people and for comparison.
    """

    def __init__(
        self,
        loss: Callable[[Batch], Tensor],
        parameters: Mapping[str, Var],
        optimizer: Optimizer,
        data: BatchSource[Batch],
        *,
        steps: int,
        scheduler: LRScheduler | None = None,
        gradient_accumulation: int = 1,
        max_grad_norm: float = 0.0,
        scaler: GradScaler | None = None,
        output: Path | None = None,
        save_every: int = 0,
        keep_checkpoints: int = 3,
        callbacks: Sequence[Callback] = (),
        settings: Mapping[str, object] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.optimizer = optimizer
        self.steps = steps
        self.step = 0
        self.output = output
        self.stopped_by: signal.Signals | None = None
        """The signal that ended `train` before the last step."""
        self._loss = loss
        self._data = data
        self._batches = 0
        self._scheduler = scheduler
        self._accumulation = gradient_accumulation
        self._max_grad_norm = max_grad_norm
        self._scaler = scaler
        self._skipped = 0
        self._save_every = save_every
        self._saved: int | None = None
        self._keep = keep_checkpoints
        self._callbacks = list(callbacks)
        self._settings = dict(settings or {})
        self._stop = False

    def train(self) -> bool:
        """Run to the last step.

        Ctrl-C (or SIGTERM) ends the step in progress, saves a checkpoint and returns; a second one
        raises KeyboardInterrupt at once.

        Returns:
            Whether the last step was reached.

        Raises:
            NonFiniteError: a loss or a gradient is NaN or infinite; the parameters are those of the
                step before. With a scaler such steps are skipped, and 50 in a row are an error.
            OSError: a checkpoint cannot be written.
        """
        self._stop = False
        with InterruptGuard() as guard:
            try:
                for callback in self._callbacks:
                    callback.on_train_begin(self)
                while self.step < self.steps and not (self._stop or guard.signal):
                    report = self._one_step()
                    for callback in self._callbacks:
                        callback.on_step_end(self, report)
                    if self._save_every and self.step % self._save_every == 0:
                        self.save()
                self.stopped_by = guard.signal if self.step < self.steps else None
                if self._saved != self.step:
                    self.save()
            finally:
                for callback in self._callbacks:
                    callback.on_train_end(self)
        return self.step >= self.steps

    def stop(self) -> None:
        """Let `train` save and return after the present step; for callbacks."""
        self._stop = True

    def report(self, metrics: Mapping[str, float]) -> None:
        """Tell every callback what one of them has measured at the present step."""
        for callback in self._callbacks:
            callback.on_metrics(self, metrics)

    def _one_step(self) -> StepReport:
        started = time.perf_counter()
        self.optimizer.zero_grad()
        losses = [self._backward() for _ in range(self._accumulation)]
        lr = self.optimizer.lr
        norm = self._update()
        if self._scheduler is not None:
            self._scheduler.step()
        self.step += 1
        mean = math.fsum(losses) / len(losses)
        return StepReport(self.step, mean, lr, norm, time.perf_counter() - started)

    def _backward(self) -> float:
        """Add the gradient of the next batch; returns its loss."""
        loss = self._loss(self._data.batch(self._batches))
        value = float(loss.item())
        if self._scaler is None:
            self._require_finite(value, f"the loss of batch {self._batches}")
        self._batches += 1
        share = loss if self._accumulation == 1 else loss * (1.0 / self._accumulation)
        (share if self._scaler is None else self._scaler.scale(share)).backward()
        return value

    def _update(self) -> float:
        """Clip and step; returns the gradient's norm."""
        if self._scaler is None:
            norm = self._clip()
            self._require_finite(norm, "the gradient's norm")
            self.optimizer.step()
            return norm
        self._scaler.unscale_(self.optimizer)
        norm = self._clip()
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self._skipped = 0 if math.isfinite(norm) else self._skipped + 1
        if self._skipped >= MAX_SKIPPED:
            self._require_finite(norm, f"after {MAX_SKIPPED} skipped steps the gradient's norm")
        return norm

    def _clip(self) -> float:
        limit = self._max_grad_norm or math.inf
        return float(tc.optim.clip_grad_norm_(list(self.parameters.values()), limit))

    def _require_finite(self, value: float, what: str) -> None:
        if not math.isfinite(value):
            raise NonFiniteError(
                f"training: in step {self.step + 1} {what} is {value}; "
                "lower the learning rate, or train in f32 or bf16"
            )

    def save(self) -> Path | None:
        """Write a checkpoint of the present step, if there is an output folder.

        Raises:
            OSError: it cannot be written; the older ones are as they were.
        """
        if self.output is None:
            return None
        folder = run_state.checkpoint_path(self.output, self.step)
        state = run_state.RunState(
            step=self.step,
            batches=self._batches,
            rng=tc.get_rng_state(),
            scaler=None if self._scaler is None else self._scaler.state_dict(),
            settings=self._settings,
        )
        run_state.save(folder, self.parameters, self.optimizer, state, self._write_more)
        run_state.prune(self.output, self._keep)
        self._saved = self.step
        return folder

    def _write_more(self, folder: Path) -> None:
        for callback in self._callbacks:
            callback.on_save(self, folder)

    def resume(self, folder: Path) -> dict[str, object]:
        """Continue from a checkpoint; on the CPU what follows equals an unbroken run bit for bit.

        Returns:
            The settings of the run that wrote it.

        Raises:
            WeightsFormatError: the checkpoint is damaged or of another run.
        """
        state = run_state.load(folder, self.parameters, self.optimizer)
        self.step, self._batches = state.step, state.batches
        if self.output is not None and folder.resolve().parent == self.output.resolve():
            self._saved = self.step
        tc.set_rng_state(state.rng)
        if self._scaler is not None and state.scaler is not None:
            self._scaler.load_state_dict(state.scaler)
        if self._scheduler is not None:
            self._scheduler.set_step(state.step)
        for callback in self._callbacks:
            callback.on_resume(self, folder)
        return state.settings
