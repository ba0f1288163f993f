"""The training loop on small problems, most of them with an answer that numpy computes.

Tests also check callbacks, checkpoints, and steps that fail or are skipped.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import trainable_candle as tc
from trainable_candle.draws import drawn
from trainable_candle.errors import NonFiniteError
from trainable_candle.train import Callback, StepReport, Trainer
from trainable_candle.train.trainer import MAX_SKIPPED

Array = npt.NDArray[np.float32]
X: Array = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
Y: Array = X @ np.array([1.0, -2.0, 0.5], dtype=np.float32) + 3


class Slices:
    """Batches of `size` consecutive rows of the data; after the last row, the first row follows."""

    def __init__(self, size: int) -> None:
        self._size = size

    def batch(self, index: int) -> npt.NDArray[np.int64]:
        return np.arange(index * self._size, (index + 1) * self._size) % len(X)


class Recorder(Callback):
    """Records reports and, in order, events; several recorders can share the list `events`."""

    def __init__(self, name: str = "", events: list[str] | None = None) -> None:
        self.name = name
        self.events = [] if events is None else events
        self.reports: list[StepReport] = []

    def on_train_begin(self, trainer: Trainer[Any]) -> None:
        self.events.append(f"{self.name}begin {trainer.step}")

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        assert trainer.step == report.step
        self.events.append(f"{self.name}step {report.step}")
        self.reports.append(report)

    def on_save(self, trainer: Trainer[Any], folder: Path) -> None:
        assert folder.is_dir()
        self.events.append(f"{self.name}save {trainer.step}")

    def on_train_end(self, trainer: Trainer[Any]) -> None:
        self.events.append(f"{self.name}end {trainer.step}")


def mean_squared_error(weight: tc.Var, rows: npt.NDArray[np.int64]) -> tc.Tensor:
    residual = (tc.tensor(X[rows]) * weight).sum(1) - tc.tensor(Y[rows])
    return (residual * residual).mean()


def regression_trainer(weight: tc.Var, size: int = 8, **options: Any) -> Trainer[Any]:
    """Return a trainer of `mean_squared_error`, for three steps unless `options` say otherwise."""
    settings = {"steps": 3, **options}
    optimizer = tc.optim.SGD([weight], lr=settings.pop("lr", 0.1))
    return Trainer(
        lambda rows: mean_squared_error(weight, rows),
        {"weight": weight},
        optimizer,
        Slices(size),
        **settings,
    )


def gradient(weight: Array, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the gradient of `mean_squared_error`."""
    x, y = X[rows].astype(np.float64), Y[rows].astype(np.float64)
    result: npt.NDArray[np.float64] = 2 * x.T @ (x @ weight - y) / len(rows)
    return result


def test_steps_are_gradient_descent() -> None:
    weight, recorder = tc.Var(np.zeros(3, np.float32)), Recorder()
    assert regression_trainer(weight, steps=5, callbacks=[recorder]).train()
    expected = np.zeros(3)
    for report in recorder.reports:
        slope = gradient(expected, Slices(8).batch(report.step - 1))
        assert report.grad_norm == pytest.approx(np.linalg.norm(slope), rel=1e-5)
        expected = expected - 0.1 * slope
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-5)


def test_four_accumulated_batches_equal_one_batch_of_their_rows() -> None:
    big, small = (tc.Var(np.zeros(3, np.float32)) for _ in range(2))
    big_recorder, small_recorder = Recorder(), Recorder()
    regression_trainer(big, size=12, callbacks=[big_recorder]).train()
    regression_trainer(small, size=3, gradient_accumulation=4, callbacks=[small_recorder]).train()
    np.testing.assert_allclose(small.detach().numpy(), big.detach().numpy(), rtol=1e-6)
    for of_big, of_small in zip(big_recorder.reports, small_recorder.reports, strict=True):
        assert of_big.loss == pytest.approx(of_small.loss, rel=1e-6)
        assert of_big.grad_norm == pytest.approx(of_small.grad_norm, rel=1e-6)


def test_clipping_shortens_the_step_and_the_report_has_the_norm_before_clipping() -> None:
    weight, recorder = tc.Var(np.zeros(3, np.float32)), Recorder()
    regression_trainer(weight, steps=1, lr=1.0, max_grad_norm=0.25, callbacks=[recorder]).train()
    slope = gradient(np.zeros(3, np.float32), Slices(8).batch(0))
    assert np.linalg.norm(slope) > 1
    assert recorder.reports[0].grad_norm == pytest.approx(np.linalg.norm(slope), rel=1e-5)
    expected = -0.25 * slope / np.linalg.norm(slope)
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-4)


