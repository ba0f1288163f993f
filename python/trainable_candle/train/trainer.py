"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar

import trainable_candle as tc
from trainable_candle.distributed.group import Alone
from trainable_candle.distributed.sums import OwnTerms, sum_up
from trainable_candle.draws import drawn
from trainable_candle.errors import Error, NonFiniteError, OutOfMemoryError
from trainable_candle.train import state as run_state
from trainable_candle.train.epochs import is_due
from trainable_candle.train.graphs import PassGraphs
from trainable_candle.train.inputs import SHARE, BatchInputs, StepInputs
from trainable_candle.train.interrupt import InterruptGuard
from trainable_candle.train.saver import Saver

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from trainable_candle import Tensor, Var
    from trainable_candle.distributed.group import Group
    from trainable_candle.optim import GradScaler, Optimizer
    from trainable_candle.optim.lr_scheduler import LRScheduler
    from trainable_candle.train.callbacks import Callback
    from trainable_candle.train.epochs import Moments
    from trainable_candle.train.source import BatchSource

Batch = TypeVar("Batch")
Inputs: TypeAlias = Mapping[str, "Tensor"]
"""The inputs of a loss by name, on the device of the parameters."""

MAX_SKIPPED: Final = 50
"""A run fails after this many skipped steps in a row.

These steps divide the loss scale by 2**50 if the scaler has its default `backoff_factor`, 0.5.
"""


@dataclass(frozen=True)
class StepReport:
    """What happened in one optimizer step."""

    step: int
    """The number of the step, from 1."""
    loss: float
    """The mean loss of the step's batches, weighted if the trainer has `weigh`."""
    lr: float
    """The learning rate of the step."""
    grad_norm: float
    """The global norm of the gradients before clipping; non-finite if a loss scaler skipped the
    step."""
    seconds: float
    """The duration of the step in seconds."""
    epoch: float | None = None
    """The number of epochs so far; None if the trainer has no `epoch`."""
    amount: float = 0.0
    """The number of images, tokens or other units in the step; 0 if the trainer has no `count`."""
    memory: int | None = None
    """The number of bytes of the GPU's memory that the run holds; None on the CPU."""

    @property
    def rate(self) -> float:
        """The counted amount per second."""
        return self.amount / self.seconds if self.seconds else 0.0


