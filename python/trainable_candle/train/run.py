"""From a configuration to a trained adapter: what `train-lora` does."""

from __future__ import annotations

import errno
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trainable_candle as tc
from trainable_candle import plot, recipes
from trainable_candle.data import ShuffledBatches, check_folder
from trainable_candle.files import write_atomically
from trainable_candle.train import state as run_state
from trainable_candle.train.callbacks import Callback, CsvLog, ProgressBar, read_log
from trainable_candle.train.trainer import Trainer

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Sequence

    from trainable_candle import AdapterSet, Var
    from trainable_candle.models import Model
    from trainable_candle.optim import Optimizer
    from trainable_candle.optim.lr_scheduler import LRScheduler
    from trainable_candle.recipes.base import Prepared, Recipe
    from trainable_candle.train.config import TrainConfig

ADAPTER: Final = "adapter.safetensors"
CONFIG: Final = "config.yaml"
LOG: Final = "train.csv"
CURVE: Final = "loss.png"

# Settings that a resumed run may change without becoming another run.
_FREE: Final = frozenset(
    {"output", "resume", "threads", "save_every", "keep_checkpoints", "log_every"}
)


@dataclass(frozen=True)
class TrainingRun:
    """What `train_adapter` leaves behind in memory."""

    recipe: Recipe
    """The model with the adapter on it."""
    adapter: AdapterSet
    output: Path
    step: int
    """Optimizer steps taken, earlier parts of a resumed run included."""
    completed: bool
    """Whether the last step was reached; only then the adapter file is written."""
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
    """Train an adapter; writes it, its configuration, log, loss curve and checkpoints to `output`.

    Args:
        config: `model`, `dataset` and `output` must be given, `weights` too unless the package
            ships the model's.
        callbacks: called after those that write the log and show the progress.
        progress: whether to show a progress bar.
        report: gets a line at each stage.

    Raises:
        ConfigError, DatasetError, WeightsFormatError, OSError: before the first step.
        NonFiniteError: the loss or the gradient is NaN or infinite.
    """
    config.require("model", "dataset", "output")
    weights = recipes.weights_of(config.model, config.weights)
    output = Path(config.output).expanduser()
    start = run_state.find(output, config.resume) if config.resume else None
    run_state.refuse_later(output, run_state.read_state(start).step if start else -1)

    pictures = check_folder(config.dataset, config.caption)
    report(f"dataset: {len(pictures)} pictures in {config.dataset}")
    _make_writable(output)

    if config.threads is not None:
        tc.set_num_threads(config.threads)
    tc.manual_seed(config.seed)
    recipe = recipes.load(config.model, weights, config.precision, config.device)
    prepared = recipe.prepare(pictures, config)
    adapter = _attach(recipe.model, config, recipe.default_targets)
    parameters = adapter.named_parameters()
    count = sum(var.numel() for var in parameters.values())
    report(f"adapter: {count} parameters in {len(parameters)} tensors")

    settings = {**asdict(config), "pictures": len(pictures)}
    trainer = _trainer(config, adapter, prepared, settings, callbacks, progress=progress)
    if start is not None:
        earlier = trainer.resume(start)
        report(f"resume: from step {trainer.step} of {config.steps} ({start})")
        for line in _changes(earlier, settings):
            report(f"resume: {line}")
    write_atomically(output / CONFIG, config.with_(resume=None).to_yaml())
    adapter.set_training(True)
    completed = trainer.train()
    adapter.set_training(False)
    if completed:
        adapter.save(output / ADAPTER, metadata={"model": config.model})
        report(f"adapter: {output / ADAPTER}")
        _draw_curve(output, report)
    return TrainingRun(recipe, adapter, output, trainer.step, completed, trainer.stopped_by)