class Uneven:
    """Batches with one row and batches with five rows, in turn."""

    def batch(self, index: int) -> npt.NDArray[np.int64]:
        first = 6 * (index // 2)
        return np.arange(first, first + 1) if index % 2 == 0 else np.arange(first + 1, first + 6)


def test_loss_and_gradient_of_a_step_are_means_weighted_by_batch_size() -> None:
    recorder = Recorder()
    weight = tc.Var(np.zeros(3, np.float32))

    def loss(inputs: Mapping[str, tc.Tensor]) -> tc.Tensor:
        residual = (inputs["x"] * weight).sum(1) - inputs["y"]
        return (residual * residual).mean()

    Trainer(
        loss,
        {"weight": weight},
        tc.optim.SGD([weight], lr=0.1),
        Uneven(),
        inputs=lambda rows: {"x": tc.tensor(X[rows]), "y": tc.tensor(Y[rows])},
        weigh=len,  # a batch counts in proportion to its rows
        steps=2,
        gradient_accumulation=2,
        callbacks=[recorder],
    ).train()
    expected = np.zeros(3, np.float32)
    for step, report in enumerate(recorder.reports):
        rows = np.arange(6 * step, 6 * step + 6)
        residual = X[rows] @ expected - Y[rows]
        assert report.loss == pytest.approx(float((residual**2).mean()), rel=1e-5)
        expected = (expected - 0.1 * gradient(expected, rows)).astype(np.float32)
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-5)


def test_the_schedule_sets_the_learning_rate() -> None:
    weight, recorder = tc.Var(np.zeros(3, np.float32)), Recorder()
    optimizer = tc.optim.SGD([weight], lr=0.1)
    scheduler = tc.optim.lr_scheduler.linear(optimizer, total_steps=8, warmup_steps=4)
    Trainer(
        lambda rows: mean_squared_error(weight, rows),
        {"weight": weight},
        optimizer,
        Slices(4),
        steps=8,
        scheduler=scheduler,
        callbacks=[recorder],
    ).train()
    expected = [0.0, 0.025, 0.05, 0.075, 0.1, 0.075, 0.05, 0.025]
    assert [report.lr for report in recorder.reports] == pytest.approx(expected)


def test_each_event_calls_the_callbacks_in_order(tmp_path: Path) -> None:
    events: list[str] = []
    callbacks = [Recorder("a ", events), Recorder("b ", events)]
    regression_trainer(
        tc.Var(np.zeros(3, np.float32)), output=tmp_path, save_every=2, callbacks=callbacks
    ).train()
    expected = ["begin 0", "step 1", "step 2", "save 2", "step 3", "save 3", "end 3"]
    assert events == [f"{name} {event}" for event in expected for name in "ab"]


@pytest.mark.parametrize(("every", "expected"), [(0, [6]), (3, [3, 6]), (4, [4, 6])])
def test_checkpoints_are_saved_every_nth_step_and_at_the_end(
    tmp_path: Path, every: int, expected: list[int]
) -> None:
    regression_trainer(
        tc.Var(np.zeros(3, np.float32)), steps=6, output=tmp_path, save_every=every
    ).train()
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"checkpoint-{n:06d}" for n in expected]


def test_a_run_that_a_callback_stopped_can_continue(tmp_path: Path) -> None:
    class StopAfter2(Callback):
        def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
            if report.step == 2:
                trainer.stop()

    run = regression_trainer(
        tc.Var(np.zeros(3, np.float32)), output=tmp_path, callbacks=[StopAfter2()]
    )
    assert not run.train()
    assert (run.step, run.stopped_by) == (2, None)  # no signal stopped the run
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-000002"]
    assert run.train()
    assert run.step == 3


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_loss_ends_the_run_before_its_step(tmp_path: Path, value: float) -> None:
    weight, recorder = tc.Var(np.ones(1, np.float32)), Recorder()

    def loss(rows: npt.NDArray[np.int64]) -> tc.Tensor:
        return (weight * (value if rows[0] == 2 else 0.5)).sum()

    run = Trainer(
        loss,
        {"weight": weight},
        tc.optim.SGD([weight], lr=0.1),
        Slices(1),
        steps=5,
        output=tmp_path,
        callbacks=[recorder],
    )
    with pytest.raises(NonFiniteError, match=rf"in step 3 the loss of batch 2 is {value}; lower"):
        run.train()
    # Two steps with a gradient of 0.5 and a learning rate of 0.1.
    assert weight.item() == pytest.approx(1 - 2 * 0.1 * 0.5)
    assert recorder.events == ["begin 0", "step 1", "step 2", "end 2"]
    assert list(tmp_path.iterdir()) == []


