"""A resumed run equals an uninterrupted one, bit for bit (CPU, f32).

A change of the adapter is rejected. A change of another setting that affects results is reported.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import trainable_candle as tc
from trainable_candle.data import ShuffledBatches
from trainable_candle.errors import ConfigError, WeightsFormatError
from trainable_candle.run import ADAPTER, CONFIG, LOG, train_adapter
from trainable_candle.settings.training import OPTIMIZERS
from trainable_candle.train import Callback, StepReport, TrainConfig, Trainer
from trainable_candle.train.logs import read_log
from trainable_candle.train.optimizers import make_optimizer
from trainable_candle.train.state import checkpoint_path, checkpoints

STEPS = 12
"""The steps of an uninterrupted run of a `Problem`. The fixture `config` has the same number."""
Train = Callable[..., dict[str, bytes]]
"""The type of the fixture `train`, a function that trains with a configuration and callbacks and
returns the bytes of the adapter's parameters by name."""


class StopAfter(Callback):
    """Stops the run after step `step`, as Ctrl-C would, and keeps the loss of each step."""

    def __init__(self, step: int = STEPS) -> None:
        self._step = step
        self.losses: list[float] = []

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        self.losses.append(report.loss)
        if report.step == self._step:
            trainer.stop()


class Problem:
    """A regression with two layers, whose noise and dropout draw random numbers at every step."""

    def __init__(self, config: TrainConfig, output: Path, stop_after: int = STEPS) -> None:
        tc.manual_seed(config.seed)
        self.parameters = {
            "hidden": tc.Var(tc.randn((64, 80)) * 0.1),
            "out": tc.Var(tc.randn((1, 64)) * 0.1),
        }
        optimizer = make_optimizer(config, [(list(self.parameters.values()), config.learning_rate)])
        self.callback = StopAfter(stop_after)
        self.trainer = Trainer(
            self.loss,
            self.parameters,
            optimizer,
            ShuffledBatches(items=10, batch_size=4, seed=config.seed),
            steps=STEPS,
            scheduler=tc.optim.lr_scheduler.cosine(optimizer, total_steps=STEPS, warmup_steps=3),
            gradient_accumulation=2,
            max_grad_norm=0.5,
            output=output,
            callbacks=[self.callback],
        )
        self.data = np.random.default_rng(0).normal(size=(10, 80)).astype(np.float32)

    def loss(self, rows: npt.NDArray[np.int64]) -> tc.Tensor:
        functional = tc.nn.functional
        x = tc.tensor(self.data[rows]) + tc.randn((len(rows), 80)) * 0.1
        hidden = functional.dropout(functional.linear(x, self.parameters["hidden"]).relu(), 0.2)
        target = tc.tensor(self.data[rows].sum(1, keepdims=True))
        return functional.mse_loss(functional.linear(hidden, self.parameters["out"]), target)

    def bits(self) -> dict[str, bytes]:
        return {name: var.detach().numpy().tobytes() for name, var in self.parameters.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_resumes_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    config = TrainConfig(optimizer=optimizer, learning_rate=1e-2, seed=3)
    uninterrupted = Problem(config, tmp_path / "uninterrupted")
    assert uninterrupted.trainer.train()
    untrained = Problem(config, tmp_path / "untrained").bits()
    assert all(untrained[name] != trained for name, trained in uninterrupted.bits().items())

    losses: list[float] = []
    output = tmp_path / "interrupted"
    # The step after which each segment of the run stops.
    for stop_after in (1, 5, 11, STEPS):
        segment = Problem(config, output, stop_after)
        if losses:  # not in the first segment
            segment.trainer.resume(checkpoints(output)[-1])
        segment.trainer.train()
        # Random numbers that are drawn between two segments of the run must not change the result.
        tc.randn((7,))
        losses += segment.callback.losses
    assert losses == uninterrupted.callback.losses
    # `segment` is the last one, which has reached the end.
    assert segment.bits() == uninterrupted.bits()


def log_rows(output: str) -> list[tuple[str, ...]]:
    """Return the rows of a run's log without the times."""
    rows = read_log(Path(output) / LOG)
    return [(row["step"], row["loss"], row["lr"], row["grad_norm"]) for row in rows]


@pytest.mark.parametrize(
    "settings",
    [
        {"adapter": "lora"},
        {"adapter": "dora"},
        {"stochastic_rounding": True},
        {"stochastic_rounding": True, "optimizer": "adamw"},
    ],
    ids=["lora", "dora", "stochastic_rounding", "stochastic_rounding-adamw"],
)
@pytest.mark.parametrize("stop_after", [1, 7])
def test_a_run_resumes_bit_for_bit(
    config: TrainConfig,
    train: Train,
    settings: dict[str, Any],
    stop_after: int,
    tmp_path: Path,
) -> None:
    config = config.with_(**settings)
    expected = train(config)
    interrupted = config.with_(output=str(tmp_path / "interrupted"))
    assert train(interrupted, StopAfter(stop_after)) != expected
    assert not (Path(interrupted.output) / ADAPTER).exists()
    # The number of threads does not change results.
    assert train(interrupted.with_(resume="latest", threads=1)) == expected
    assert log_rows(interrupted.output) == log_rows(config.output)
    first, second = (tc.load_file(Path(run.output) / ADAPTER) for run in (config, interrupted))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        np.testing.assert_array_equal(tensor.numpy(), second[name].numpy())


def test_a_run_can_resume_from_an_older_checkpoint_only_in_another_folder(
    config: TrainConfig, train: Train, tmp_path: Path
) -> None:
    expected = train(config)
    # `config` saves a checkpoint every 5 steps, so this is the first one.
    older = checkpoint_path(Path(config.output), 5)
    with pytest.raises(ConfigError, match="of an earlier run"):
        train(config.with_(resume=str(older)))
    again = config.with_(resume=str(older), output=str(tmp_path / "again"))
    assert train(again) == expected


def test_resuming_with_another_adapter_is_rejected(config: TrainConfig, train: Train) -> None:
    train(config, StopAfter(3))
    for change in ({"rank": 8}, {"adapter": "dora"}, {"target_modules": ["to_q"]}):
        with pytest.raises(WeightsFormatError, match="resume with the settings that the run was"):
            train(config.with_(resume="latest", **change))
    # The rejected attempts changed no file. The file of the run has the values that the run chose
    # for settings that were `auto`.
    assert TrainConfig.from_yaml(Path(config.output) / CONFIG) == config.with_(
        base_precision="same", gradient_checkpointing="none"
    )
    train(config.with_(resume="latest"))


def test_only_changed_settings_that_affect_results_are_reported(
    config: TrainConfig, train: Train
) -> None:
    train(config, StopAfter(3))
    lines: list[str] = []
    changed = config.with_(resume="latest", learning_rate=0.5, save_every=1)
    train_adapter(changed, progress=False, report=lines.append)
    assert [line for line in lines if "was" in line] == [
        "resume: learning_rate is 0.5, was 0.01: the run will not repeat the earlier one"
    ]


@pytest.mark.parametrize(("scheduler", "reports"), [("constant", 0), ("cosine", 1)])
def test_more_steps_are_reported_only_if_the_schedule_depends_on_them(
    config: TrainConfig, train: Train, scheduler: str, reports: int
) -> None:
    config = config.with_(lr_scheduler=scheduler)
    train(config)
    lines: list[str] = []
    longer = config.with_(steps=13, resume="latest")
    train_adapter(longer, progress=False, report=lines.append)
    assert sum("steps is 13, was 12: the run will not repeat" in line for line in lines) == reports
