"""Trains an adapter with given settings, as the command `train-lora` does."""

from __future__ import annotations

import errno
import math
import os
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import trainable_candle as tc
from trainable_candle import families, plot
from trainable_candle.attempts import StepCounter, report_plan, run_planned
from trainable_candle.data.cache import fingerprint
from trainable_candle.data.folder import counted
from trainable_candle.distributed import device_of
from trainable_candle.distributed.agreement import require_same
from trainable_candle.distributed.group import Group, make_group
from trainable_candle.distributed.streamed import require_peers, require_streams, shared_streams
from trainable_candle.errors import ConfigError
from trainable_candle.files import held, write_atomically
from trainable_candle.outputs import ADAPTER as STEM
from trainable_candle.outputs import CONFIG, CURVE, JSON_LOG, LOG
from trainable_candle.placement import Placement, choose
from trainable_candle.session import Session, adapter_path
from trainable_candle.settings import TrainConfig
from trainable_candle.settings.checks import check_groups, check_settings, differences
from trainable_candle.settings.config import settings as known_settings
from trainable_candle.settings.prompts import expanded
from trainable_candle.tasks.budget import KEPT_ON_RESUME, find_budget, is_open, make_plan
from trainable_candle.tasks.checks import require_apart
from trainable_candle.tasks.pinned import probed
from trainable_candle.tasks.w8a8 import multiplying_codes
from trainable_candle.train import state as run_state
from trainable_candle.train.callbacks import Callback, ProgressBar
from trainable_candle.train.logs import CsvLog, JsonLog, TensorBoardLog, read_json_log, read_log
from trainable_candle.train.pissa import require_same_start
from trainable_candle.train.wandb_log import WandbLog

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Iterator, Sequence

    from trainable_candle.distributed.world import World
    from trainable_candle.tasks.task import Family, Prepared, Split, Task
    from trainable_candle.train.adapters import Adapters

ADAPTER: Final = f"{STEM}.safetensors"
"""The file of the finished adapter if `--name` is not given."""
TENSORBOARD: Final = "tensorboard"
"""The folder of TensorBoard's logs."""
LOCK: Final = ".lock"
"""The file that reserves an output folder for one run."""


@dataclass(frozen=True)
class TrainingRun:
    """What `train_adapter` returns."""

    task: Task
    """The task with the model. Its adapters have the values of the adapter file: averages, if the
    run kept averages."""
    adapter: Adapters
    """The adapters of this model."""
    output: Path
    """The output folder."""
    step: int
    """The number of optimizer steps, including the steps before the run was resumed."""
    completed: bool
    """Whether the last step was reached, or the run ended by `early_stop`; the adapter file is
    written only then."""
    stopped_by: signal.Signals | None
    """The signal that ended the run, if one did."""
    file: str = ADAPTER
    """The name of the adapter's file."""

    @property
    def adapter_path(self) -> Path:
        """The adapter's file."""
        return self.output / self.file


def train_adapter(
    config: TrainConfig,
    *,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    report: Callable[[str], None] = print,
    world: World | None = None,
) -> TrainingRun:
    """Train an adapter.

    The folder `output` gets the adapter, the configuration, logs, previews and checkpoints.

    Args:
        config: `model`, `dataset` and `output` must be given; `weights` too, unless the package
            has weights for the model.
        callbacks: called after the callbacks that write the logs and show the progress.
        progress: whether to show a progress bar.
        report: gets lines about each stage.
        world: the processes that train together, and the rank of this process; only the process of
            rank 0 writes, draws previews, calls `callbacks` and reports. None: this process trains
            alone.

    Raises:
        ConfigError, DatasetError, WeightsFormatError, OutOfMemoryError, OSError: settings, data or
            weights cannot be used, or memory is too small. All are checked before the first step,
            but memory can also run out later, and files can become unusable.
        CudaUnavailableError, DeviceError: there is no such device; raised before anything is read.
        ArgumentError: `device` names one GPU, such as `cuda:1`, for several processes.
        ModuleNotFoundError: a package that the settings need is not installed; the message says how
            to install it.
        TypeError: `config` is not a `TrainConfig`.
        NonFiniteError: the loss or the gradient is NaN or infinite.
        DistributedError: another process of the run is missing, has other settings or files, or
            has failed.
    """
    if not isinstance(config, TrainConfig):
        raise TypeError(
            f"train_adapter: config is {type(config).__name__}, expected a TrainConfig; "
            "TrainConfig.from_mapping makes one of a dict"
        )
    config.require("model", "dataset", "output")
    config = config.with_(sample_prompts=expanded(config.sample_prompts))
    family = families.find(config.model)
    check_groups(config, family.groups)
    if config.from_peers:
        require_peers(1 if world is None else world.local_size)
    config = _with_defaults(config, family)
    placement = choose(device_of(world, config.device), config.precision)
    config = config.with_(device=placement.device, precision=placement.precision)
    config = _with_share(config, world)
    check_settings(config)
    require_apart(config, Path(config.output).expanduser())
    group = make_group(
        world,
        config.device,
        _agreed(config),
        narrow=config.reduce == "bf16",
        step_seconds=config.step_limit,
    )
    try:
        return _train_in(group, family, config, placement, (callbacks, progress), report)
    except BaseException as error:
        group.fail(f"rank {group.rank}: {str(error) or type(error).__name__}")
        raise
    finally:
        group.close()