def test_a_non_finite_gradient_leaves_the_parameters_as_they_were() -> None:
    weight = tc.Var(np.zeros(1, np.float32))
    run = Trainer(
        lambda _: weight.sqrt().sum(),  # at 0 the derivative is infinite
        {"weight": weight},
        tc.optim.SGD([weight], lr=0.1),
        Slices(1),
        steps=1,
    )
    with pytest.raises(NonFiniteError, match="in step 1 the gradient's norm is inf"):
        run.train()
    assert weight.item() == 0.0


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_that_is_queued_before_its_loss_is_read_is_skipped(
    monkeypatch: pytest.MonkeyPatch, accumulation: int
) -> None:
    """As on a GPU, the trainer queues the step first and reads the loss later.

    The loss of batch 3 is infinite, but its gradient is finite, so only the loss shows that the
    step must be skipped.
    """
    weight = tc.Var(np.ones(1, np.float32))
    run = Trainer(
        lambda rows: weight.sum() + (math.inf if rows[0] == 3 else 0.0),
        {"weight": weight},
        tc.optim.SGD([weight], lr=0.25),
        Slices(1),
        steps=5,
        gradient_accumulation=accumulation,
    )
    monkeypatch.setattr(run, "_on_gpu", True)
    with pytest.raises(NonFiniteError, match="the loss of batch 3 is inf"):
        run.train()
    assert run.step == 3 // accumulation  # the steps before the one that uses batch 3
    assert weight.item() == 1 - 0.25 * run.step  # each gradient is 1


def f16_sum(weight: tc.Var) -> tc.Tensor:
    return weight.to("f16").sum()


def test_the_scaler_skips_steps_that_overflow() -> None:
    # The gradient is 1, so the scaled gradient is the scale. The initial scale (65536) overflows
    # f16. After one skipped step, the scale is 32768, which does not overflow.
    weight, recorder = tc.Var(np.ones(1, np.float32)), Recorder()
    scaler = tc.optim.GradScaler()
    Trainer(
        lambda _: f16_sum(weight),
        {"weight": weight},
        tc.optim.SGD([weight], lr=0.125),
        Slices(1),
        steps=3,
        scaler=scaler,
        callbacks=[recorder],
    ).train()
    assert [math.isfinite(report.grad_norm) for report in recorder.reports] == [False, True, True]
    assert [report.grad_norm for report in recorder.reports[1:]] == [1.0, 1.0]
    assert weight.item() == 1 - 2 * 0.125  # two steps that are not skipped
    assert scaler.get_scale() == 32768


def test_too_many_skipped_steps_in_a_row_are_an_error() -> None:
    weight = tc.Var(np.ones(1, np.float32))
    run = Trainer(
        lambda _: f16_sum(weight) * math.inf,
        {"weight": weight},
        tc.optim.SGD([weight], lr=0.1),
        Slices(1),
        steps=1000,
        scaler=tc.optim.GradScaler(),
    )
    with pytest.raises(NonFiniteError, match=f"after {MAX_SKIPPED} skipped steps"):
        run.train()
    assert weight.item() == 1.0


def test_the_inputs_of_all_batches_of_a_step_are_made_before_its_losses() -> None:
    """Also, the seed and a batch's index determine the random numbers of the batch's inputs."""

    def noisy(rows: npt.NDArray[np.int64]) -> dict[str, tc.Tensor]:
        prepared.append(list(rows))
        return {"x": tc.tensor(X[rows]) + tc.randn((len(rows), 3)) * 0.1, "y": tc.tensor(Y[rows])}

    def loss(batch: Mapping[str, tc.Tensor]) -> tc.Tensor:
        prepared_before_loss.append(len(prepared))
        return (((batch["x"] * weight).sum(1) - batch["y"]) ** 2).mean()

    prepared: list[list[int]] = []
    prepared_before_loss: list[int] = []
    weight, recorder = tc.Var(np.zeros(3, np.float32)), Recorder()
    tc.manual_seed(1)
    Trainer(
        loss,
        {"weight": weight},
        tc.optim.SGD([weight], lr=0.01),
        Slices(4),
        inputs=noisy,
        gradient_accumulation=2,
        cuda_graphs=4,  # no effect on the CPU
        steps=3,
        callbacks=[recorder],
    ).train()
    assert prepared_before_loss == [2, 2, 4, 4, 6, 6]
    assert prepared == [list(Slices(4).batch(n)) for n in range(6)]
    expected = np.zeros(3)
    for step in range(3):
        slopes = []
        for n in (2 * step, 2 * step + 1):
            rows = Slices(4).batch(n)
            # The numbers of batch n with the seed 1.
            noise: tc.Tensor = drawn(1, "inputs", n, lambda: tc.randn((4, 3)))
            x = (tc.tensor(X[rows]) + noise * 0.1).numpy().astype(np.float64)
            slopes.append(2 * x.T @ (x @ expected - Y[rows]) / 4)
        expected = expected - 0.01 * np.mean(slopes, axis=0)
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-4)
