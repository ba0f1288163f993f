"""From a configuration to a trained adapter: what `train-lora` does."""

from __future__ import annotations

import errno
import math
import os
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trainable_candle as tc
from trainable_candle import families, plot
from trainable_candle.data.folder import counted
from trainable_candle.errors import ConfigError
from trainable_candle.files import held, write_atomically
from trainable_candle.placement import choose
from trainable_candle.settings.checks import check_groups, check_settings, differences
from trainable_candle.tasks.estimate import memory_limit, require_fit
from trainable_candle.train import state as run_state
from trainable_candle.train.callbacks import Callback, ProgressBar
from trainable_candle.train.ema import AdapterAverage
from trainable_candle.train.evaluation import BEST, Previews, StepAdapters, Validation, evaluated
from trainable_candle.train.logs import CsvLog, JsonLog, TensorBoardLog, read_json_log, read_log
from trainable_candle.train.optimizers import make_optimizer, make_scheduler
from trainable_candle.train.trainer import Trainer

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from trainable_candle import AdapterFile
    from trainable_candle.settings import TrainConfig
    from trainable_candle.tasks.task import Family, Prepared, Split, Task
    from trainable_candle.train.adapters import Adapters

ADAPTER: Final = "adapter.safetensors"
CONFIG: Final = "config.yaml"
LOG: Final = "train.csv"
JSON_LOG: Final = "train.jsonl"
TENSORBOARD: Final = "tensorboard"
SAMPLES: Final = "samples"
CURVE: Final = "loss.png"
LOCK: Final = ".lock"


@dataclass(frozen=True)
class TrainingRun:
    """The result of `train_adapter` in memory."""

    task: Task
    """The model with the adapters on it, as they were written: averaged if an average is kept."""
    adapter: Adapters
    output: Path
    step: int
    """Optimizer steps, including those before a resume."""
    completed: bool
    """Whether the last step was reached; the adapter file is written only then."""
    stopped_by: signal.Signals | None
    """The signal that ended the run, if one did."""

    @property
    def adapter_path(self) -> Path:
        """The adapter's file."""
        return self.output / ADAPTER


def train_adapter(
    config: TrainConfig,
    *,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    report: Callable[[str], None] = print,
) -> TrainingRun:
    """Train an adapter; writes it, its configuration, logs, previews and checkpoints to `output`.

    Args:
        config: `model`, `dataset` and `output` must be given, `weights` too unless the package
            ships the model's.
        callbacks: called after those that write the logs and show the progress.
        progress: whether to show a progress bar.
        report: gets a line at each stage.

    Raises:
        ConfigError, DatasetError, WeightsFormatError, OutOfMemoryError, OSError: before the first
            step.
        CudaUnavailableError, DeviceError: there is no such device; before anything is read.
        NonFiniteError: the loss or the gradient is NaN or infinite.
    """
    config.require("model", "dataset", "output")
    family = families.find(config.model)
    check_groups(config, family.groups)
    config = _with_defaults(config, family)
    placement = choose(config.device, config.precision)
    config = config.with_(device=placement.device, precision=placement.precision)
    check_settings(config)
    # Before anything is read, so that a missing device is reported at once.
    limit = memory_limit(config)
    weights = families.weights_of(config.model, config.weights)
    output = Path(config.output).expanduser()
    if run_state.needs_restoring(output):
        with held(output / LOCK, f"output: {output} is in use"):
            run_state.restore(output)
    start = run_state.find(output, config.resume) if config.resume else None
    step = run_state.read_state(start).step if start else -1
    if config.epochs is None:
        _require_steps_left(config, step)
    run_state.refuse_later(output, step)
    logs = _logs(config, output)
    task = family(weights, config.precision, config.device, config).task()
    task.check(report)
    data = task.read(report)
    report(str(placement))
    estimate = task.estimate(config, data, limit)
    for line in estimate.table():
        report(line)
    require_fit(estimate, config, limit, lambda other: task.estimate(other, data, limit))
    _make_writable(output)
    with held(output / LOCK, f"output: {output} is in use"):
        # Another run may have used the folder in the meantime.
        run_state.refuse_later(output, step)
        run_state.remove_leftovers(output)
        bar = [ProgressBar()] if progress else []
        return _train(config, task, start, data, (logs, [*bar, *callbacks]), report)