def _attach(model: Model, config: TrainConfig, targets: Sequence[str]) -> AdapterSet:
    if config.gradient_checkpointing != "none":
        model.enable_gradient_checkpointing(config.gradient_checkpointing)
    return model.add_adapter(
        tc.LoraConfig(
            r=config.rank,
            lora_alpha=float(config.rank) if config.alpha is None else config.alpha,
            target_modules=config.target_modules or list(targets),
            exclude_modules=config.exclude_modules,
            lora_dropout=config.lora_dropout,
            use_dora=config.adapter == "dora",
            use_rslora=config.rslora,
        )
    )


def _trainer(
    config: TrainConfig,
    adapter: AdapterSet,
    prepared: Prepared,
    settings: dict[str, object],
    callbacks: Sequence[Callback],
    *,
    progress: bool,
) -> Trainer[Any]:
    output = Path(config.output).expanduser()
    parameters = adapter.named_parameters()
    optimizer = make_optimizer(config, list(parameters.values()))
    bar = [ProgressBar()] if progress else []
    return Trainer(
        prepared.loss,
        parameters,
        optimizer,
        ShuffledBatches(len(prepared), config.batch_size, config.seed),
        steps=config.steps,
        scheduler=make_scheduler(config, optimizer),
        gradient_accumulation=config.gradient_accumulation,
        max_grad_norm=config.max_grad_norm,
        scaler=tc.optim.GradScaler() if config.precision == "f16" else None,
        output=output,
        save_every=config.save_every,
        keep_checkpoints=config.keep_checkpoints,
        callbacks=[
            CsvLog(output / LOG, config.log_every),
            _SaveAdapter(adapter, config.model),
            *bar,
            *callbacks,
        ],
        settings=settings,
    )


def make_optimizer(config: TrainConfig, parameters: Sequence[Var]) -> Optimizer:
    """The optimizer that a configuration names, over `parameters`."""
    kinds: dict[str, Callable[..., Optimizer]] = {
        kind.__name__.lower(): kind
        for kind in (
            tc.optim.AdamW8bit,
            tc.optim.AdamW,
            tc.optim.Adam8bit,
            tc.optim.Adam,
            tc.optim.Lion8bit,
            tc.optim.Lion,
            tc.optim.SGD,
        )
    }
    kind = kinds[config.optimizer]
    return kind(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)


def make_scheduler(config: TrainConfig, optimizer: Optimizer) -> LRScheduler:
    """The learning-rate schedule that a configuration names, for `optimizer`."""
    schedules = tc.optim.lr_scheduler
    kinds: dict[str, Callable[..., LRScheduler]] = {
        "constant": schedules.constant,
        "linear": schedules.linear,
        "cosine": schedules.cosine,
        "polynomial": schedules.polynomial,
    }
    kind = kinds[config.lr_scheduler]
    return kind(optimizer, total_steps=config.steps, warmup_steps=config.warmup_steps)


class _SaveAdapter(Callback):
    """Puts the adapter, as other tools read it, into every checkpoint."""

    def __init__(self, adapter: AdapterSet, model: str) -> None:
        self._adapter = adapter
        self._model = model

    def on_save(self, trainer: Trainer[Any], folder: Path) -> None:  # noqa: ARG002
        self._adapter.save(folder / ADAPTER, metadata={"model": self._model})


def _make_writable(folder: Path) -> None:
    """Make a folder, and complain now rather than after a model has been loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def _changes(earlier: dict[str, object], settings: dict[str, object]) -> list[str]:
    """The settings in which a resumed run differs from the one that it continues."""
    return [
        f"{name} is {value!r}, was {earlier[name]!r}: the run will not repeat the earlier one"
        for name, value in settings.items()
        if name not in _FREE and name in earlier and earlier[name] != value
    ]


def _draw_curve(output: Path, report: Callable[[str], None]) -> None:
    rows = read_log(output / LOG)
    steps, losses = [int(row["step"]) for row in rows], [float(row["loss"]) for row in rows]
    try:
        plot.loss_curve(output / CURVE, steps, losses)
    except ModuleNotFoundError as error:
        report(f"no loss curve: {error}")
    else:
        report(f"loss curve: {output / CURVE}")