def _train_in(
    group: Group,
    family: type[Family],
    config: TrainConfig,
    placement: Placement,
    callbacks_and_progress: tuple[Sequence[Callback], bool],
    report: Callable[[str], None],
) -> TrainingRun:
    """Check the settings, read the data, and train, as one of a group of processes.

    For errors see `train_adapter`.

    Args:
        group: the processes.
        family: the model's family.
        config: the settings, with the model's defaults and the chosen device filled in.
        placement: the choice of device and precision, for the log.
        callbacks_and_progress: the caller's callbacks, and whether to show a progress bar.
        report: gets lines about each stage.
    """
    callbacks, progress = callbacks_and_progress
    is_first = group.rank == 0
    if not is_first:
        callbacks, progress, report = (), False, _silent
    # Query the device before anything is read, so that a missing device is reported at once.
    budget = find_budget(group, config)
    weights = families.weights_of(config.model, config.weights)
    output = Path(config.output).expanduser()
    if is_first and run_state.needs_restoring(output):
        with held(output / LOCK, f"output: {output} is in use"):
            run_state.restore(output)
    group.barrier()
    start, step, config = _resumed(config, output)
    # `_with_share` did this, but `_resumed` may have set the batch size of an earlier plan since.
    config = _accumulating(config, group.size)
    first_callbacks: list[Callback] = _logs(config, output) if is_first else []
    task = family(weights, config.precision, config.device, config).task()
    task.check(report)
    data = task.read(report)
    if group.size > 1:
        _require_same_files(group, weights, data)
    report(str(placement))
    estimate = partial(task.estimate, data=data, limit=budget.memory)
    # The samples of an epoch that this process trains on.
    samples = max(1, task.samples(data) // group.size)
    planned = partial(make_plan, config, family.groups, estimate=estimate, samples=samples)
    plan = planned(budget)
    # If the plan needs pinned memory, find out how much the system really gives.
    probed_budget = probed(budget, plan, group, report)
    if probed_budget != budget:
        budget, plan = probed_budget, planned(probed_budget)
    report_plan(plan, budget, report)
    counter = StepCounter()
    first_callbacks.append(counter)
    with ExitStack() as stack:
        if is_first:
            stack.enter_context(_held_output(output, step))
        if progress:
            bar = ProgressBar(unit=task.counts)
            first_callbacks, report = [*first_callbacks, bar], bar.beside(report)
        # The run's own callbacks (previews, checkpoints) come between these two lists.
        both = (first_callbacks, callbacks)
        run = partial(_train, group, family, weights, start, data, both, report)

        def may_repeat() -> bool:
            # Only one process alone can repeat a run. A checkpoint of the first attempt would look
            # newer than those of the second.
            saved = run_state.checkpoints(output)
            return group.size == 1 and all(run_state.step_of(path) <= step for path in saved)

        return run_planned(run, plan, budget, planned, counter, may_repeat, report)


@contextmanager
def _held_output(output: Path, step: int) -> Iterator[None]:
    """Reserve the output folder for this run, which continues from `step`."""
    _make_output(output)
    with held(output / LOCK, f"output: {output} is in use"):
        # Another run may have used the folder since `_resumed` checked it.
        run_state.refuse_later(output, step)
        run_state.remove_leftovers(output)
        yield


def _resumed(config: TrainConfig, output: Path) -> tuple[Path | None, int, TrainConfig]:
    """Return the checkpoint to continue from (or None), its step (or -1), and the settings.

    Settings that the earlier run planned by itself and that affect results are kept, unless the
    user sets them now.

    Raises:
        ConfigError: there is no checkpoint that `resume` names; its step is later than the last
            step of this run; only one of the two runs starts with PiSSA; the folder has checkpoints
            of later steps; or the run starts anew and the folder has the finished adapter of
            another run.
    """
    start = run_state.find(output, config.resume) if config.resume else None
    state = run_state.read_state(start) if start else None
    step = state.step if state else -1
    if state is not None:
        require_same_start(config, state.settings)
    if config.epochs is None:
        _require_steps_left(config, step)
    run_state.refuse_later(output, step)
    finished = adapter_path(config, output)
    if start is None and finished.exists():
        raise ConfigError(
            f"output: {output} holds {finished.name} of an earlier run; choose another --output or "
            "--name, or move the file"
        )
    earlier = state.settings if state else {}
    planned = {name: earlier[name] for name in KEPT_ON_RESUME if earlier.get(name) is not None}
    kept = {name: value for name, value in planned.items() if is_open(config, name)}
    # Without a checkpoint, clear `resume`, so that checks and estimates are those of a new run.
    return start, step, config.with_(**kept, resume=config.resume if start else None)


def _train(
    group: Group,
    family: type[Family],
    weights: Path,
    start: Path | None,
    data: Split[Any],
    callbacks: tuple[Sequence[Callback], Sequence[Callback]],
    report: Callable[[str], None],
    config: TrainConfig,
) -> TrainingRun:
    """Load the model, encode the data, train, and write to the output folder.

    The caller has reserved the folder for this run.

    Args:
        group: the processes that train together.
        family: the model's family.
        weights: the model's weights.
        start: the checkpoint to continue from; None for a new run.
        data: the data that the task has read.
        callbacks: the callbacks to call before the run's own, and those to call after.
        report: gets lines about each stage.
        config: the settings, complete with those of the plan.
    """
    require_streams(config)  # with `stream_from: peers`, there must be streamed weights
    task = family(weights, config.precision, config.device, config).task()
    output = Path(config.output).expanduser()
    if config.threads is not None:
        tc.set_num_threads(config.threads)
    digest = fingerprint(data.train.listing())
    with shared_streams(group, peers=config.from_peers):  # one copy for a machine's processes
        prepared = task.prepare(data, report, group)
    if config.epochs is not None:
        config = _in_steps(config, prepared.train, task.noun, group.size, report)
        _require_steps_left(config, run_state.read_state(start).step if start else -1)
    # Training must not depend on how many random numbers the preparation drew.
    tc.manual_seed(config.seed)
    with shared_streams(group, peers=config.from_peers):
        adapters = task.attach(fresh=start is None)
    if config.initial_adapter and start is None:
        adapters.load(config.initial_adapter_path)
        report(f"adapter: starts from {config.initial_adapter}")
    parameters = adapters.named_parameters()
    count = sum(var.numel() for var in parameters.values())
    report(f"adapter: {count} parameters in {len(parameters)} tensors")

    session = Session(group, config, task, adapters, prepared, output, report)
    session.announce(report)
    settings = {
        **config.portable(output),
        "examples": len(prepared.train),
        "digest of the examples": digest,
    }
    before, after = callbacks
    trainer = session.trainer([*before, *session.callbacks, *after], settings)
    if start is not None:
        earlier = trainer.resume(start)
        report(f"resume: from step {trainer.step} of {config.steps} ({start})")
        for line in differences(earlier, settings):
            report(f"resume: {line}")
    if group.rank == 0:
        write_atomically(output / CONFIG, config.with_(resume=None).to_yaml(output))
    adapters.set_training(True)
    plot.prepare()  # imports matplotlib in a thread while training runs
    with multiplying_codes(config):
        completed = trainer.train()
    session.finish()
    if completed and group.rank == 0:
        session.conclude(trainer.step, report)
        _draw_curve(output, report)
        report(f"settings and logs: {output / CONFIG}, {LOG}, {JSON_LOG}")
    if config.from_peers:
        # No process may free its slices of the weights while another process still reads them.
        group.barrier()
    file = adapter_path(config, output).name
    return TrainingRun(task, adapters, output, trainer.step, completed, trainer.stopped_by, file)


def _with_defaults(config: TrainConfig, family: type[Family]) -> TrainConfig:
    """Return the settings, with the model's defaults for those that have no value."""
    defaults = {**family.defaults(config)}
    if config.finds_rate:
        defaults["learning_rate"] = 1.0  # the optimizer multiplies the rate that it finds by this
    used = {name: v for name, v in defaults.items() if getattr(config, name) is None}
    return config.with_(**used)


def _with_share(config: TrainConfig, world: World | None) -> TrainConfig:
    """Return the settings with this process's share of the effective batch and of the CPU threads.

    The share of the effective batch sets the gradient accumulation; see `_accumulating`.

    Raises:
        ConfigError: the effective batch cannot be divided evenly among the processes.
    """
    config = _accumulating(config, 1 if world is None else world.size)
    if world is not None and config.threads is None:
        config = config.with_(threads=max(1, tc.get_num_threads() // world.local_size))
    return config


def _accumulating(config: TrainConfig, size: int) -> TrainConfig:
    """Return the settings with the gradient accumulation of each of `size` processes.

    It follows from the effective batch; without one, the settings are unchanged. While the batch
    size is `auto`, a batch counts as one sample.

    Raises:
        ConfigError: the effective batch cannot be divided evenly among the processes.
    """
    effective = config.effective_batch
    if effective is None:
        return config
    batch_size = config.batch_size or 1  # 0 is `auto`
    at_once = batch_size * size
    if effective % at_once:
        raise ConfigError(
            f"effective_batch: {effective} samples a step cannot be divided among {size} "
            f"processes of batch size {batch_size}; give a multiple of {at_once}"
        )
    return config.with_(gradient_accumulation=effective // at_once)


def _agreed(config: TrainConfig) -> dict[str, str]:
    """Return the settings that must be equal in all processes.

    Machines may have their files in different folders, so paths other than `resume` are left out;
    `_require_same_files` compares the files.
    """
    paths = {name for name, (_, setting) in known_settings().items() if setting.path}
    may_differ = (paths - {"resume"}) | {"device", "threads"}
    return {name: str(value) for name, value in asdict(config).items() if name not in may_differ}


def _require_same_files(group: Group, weights: Path, data: Split[Any]) -> None:
    """Check that all processes have read the same files, perhaps from different folders.

    Raises:
        DistributedError: the files of a process differ.
    """
    files = sorted(weights.rglob("*")) if weights.is_dir() else [weights]
    folder = weights if weights.is_dir() else weights.parent
    # Compare sizes only, because hashing the weights would take minutes.
    sizes = {
        file.relative_to(folder).as_posix(): f"{file.stat().st_size} bytes"
        for file in files
        if file.is_file()
    }
    require_same(group, "weights", sizes)
    require_same(group, "data", data.train.listing())
    if data.validation is not None:
        require_same(group, "validation data", data.validation.listing())


def _silent(_line: str) -> None:
    """Ignore a line of a process that does not report."""


def _in_steps(
    config: TrainConfig,
    data: Prepared[Any],
    noun: str,
    size: int,
    report: Callable[[str], None],
) -> TrainConfig:
    """Return the settings, with their epochs converted to steps of `size` processes."""
    epochs = config.epochs or 0
    # `first_batch(n)` is the number of the first batch of epoch n. Batches and epochs count from 0,
    # so this is the number of batches in the epochs 0 to `epochs` - 1.
    batches = data.batches(config.batch_size).first_batch(epochs)
    steps = max(1, math.ceil(batches / (config.gradient_accumulation * size)))
    report(f"epochs: {epochs} of {counted(len(data), noun)}: {counted(steps, 'step')}")
    return config.with_(epochs=None, steps=steps)


def _require_steps_left(config: TrainConfig, step: int) -> None:
    """Check that the step of a checkpoint is not after the last step of the run.

    Raises:
        ConfigError: the step is after the last step.
    """
    if step > config.steps:
        raise ConfigError(
            f"resume: the checkpoint is of step {step}, and the run has {config.steps} steps: "
            f"the run is done; to train on, give more than {step} --steps, or more --epochs"
        )


def _logs(config: TrainConfig, output: Path) -> list[Callback]:
    """Return the callbacks that write the logs."""
    logs: list[Callback] = [
        CsvLog(output / LOG, config.log_every),
        JsonLog(output / JSON_LOG, config.log_every),
    ]
    if config.tensorboard:
        logs.append(TensorBoardLog(output / TENSORBOARD, config.log_every))
    if config.wandb is not None:
        name = config.name or output.resolve().name
        logs.append(WandbLog(config.wandb, name, output, config.log_every))
    return logs


def _make_output(folder: Path) -> None:
    """Make a folder, and check before a model is loaded that the folder can be written to.

    Raises:
        OSError: the folder cannot be made or written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def _draw_curve(output: Path, report: Callable[[str], None]) -> None:
    """Draw the loss curve from the logs, if matplotlib is installed."""
    rows = read_log(output / LOG)
    if not rows:
        return  # A finished run that is resumed into a new folder has no step to draw.
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