def _train(
    config: TrainConfig,
    task: Task,
    start: Path | None,
    data: Split[Any],
    callbacks: tuple[Sequence[Callback], Sequence[Callback]],
    report: Callable[[str], None],
) -> TrainingRun:
    """Load, encode, train, write to the output, which the caller holds.

    Args:
        config: the settings.
        task: the model.
        start: the checkpoint to continue from.
        data: what the task has read.
        callbacks: those to call before the run's own, and after.
        report: gets a line at each stage.
    """
    output = Path(config.output).expanduser()
    if config.threads is not None:
        tc.set_num_threads(config.threads)
    prepared = task.prepare(data, report)
    if config.epochs is not None:
        config = _in_steps(config, prepared.train, task.noun, report)
        _require_steps_left(config, run_state.read_state(start).step if start else -1)
    # Training must not depend on how many random numbers the preparation drew.
    tc.manual_seed(config.seed)
    adapters = task.attach()
    if config.initial_adapter and start is None:
        adapters.load(config.initial_adapter_path)
        report(f"adapter: starts as {config.initial_adapter}")
    parameters = adapters.named_parameters()
    count = sum(var.numel() for var in parameters.values())
    report(f"adapter: {count} parameters in {len(parameters)} tensors")

    session = _Session(config, task, adapters, prepared, output, report)
    settings = {**asdict(config), "examples": len(prepared.train)}
    before, after = callbacks
    trainer = session.trainer([*before, *session.callbacks, *after], settings)
    if start is not None:
        earlier = trainer.resume(start)
        report(f"resume: from step {trainer.step} of {config.steps} ({start})")
        for line in differences(earlier, settings):
            report(f"resume: {line}")
    write_atomically(output / CONFIG, config.with_(resume=None).to_yaml())
    adapters.set_training(True)
    plot.prepare()
    completed = trainer.train()
    session.finish()
    if completed:
        session.conclude(trainer.step, report)
        _draw_curve(output, report)
    return TrainingRun(task, adapters, output, trainer.step, completed, trainer.stopped_by)


class _Session:
    """The averages, validation, previews and saves of one run."""

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        adapters: Adapters,
        prepared: Split[Prepared[Any]],
        output: Path,
        report: Callable[[str], None],
    ) -> None:
        self._config = config
        self._task = task
        self._adapters = adapters
        self._train = prepared.train
        self._output = output
        self._average = AdapterAverage(adapters, config.ema_decay) if config.ema_decay else None
        as_used: Callable[[], AbstractContextManager[None]] = partial(
            evaluated, adapters, self._average
        )
        self.validation = None
        if prepared.validation is not None:
            held_out, every = prepared.validation, config.validate_every
            self.validation = Validation(
                held_out.validation_loss,
                every,
                as_used,
                self.adapter_file,
                held_out.validation_facts,
            )
        self.callbacks: list[Callback] = [
            callback for callback in (self._average, self.validation) if callback is not None
        ]
        if config.sample_prompts:
            folder = output / SAMPLES
            self.callbacks.append(
                Previews(task.preview, config.sample_every, folder, as_used, report)
            )
        self.callbacks.append(StepAdapters(config.keep_adapters, as_used, self.adapter_file))

    def trainer(self, callbacks: Sequence[Callback], settings: dict[str, object]) -> Trainer[Any]:
        """The training loop with all of these."""
        config = self._config
        optimizer = make_optimizer(config, self._adapters.groups(config))
        return Trainer(
            self._train.loss,
            self._adapters.named_parameters(),
            optimizer,
            self._train.batches(config.batch_size),
            inputs=self._train.inputs,
            weigh=self._train.weight if self._task.weighs else None,
            cuda_graphs=config.cuda_graphs if self._task.repeats else 0,
            steps=config.steps,
            scheduler=make_scheduler(config, optimizer),
            gradient_accumulation=config.gradient_accumulation,
            max_grad_norm=config.max_grad_norm,
            scaler=tc.optim.GradScaler() if config.precision == "f16" else None,
            output=self._output,
            save_every=config.save_every,
            keep_checkpoints=config.keep_checkpoints,
            callbacks=callbacks,
            settings=settings,
            seed=config.seed,
        )

    def adapter_file(self, path: Path, step: int) -> AdapterFile:
        """A snapshot of the adapters, for a file that is written later."""
        metadata = training_metadata(self._config, step, len(self._train))
        return self._task.adapter_file(self._adapters, path, metadata)

    def conclude(self, step: int, report: Callable[[str], None]) -> None:
        """Write the finished adapter, and say what there is now."""
        output = self._output
        file = self.adapter_file(output / ADAPTER, step)
        file.write()
        report(f"adapter: {output / ADAPTER}")
        metadata = training_metadata(self._config, step, len(self._train))
        published = self._task.publish(self._adapters, output, metadata)
        if published is not None:
            report(f"adapter for other tools: {published}")
        idle = file.idle
        if idle:
            report(f"adapter: {len(idle)} layers have learnt nothing, the first is {idle[0]}")
        if self.validation is not None:
            best = self.validation
            report(f"best: {output / BEST} (step {best.best_step}, loss {best.best_loss:.4f})")
        if self._config.sample_prompts:
            report(f"previews: {output / SAMPLES}")

    def finish(self) -> None:
        """Leave the model with the parameters of its adapter files."""
        self._adapters.set_training(False)
        if self._average is not None:
            self._average.keep()