class Trainer(Generic[Batch]):
    """Minimises `loss(batch)` over `parameters`.

    A step averages the gradients of `gradient_accumulation` batches, clips them, and steps the
    optimizer and the schedule. With a `scaler` (for f16) the loss is scaled, and steps in which the
    gradients overflow are skipped. On a GPU, the trainer queues a whole step, prepares the next
    step's batches, and then waits for the step's losses and gradient norm.

    ```python
    from trainable_candle.data import ShuffledBatches

    rows = ShuffledBatches(len(x), batch_size=2, seed=0)
    loss = lambda numbers: model(x[numbers.tolist()]).square().mean()
    tc.train.Trainer(loss, model.named_parameters(), optimizer, rows, steps=10).train()
    ```

    Args:
        loss: takes a batch, or the result of `inputs` for a batch; returns a single-element tensor.
        parameters: the trainable variables by name.
        optimizer: the optimizer of these variables.
        data: the source of batches.
        inputs: takes a batch, returns tensors by name, which `loss` takes in place of the batch.
        weigh: needs `inputs`; takes a batch, returns its weight, above 0. The loss of a step is the
            mean with these weights. `loss` also gets the input `share`, the weight times a factor
            that is the same for the whole step; it may ignore `share`. By default batches count
            equally.
        cuda_graphs: the number of batch shapes for which the forward and backward passes are kept
            as CUDA graphs (`tc.cuda.capture`); 0: none. Needs `inputs`; has no effect on the CPU.
            `loss` must launch the same operations for all batches of a shape.
        steps: the total number of optimizer steps.
        scheduler: sets the learning rate; stepped after every optimizer step.
        gradient_accumulation: batches in a step, at least 1.
        max_grad_norm: the limit to which the global norm of the gradients is clipped; 0: none.
        scaler: the loss scaler, for f16.
        output: the folder for checkpoints; None: no checkpoints.
        save_every: the number of steps from one checkpoint to the next, or a function that selects
            the steps; 0 saves at the end only.
        keep_checkpoints: how many of the newest checkpoints to keep, at least 1.
        callbacks: called in this order.
        settings: the settings of the run. Checkpoints store them, for users and for comparison with
            the settings of a run that resumes.
        group: the processes that train together. Each process takes `gradient_accumulation` batches
            in a step, in turn by batch number; only rank 0 has an `output`.
        seed: determines, with the number of a batch, the random numbers that `data`, `inputs` and
            `loss` draw for the batch from tc's generator. Earlier draws do not change these. The
            default is the current seed of that generator.
        count: takes a batch, returns the number of its images or tokens, for reports.
        epoch: takes a number of steps, returns the number of epochs, for reports.
    """

    def __init__(
        self,
        loss: Callable[[Any], Tensor],
        parameters: Mapping[str, Var],
        optimizer: Optimizer,
        data: BatchSource[Batch],
        *,
        inputs: Callable[[Batch], Inputs] | None = None,
        weigh: Callable[[Batch], float] | None = None,
        cuda_graphs: int = 0,
        steps: int,
        scheduler: LRScheduler | None = None,
        gradient_accumulation: int = 1,
        max_grad_norm: float = 0.0,
        scaler: GradScaler | None = None,
        output: Path | None = None,
        save_every: Moments = 0,
        keep_checkpoints: int = 3,
        callbacks: Sequence[Callback] = (),
        settings: Mapping[str, object] | None = None,
        group: Group | None = None,
        seed: int | None = None,
        count: Callable[[Batch], float] | None = None,
        epoch: Callable[[int], float] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.optimizer = optimizer
        self.steps = steps
        self.step = 0
        """The number of steps taken."""
        self.group: Group = group or Alone()
        self.output = output if self.group.rank == 0 else None
        self.stopped_by: signal.Signals | None = None
        """The signal that ended `train` before the last step."""
        self._loss = loss
        self._inputs = inputs
        self._weigh = weigh
        self._on_gpu = any(var.device != "cpu" for var in self.parameters.values())
        # A shape has up to two graphs: the first batch of a step clears the gradients, others add.
        graphs_per_shape = min(gradient_accumulation, 2) if inputs and self._on_gpu else 0
        self._graphs = PassGraphs(self._pass, cuda_graphs * graphs_per_shape)
        self._batches_used = 0
        """The number of batches that all processes have used."""
        self._seed = tc.get_rng_state()[0] if seed is None else seed
        self._step_inputs = StepInputs(
            data=data,
            parameters=self.parameters,
            group=self.group,
            gradient_accumulation=gradient_accumulation,
            seed=self._seed,
            inputs=inputs,
            weigh=weigh,
            count=count,
        )
        self._ready: list[BatchInputs] | None = None
        """The inputs of the next step, if `_make_ready` has made them already."""
        self._scheduler = scheduler
        self._max_grad_norm = max_grad_norm
        self._scaler = scaler
        self._skipped = 0
        """The number of steps in a row that the scaler has skipped."""
        self._save_every = save_every
        self._saved: int | None = None
        """The step of the last checkpoint in `output`."""
        self._saver = Saver()
        self._keep = keep_checkpoints
        self._callbacks = list(callbacks)
        self.settings = dict(settings or {})
        """The settings of the run, as stored in checkpoints."""
        self._epoch = epoch
        self._stop = False
        """Whether a callback has called `stop`."""
        self._asked = False
        """Whether this process has been asked to stop after the current step."""
        self._agreed = False
        """Whether any process has been asked to stop; equal in all processes after each step."""

    def train(self) -> bool:
        """Run to the last step.

        After Ctrl-C (or SIGTERM) the trainer finishes the current step, saves a checkpoint and
        returns. A second Ctrl-C raises KeyboardInterrupt at once.

        Returns:
            Whether the last step was reached.

        Raises:
            NonFiniteError: a loss or a gradient is NaN or infinite; the step does not change the
                parameters. With a scaler, steps with such gradients are skipped, and only 50 in a
                row raise the error.
            OSError: a checkpoint cannot be written; older ones are unchanged.
            Exception: any error of the loss, the data, the callbacks or other processes.
        """
        self._stop = self._agreed = False
        self.group.broadcast_(self.parameters)
        with InterruptGuard() as guard:
            try:
                for callback in self._callbacks:
                    callback.on_train_begin(self)
                while self.step < self.steps and not self._is_stopped(guard):
                    self._asked = bool(self._stop or guard.signal)
                    with self.group.in_step():
                        report = self._one_step()
                    for callback in self._callbacks:
                        callback.on_step_end(self, report)
                    if is_due(self._save_every, self.step):
                        self._begin_save()
                    self._saver.check()
                self.stopped_by = guard.signal if self.step < self.steps else None
                if self._saved != self.step:
                    self._begin_save()
                self._saver.wait()
            except BaseException:
                # Finish writes in progress without reporting their errors; raise the first error.
                self._saver.settle()
                raise
            finally:
                for callback in self._callbacks:
                    callback.on_train_end(self)
        return self.step >= self.steps

    def _is_stopped(self, guard: InterruptGuard) -> bool:
        """Return whether to stop before the next step; all processes stop after the same step."""
        return self._agreed if self.group.size > 1 else bool(self._stop or guard.signal)

    def stop(self) -> None:
        """Make `train` save a checkpoint and return after the current step; for callbacks."""
        self._stop = True

    def report(self, metrics: Mapping[str, float]) -> None:
        """Pass metrics that a callback has measured at the current step to all callbacks."""
        for callback in self._callbacks:
            callback.on_metrics(self, metrics)

    def _one_step(self) -> StepReport:
        """Take one optimizer step.

        Raises:
            NonFiniteError: see `train`.
        """
        started = time.perf_counter()
        batches = self._take()
        losses = self._backward(batches)
        # On the CPU the losses are known already, so check them before the update. With several
        # processes, a step checks the mean loss instead.
        if not self._on_gpu and self.group.size == 1:
            self._check_losses(losses)
        lr = self.optimizer.lr
        measured = self._update(batches, losses)
        if self._scheduler is not None:
            self._scheduler.step()
        if self._on_gpu and self.step + 1 < self.steps:
            self._make_ready()
        self.group.wait()
        *values, norm = measured.tolist()  # On a GPU this waits for the step.
        if self.group.size > 1:
            mean, asked_processes, amount = values
            self._agreed = asked_processes > 0
            self._check_losses([mean])
        else:
            self._check_losses(values)
            mean = self._mean(batches, values)
            amount = math.fsum(batch.amount for batch in batches)
        self._check_norm(norm)
        self.step += 1
        return StepReport(
            self.step,
            mean,
            lr,
            norm,
            time.perf_counter() - started,
            None if self._epoch is None else self._epoch(self.step),
            amount,
            self._memory(),
        )

    def _memory(self) -> int | None:
        """Return the number of bytes of GPU memory that the run holds; None on the CPU."""
        device = next(iter(self.parameters.values())).device
        if not device.startswith("cuda"):
            return None
        return tc.cuda.memory_stats(device)["reserved"]

    def _mean(self, batches: Sequence[BatchInputs], losses: Sequence[float]) -> float:
        """Return the loss of a step of a single process."""
        if self._weigh is None:
            return math.fsum(losses) / len(losses)
        return math.fsum(batch.share * loss for batch, loss in zip(batches, losses, strict=True))

    def _take(self) -> list[BatchInputs]:
        """Return the inputs of the next step; make them if they are not ready."""
        ready, self._ready = self._ready, None
        return self._step_inputs.of_step(self._batches_used) if ready is None else ready

    def _make_ready(self) -> None:
        """Make the inputs of the next step in advance, if the trainer has `inputs`."""
        if self._inputs is None:
            return
        # If this fails, the next step makes the inputs again and raises the error.
        with suppress(Error, OSError):
            self._ready = self._step_inputs.of_step(self._batches_used)

    def _backward(self, batches: Sequence[BatchInputs]) -> list[Tensor]:
        """Set the gradients to those of the mean loss, and return the batches' losses.

        With several processes, the gradients are those of the terms that the batches of this
        process have in the mean.
        """
        self._batches_used += self._step_inputs.batches_in_step
        try:
            return self._passes(batches)
        except OutOfMemoryError:
            # `stop` frees the graphs. It returns False without graphs: a second try would fail too.
            if not self._graphs.stop():
                raise
        # Try again without the memory of graphs; the first batch clears the gradients.
        return self._passes(batches)

    def _passes(self, batches: Sequence[BatchInputs]) -> list[Tensor]:
        """Run the forward and backward passes of a step; return the batches' losses."""
        # `_graphs` calls `_pass` or replays its graph; `drawn` seeds the draws of each batch.
        return [
            drawn(self._seed, "pass", batch.number, partial(self._graphs, batch.inputs, n == 0))
            for n, batch in enumerate(batches)
        ]

    def _pass(self, inputs: Any, first: bool) -> Tensor:
        """Clear the gradients if `first`, add those of a batch, and return the batch's loss."""
        if first:
            self.optimizer.zero_grad()
        loss = self._loss(inputs)
        term = loss  # its part in the loss of the step
        if self._weigh is not None:
            term = loss * inputs[SHARE]
        elif self._step_inputs.batches_in_step > 1:
            term = loss * (1.0 / self._step_inputs.batches_in_step)
        (term if self._scaler is None else self._scaler.scale(term)).backward()
        return loss.detach()

    def _update(self, batches: Sequence[BatchInputs], losses: Sequence[Tensor]) -> Tensor:
        """Clip the gradients and step the optimizer, unless a loss or a gradient is non-finite.

        With a scaler, which expects overflow, only the gradients are checked.

        Returns:
            A vector in f64: the losses, or with several processes the result of `sum_up`; and
            last, the norm of the gradients.
        """
        limit = self._max_grad_norm or math.inf
        parameters = list(self.parameters.values())
        values = [loss.to("f64").reshape(()) for loss in losses]
        if self.group.size > 1:
            amount = math.fsum(batch.amount for batch in batches)
            own = OwnTerms(values, [batch.share for batch in batches], self._asked, amount)
            has_weights = self._weigh is not None
            values = sum_up(self.group, self.parameters, own, divide_by_shares=has_weights)
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        norm = tc.optim.clip_grad_norm_(parameters, limit)
        measured = tc.stack([*values, norm])
        if self._scaler is not None:
            self._scaler.step(self.optimizer)
            self._scaler.update()
        else:
            # The sum is finite if and only if all terms are, because the sum of f32 losses cannot
            # overflow f64.
            self.optimizer.step(if_finite=measured.sum())
        return measured

    def _check_losses(self, losses: Sequence[Tensor | float]) -> None:
        """Check the losses of the step's batches, or with several processes the mean loss.

        Raises:
            NonFiniteError: one is non-finite, and there is no scaler.
        """
        if self._scaler is None:
            first_number = self._batches_used - self._step_inputs.batches_in_step
            for number, loss in enumerate(losses, first_number):
                what = f"the loss of batch {number}" if self.group.size == 1 else "the mean loss"
                self._require_finite(float(loss), what)

    def _check_norm(self, norm: float) -> None:
        """Check the norm of the gradients; with a scaler, count the skipped steps.

        Raises:
            NonFiniteError: the norm is non-finite; with a scaler, that of too many steps in a row.
        """
        if self._scaler is None:
            self._require_finite(norm, "the gradient's norm")
            return
        self._skipped = 0 if math.isfinite(norm) else self._skipped + 1
        if self._skipped >= MAX_SKIPPED:
            self._require_finite(norm, f"after {MAX_SKIPPED} skipped steps the gradient's norm")

    def _require_finite(self, value: float, what: str) -> None:
        if not math.isfinite(value):
            raise NonFiniteError(
                f"training: in step {self.step + 1} {what} is {value}; "
                "lower the learning rate, or train in f32 or bf16"
            )

    def save(self) -> Path | None:
        """Write a checkpoint of the current step and wait for it.

        Returns:
            The folder of the checkpoint; None, and nothing is written, if the trainer has no
            `output`.

        Raises:
            OSError: the checkpoint cannot be written; older ones are unchanged.
        """
        folder = self._begin_save()
        self._saver.wait()
        return folder

    def write_later(self, job: Callable[[], object]) -> None:
        """Run `job`, which writes files, while training continues; for callbacks.

        Jobs run one after the other. A checkpoint gets its final name after the jobs that callbacks
        pass to this method in `on_save`. An error in a job ends the run.

        Args:
            job: must not read values that training changes; copy them with `tc.snapshot`.

        Raises:
            OSError: an earlier job could not write.
            Exception: an earlier job failed in another way.
        """
        self._saver.submit(job)

    def _begin_save(self) -> Path | None:
        """Begin a checkpoint of the current step, if there is an `output`; return its folder."""
        if self.output is None:
            return None
        state = run_state.RunState(
            step=self.step,
            batches=self._batches_used,
            scaler=None if self._scaler is None else self._scaler.state_dict(),
            settings=self.settings,
        )

        def snapshot() -> run_state.Snapshot:
            return run_state.Snapshot.of(self.parameters, self.optimizer, state)

        def write_others(folder: Path) -> None:
            for callback in self._callbacks:
                callback.on_save(self, folder)

        folder = run_state.checkpoint_path(self.output, self.step)
        prune = partial(run_state.prune, self.output, self._keep)
        self._saver.begin(folder, snapshot, write_others, prune)
        self._saved = self.step
        return folder

    def resume(self, folder: Path) -> dict[str, object]:
        """Load a checkpoint, to continue from it; on the CPU, bit for bit as without interruption.

        Returns:
            The settings of the run that wrote the checkpoint.

        Raises:
            WeightsFormatError: the checkpoint is damaged or of another run.
        """
        state = run_state.load(folder, self.parameters, self.optimizer)
        self.step, self._batches_used, self._ready = state.step, state.batches, None
        if self.output is not None and folder.resolve().parent == self.output.resolve():
            self._saved = self.step
        if self._scaler is not None and state.scaler is not None:
            self._scaler.load_state_dict(state.scaler)
        if self._scheduler is not None:
            self._scheduler.set_step(state.step)
        for callback in self._callbacks:
            callback.on_resume(self, folder)
        return state.settings
