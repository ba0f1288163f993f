"""What a run does besides its steps: averages, validation, previews, and saving."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import trainable_candle as tc
from trainable_candle import _core
from trainable_candle.data.folder import counted
from trainable_candle.distributed.agreement import SameParameters
from trainable_candle.errors import OutOfMemoryError
from trainable_candle.settings.machine import DEVICE
from trainable_candle.sheet import PAGE
from trainable_candle.train.ema import AdapterAverage, Average, OptimizerAverage
from trainable_candle.train.epochs import Epochs, Moments, is_due
from trainable_candle.train.evaluation import (
    Previews,
    StepAdapters,
    Validation,
    best_path,
    evaluated,
)
from trainable_candle.train.metadata import Progress, Stamped, now, training_metadata
from trainable_candle.train.optimizers import make_optimizer, make_scheduler
from trainable_candle.train.totals import Totals
from trainable_candle.train.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from trainable_candle import Var
    from trainable_candle.distributed.group import Group
    from trainable_candle.optim import Optimizer
    from trainable_candle.settings import TrainConfig
    from trainable_candle.tasks.task import Prepared, Split, Task
    from trainable_candle.train.adapters import Adapters
    from trainable_candle.train.callbacks import Callback

SAMPLES = "samples"
"""The folder of the previews."""
BEST = "best"
"""The folder in which `Task.publish` writes the best adapter for other tools."""


def adapter_path(config: TrainConfig, output: Path) -> Path:
    """Return the file of the finished adapter."""
    return output / f"{config.stem}.safetensors"


def _optimizer(
    config: TrainConfig,
    groups: Sequence[tuple[Sequence[Var], float]],
    report: Callable[[str], None],
) -> Optimizer:
    """Make the optimizer, with its states in GPU memory if too little host memory can be pinned."""
    try:
        return make_optimizer(config, groups)
    except OutOfMemoryError as error:
        if not config.states_on_host or "pinned memory" not in str(error):
            raise
        report(
            "optimizer: its states are in GPU memory, not in host memory, because the system gives "
            "too little pinned memory for them"
        )
        return make_optimizer(config.with_(optimizer_states=DEVICE), groups)


class Session:
    """One run's averages, validation, previews and saved files.

    Args:
        group: the processes that train together.
        config: the settings, with a batch size and a number of steps.
        task: the task, with the loaded model.
        adapters: the adapters on the model.
        prepared: the encoded data.
        output: the output folder.
        report: gets lines about the optimizer, validation and previews.
    """

    def __init__(
        self,
        group: Group,
        config: TrainConfig,
        task: Task,
        adapters: Adapters,
        prepared: Split[Prepared[Any]],
        output: Path,
        report: Callable[[str], None],
    ) -> None:
        self._group = group
        self._config = config
        self._task = task
        self._adapters = adapters
        self._train = prepared.train
        self._output = output
        self._started = now()
        self._data_metadata = prepared.train.metadata()
        self._batches = prepared.train.batches(config.batch_size)
        self.epochs = Epochs(self._batches.first_batch, config.gradient_accumulation * group.size)
        # `counts` names what is counted: images or tokens.
        self.totals = Totals(task.counts)
        self._optimizer = _optimizer(config, adapters.groups(config), report)
        self._average: Average | None = None
        self.callbacks: list[Callback] = adapters.callbacks()
        # For validation, all processes need the average. For files and previews, only the first
        # process needs it.
        if config.ema_decay and (group.rank == 0 or prepared.validation is not None):
            average = AdapterAverage(adapters, config.ema_decay)
            self._average = average
            self.callbacks.append(average)
        elif self._optimizer.averages:
            # Some optimizers keep an average themselves.
            self._average = OptimizerAverage(self._optimizer)
        # `as_used()` makes a context for everything but training: without dropout and tape, with
        # averages.
        as_used: Callable[[], AbstractContextManager[None]] = partial(
            evaluated, adapters, self._average
        )
        self.validation = None
        if prepared.validation is not None:
            held_out = prepared.validation
            self.validation = Validation(
                held_out.validation_loss,
                config.validate_every,
                as_used,
                self.adapter_file,
                held_out.validation_facts,
                config.stem,
                report,
                config.early_stop,
            )
            self.callbacks.append(self.validation)
        if group.rank == 0:
            self.callbacks.insert(0, self.totals)
            if config.sample_prompts:
                moments = self._moments(config.sample_every, config.sample_every_epochs)
                folder = output / SAMPLES
                self.callbacks.append(Previews(task.preview, moments, folder, as_used, report))
            self.callbacks.append(
                StepAdapters(config.stem, config.keep_adapters, as_used, self.adapter_file)
            )
        if group.size > 1 and config.compare_every:
            self.callbacks.append(SameParameters(group, self._is_compared))

    def _is_compared(self, step: int) -> bool:
        """Return whether the processes compare their parameters after a step.

        They do so every `compare_every` steps, before each checkpoint, and after the last step.
        """
        config = self._config
        saves = self._moments(config.save_every, config.save_every_epochs)
        is_last = step == config.steps or self._ends_early
        return is_due(config.compare_every, step) or is_due(saves, step) or is_last

    @property
    def _ends_early(self) -> bool:
        """Whether the run ends at the current step because of `early_stop`."""
        return self.validation is not None and self.validation.ends_early

    def _moments(self, steps: int, epochs: int | None) -> Moments:
        """Return when something is due: every `epochs` epochs, or if None, every `steps` steps."""
        return steps if epochs is None else self.epochs.ends(epochs)

    def trainer(self, callbacks: Sequence[Callback], settings: dict[str, object]) -> Trainer[Any]:
        """Return the training loop of this run."""
        config = self._config
        # A graph repeats the same operations in every step, so tasks whose steps differ use none.
        cuda_graphs = config.cuda_graphs if self._task.repeats else 0
        return Trainer(
            self._train.loss,
            self._adapters.named_parameters(),
            self._optimizer,
            self._batches,
            inputs=self._train.inputs,
            weigh=self._train.weight if self._task.weighs_batches else None,
            cuda_graphs=cuda_graphs,
            steps=config.steps,
            scheduler=make_scheduler(config, self._optimizer),
            gradient_accumulation=config.gradient_accumulation,
            max_grad_norm=config.most_grad_norm,
            scaler=tc.optim.GradScaler() if config.precision == "f16" else None,
            output=self._output,
            save_every=self._moments(config.save_every, config.save_every_epochs),
            keep_checkpoints=config.keep_checkpoints,
            callbacks=callbacks,
            settings=settings,
            group=self._group,
            seed=config.seed,
            count=self._train.count,
            epoch=self.epochs.at,
        )

    def announce(self, report: Callable[[str], None]) -> None:
        """Report how much the run trains: the steps, the examples in a step, and the epochs.

        Also report LoRA+, and slow copies of streamed weights.
        """
        config = self._config
        # The batches of one step, of all processes.
        batches = config.gradient_accumulation * self._group.size
        # A batch of a language model has packed rows, each with several examples.
        noun = self._task.noun if self._task.counts == "image" else "row"
        size = counted(config.batch_size * batches, noun)
        where = f" on {self._group.size} devices" if self._group.size > 1 else ""
        split = f" ({batches} batches of {config.batch_size}{where})" if batches > 1 else ""
        epochs = self.epochs.at(config.steps)
        if config.on_gpu and _core.cuda_stages_weights(config.device):
            report(
                "streamed blocks: the system gives too little pinned memory for some of them. A "
                "thread copies these through a small pinned buffer, at most as fast as one core "
                "can copy, and steps run without CUDA graphs. Raise the memory limit of the "
                "container or `ulimit -l`, or stream fewer blocks"
            )
        report(
            f"training: {counted(config.steps, 'step')} of {size}{split}, "
            f"{epochs:.3g} epochs of {counted(len(self._train), self._task.noun)}"
        )
        if config.lora_plus_ratio != 1:
            report(
                f"LoRA+: the factors B have {config.lora_plus_ratio:g} times the learning rate of "
                "the other parameters"
            )

    def _metadata(self, step: int) -> dict[str, str]:
        """Return the metadata of an adapter file that is saved after a step."""
        epoch = self.epochs.completed(step)
        progress = Progress(step, epoch, len(self._train), self._started)
        return training_metadata(self._config, progress, self._data_metadata)

    def adapter_file(self, path: Path, step: int) -> Stamped:
        """Return a snapshot of the adapters after a step, whose file is written later."""
        return Stamped(self._task.adapter_file(self._adapters, path, self._metadata(step)), path)

    def conclude(self, step: int, report: Callable[[str], None]) -> None:
        """Write the finished adapter, and report the files that were written."""
        output = self._output
        finished = adapter_path(self._config, output)
        file = self.adapter_file(finished, step)
        file.write()
        report(f"done: {self.totals}")
        if self.validation is not None and self.validation.ends_early:
            report(
                f"early stop: after step {step} of {self._config.steps}, because "
                f"{counted(self.validation.since_best, 'validation')} in a row had no lower loss "
                f"than that of step {self.validation.best_step}"
            )
        report(f"adapter: {finished}")
        published = self._task.publish(self._adapters, output, self._metadata(step))
        if published is not None:
            report(f"adapter for other tools: {published}")
        # The names of layers whose adapter has no effect.
        idle = file.idle
        if idle:
            report(f"adapter: {len(idle)} layers have learnt nothing, the first is {idle[0]}")
        if self.validation is not None:
            validation = self.validation
            path = best_path(output, self._config.stem)
            # A run that resumed into another folder has no best adapter there unless the loss has
            # improved after it resumed.
            file_of_best = str(path) if path.exists() else "in the folder of the earlier run"
            found = f"step {validation.best_step}, loss {validation.best_loss:.4f}"
            report(f"best: {file_of_best} ({found})")
            if published is not None and path.exists():
                metadata = self._metadata(validation.best_step)
                with self._adapters.loaded(path):
                    published = self._task.publish(self._adapters, output / BEST, metadata)
                report(f"best for other tools: {published}")
        if self._config.sample_prompts:
            page = output / SAMPLES / PAGE
            report(f"previews: {page if page.exists() else page.parent}")

    def finish(self) -> None:
        """Leave training mode, and set the adapters to their averages if the run keeps any.

        The adapters then have the parameters that the file of the finished adapter gets.
        """
        self._adapters.set_training(False)
        if self._average is not None:
            self._average.keep()
        self._adapters.finish()