_KOHYA_PRECISIONS = {"f32": "no", "f16": "fp16", "bf16": "bf16"}


def training_metadata(config: TrainConfig, step: int, images: int) -> dict[str, str]:
    """The training metadata of an adapter file's header, under kohya's names."""
    side = config.resolution
    facts = {
        "ss_output_name": Path(config.output).name,
        "ss_sd_model_name": Path(config.weights).name or config.model,
        "ss_steps": step,
        "ss_max_train_steps": config.steps,
        "ss_num_train_images": images,
        "ss_total_batch_size": config.batch_size * config.gradient_accumulation,
        "ss_resolution": f"({side}, {side})" if side else None,
        "modelspec.resolution": f"{side}x{side}" if side else None,
        "ss_clip_skip": config.clip_skip,
        "ss_learning_rate": config.learning_rate,
        "ss_optimizer": config.optimizer,
        "ss_lr_scheduler": config.lr_scheduler,
        "ss_mixed_precision": _KOHYA_PRECISIONS[config.precision],
        "ss_min_snr_gamma": config.min_snr_gamma,
        "ss_noise_offset": config.noise_offset,
        "ss_seed": config.seed,
        "ss_training_comment": config.trigger,
        "ss_training_adapter": Path(config.training_adapter or "").name,
    }
    # Names of files may contain bytes that are not valid text.
    texts = {name: str(value).encode(errors="replace").decode() for name, value in facts.items()}
    return {name: text for name, text in texts.items() if facts[name] not in {None, ""}}


def _with_defaults(config: TrainConfig, family: type[Family]) -> TrainConfig:
    """The settings with the model's values for those that have none."""
    defaults = family.defaults(config)
    missing = {name: v for name, v in defaults.items() if getattr(config, name) is None}
    return config.with_(**missing)


def _in_steps(
    config: TrainConfig, data: Prepared[Any], noun: str, report: Callable[[str], None]
) -> TrainConfig:
    """The settings with the number of steps of their epochs."""
    epochs = config.epochs or 0
    batches = data.batches(config.batch_size).first_batch(epochs)
    steps = max(1, math.ceil(batches / config.gradient_accumulation))
    report(f"epochs: {epochs} of {counted(len(data), noun)}: {counted(steps, 'step')}")
    return config.with_(epochs=None, steps=steps)


def _require_steps_left(config: TrainConfig, step: int) -> None:
    if step > config.steps:
        raise ConfigError(
            f"resume: the checkpoint is of step {step}, and the run has {config.steps}: it is "
            f"done; give more than {step} --steps, or more --epochs, to train on"
        )


def _logs(config: TrainConfig, output: Path) -> list[Callback]:
    logs: list[Callback] = [
        CsvLog(output / LOG, config.log_every),
        JsonLog(output / JSON_LOG, config.log_every),
    ]
    if config.tensorboard:
        logs.append(TensorBoardLog(output / TENSORBOARD, config.log_every))
    return logs


def _make_writable(folder: Path) -> None:
    """Make a folder; raises now rather than after a model has been loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def _draw_curve(output: Path, report: Callable[[str], None]) -> None:
    rows = read_log(output / LOG)
    steps, losses = [int(row["step"]) for row in rows], [float(row["loss"]) for row in rows]
    validation = [
        (row["step"], row["validation_loss"])
        for row in read_json_log(output / JSON_LOG)
        if row.get("validation_loss") is not None
    ]
    try:
        plot.loss_curve(output / CURVE, steps, losses, validation=validation)
    except ModuleNotFoundError as error:
        report(f"no loss curve: {error}")
    else:
        report(f"loss curve: {output / CURVE}")
