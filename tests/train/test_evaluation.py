"""Validation, previews, averages of the adapter, and adapters that a run saves before its end."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trainable_candle as tc
from trainable_candle.errors import ConfigError, NonFiniteError
from trainable_candle.families.digits import Digits
from trainable_candle.run import ADAPTER, JSON_LOG, LOG, train_adapter
from trainable_candle.session import SAMPLES
from trainable_candle.tasks.latent import LatentTask
from trainable_candle.train import Callback, StepReport, TrainConfig, Trainer
from trainable_candle.train.evaluation import Previews, best_path, step_adapters
from trainable_candle.train.logs import read_json_log, read_log

# Trains, and returns the bytes of the adapter's parameters by name.
Train = Callable[..., dict[str, bytes]]
# Settings for a run without previews. Without prompts, `sample_every` and `sample_steps` must have
# their defaults.
NO_PREVIEWS: dict[str, Any] = {"sample_prompts": [], "sample_every": 250, "sample_steps": None}


@pytest.fixture
def everything(config: TrainConfig) -> TrainConfig:
    """Return settings with averages of the adapter, validation, previews and saved adapters.

    The run has the 12 steps of `config`.
    """
    return config.with_(
        validation_split=0.3,
        validate_every=4,
        sample_prompts=["a zero", "a seven"],
        sample_every=3,
        sample_steps=2,
        ema_decay=0.9,
        save_every=2,
        keep_adapters=3,
    )


def validation_losses(output: str) -> dict[int, float]:
    """Return the validation losses in the log of a run, by step."""
    rows = read_json_log(Path(output) / JSON_LOG)
    return {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image)


def files(folder: Path, pattern: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob(pattern)}


def test_a_run_writes_previews_adapters_and_validation_losses(
    everything: TrainConfig, train: Train
) -> None:
    train(everything)
    output = Path(everything.output)
    names = [f"step-{step:06d}.png" for step in (0, 3, 6, 9, 12)]
    assert sorted(path.name for path in (output / SAMPLES).glob("*.png")) == names
    start, end = (pixels(output / SAMPLES / names[n]) for n in (0, -1))
    # An image is 64 pixels wide, and the previews of the two prompts are side by side.
    assert start.shape[1] > 64
    # Of the adapters of steps 2, 4, 6, 8 and 10, the run keeps the last three.
    newest = [f"adapter-step{step:06d}.safetensors" for step in (6, 8, 10)]
    assert [path.name for path in step_adapters(output)] == newest
    assert list(validation_losses(everything.output)) == [0, 4, 8, 12]
    assert not np.array_equal(start, end)


def test_the_best_adapter_is_that_of_the_step_with_the_least_validation_loss(
    everything: TrainConfig, train: Train
) -> None:
    config = everything.with_(validate_every=1, ema_decay=0.0, steps=6, learning_rate=0.1)
    train(config)
    losses = validation_losses(config.output)
    # The untrained adapter (step 0) is validated, too, but it cannot be the best.
    best = min(range(1, 7), key=losses.__getitem__)
    # Train up to the best step again, and keep the adapter of every step.
    again = config.with_(output=f"{config.output}-again", save_every=1, keep_adapters=9)
    assert train(again, StopAfter(best))  # the adapter has parameters to compare
    expected = tc.load_file(path_of_adapter(Path(again.output), best))
    found = tc.load_file(best_path(Path(config.output)))
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor.numpy(), expected[name].numpy())


class StopAfter(Callback):
    """Stops the run after step `step`, as Ctrl-C would."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        if report.step == self._step:
            trainer.stop()


def path_of_adapter(output: Path, step: int) -> Path:
    """Return the path of the adapter after `step`; the last step has only the final adapter."""
    path = output / f"adapter-step{step:06d}.safetensors"
    return path if path.exists() else output / ADAPTER


# Step 3 has a preview, step 8 a validation.
@pytest.mark.parametrize("stop_after", [3, 8])
def test_a_run_with_everything_resumes_bit_for_bit(
    everything: TrainConfig, train: Train, tmp_path: Path, stop_after: int
) -> None:
    expected = train(everything)
    interrupted = everything.with_(output=str(tmp_path / "interrupted"))
    train(interrupted, StopAfter(stop_after))
    assert train(interrupted.with_(resume="latest")) == expected
    assert validation_losses(interrupted.output) == validation_losses(everything.output)
    uninterrupted, resumed = Path(everything.output), Path(interrupted.output)
    assert files(uninterrupted / SAMPLES, "*.png") == files(resumed / SAMPLES, "*.png")
    for name in (ADAPTER, best_path(uninterrupted).name):
        first, second = (
            {key: tensor.tolist() for key, tensor in tc.load_file(folder / name).items()}
            for folder in (uninterrupted, resumed)
        )
        assert first == second


def test_validation_repeats_its_noise_and_keeps_the_generator_state(
    digits_base: Path, digits_folder: Path
) -> None:
    config = TrainConfig(dataset=str(digits_folder), validation_split=0.4)
    task = Digits(digits_base, "f32", "cpu", config).task()
    data = task.read(print)
    assert (len(data.train), len(data.validation or ())) == (6, 4)  # of 10 images
    prepared = task.prepare(data, print).validation
    assert prepared is not None
    state = tc.get_rng_state()
    first = prepared.validation_loss()
    assert tc.get_rng_state() == state
    # Validation is independent of the generator's state.
    tc.randn((3,))
    assert prepared.validation_loss() == first
    # Validation averages the losses of single images, each with its own noise. This average is near
    # the mean loss of random batches.
    batches = prepared.batches(4)
    drawn = [prepared.inputs(batches.batch(n)) for n in range(200)]
    losses = [float(prepared.loss(inputs).item()) for inputs in drawn]
    assert abs(first - np.mean(losses)) < 4 * np.std(losses)


def test_a_split_depends_on_the_seed_and_leaves_no_part_empty(
    digits_base: Path, digits_folder: Path
) -> None:
    def held_out(**settings: Any) -> list[str]:
        config = TrainConfig(dataset=str(digits_folder), **settings)
        data = Digits(digits_base, "f32", "cpu", config).task().read(lambda _: None)
        assert data.validation is not None
        train, validation = (
            [item.image.path.name for item in part.items] for part in (data.train, data.validation)
        )
        assert set(train).isdisjoint(validation)
        return validation

    assert held_out(validation_split=0.4) == held_out(validation_split=0.4, steps=5)
    assert held_out(validation_split=0.4) != held_out(validation_split=0.4, seed=1)
    # Of 10 images, at least one is for validation and at least one is for training.
    assert len(held_out(validation_split=0.001)) == 1
    assert len(held_out(validation_split=0.999)) == 9


def test_a_validation_dataset_and_a_split_together_are_rejected() -> None:
    with pytest.raises(ConfigError, match="give only one: a folder or file, or a share"):
        TrainConfig(validation_dataset="v", validation_split=0.1)


def test_evaluation_does_not_change_the_training(everything: TrainConfig, train: Train) -> None:
    train(everything)
    # The split stays, so that both runs train on the same images. With 1000, validation runs only
    # before the first step and after the last.
    plain = everything.with_(
        output=f"{everything.output}-plain", ema_decay=0.0, **NO_PREVIEWS, validate_every=1000
    )
    train(plain)

    def losses(config: TrainConfig) -> list[str]:
        return [row["loss"] for row in read_log(Path(config.output) / LOG)]

    assert losses(everything) == losses(plain)
    name = "checkpoint-000012/parameters.safetensors"
    evaluated, unevaluated = (
        (Path(config.output) / name).read_bytes() for config in (everything, plain)
    )
    assert evaluated == unevaluated


def test_a_non_finite_preview_is_reported_and_left_out(tmp_path: Path) -> None:
    def fail_to_draw(path: Path) -> None:
        assert path == tmp_path / "samples" / "step-000000"
        raise NonFiniteError("sample: the image has non-finite values")

    class TrainerStandIn:
        step = 0

    lines: list[str] = []
    every = 1
    previews: Any = Previews(fail_to_draw, every, tmp_path / "samples", nullcontext, lines.append)
    previews.on_train_begin(TrainerStandIn())
    assert lines == ["no preview of step 0: sample: the image has non-finite values"]
    assert not (tmp_path / "samples").exists()


def test_a_run_without_an_average_can_resume_with_one(config: TrainConfig, train: Train) -> None:
    train(config, StopAfter(5))
    train(config.with_(resume="latest", ema_decay=0.9))


def test_a_run_returns_the_parameters_that_it_saves(everything: TrainConfig) -> None:
    run = train_adapter(everything, progress=False, report=lambda _: None)
    saved = tc.load_file(run.adapter_path)
    for name, var in run.adapter.named_parameters().items():
        stored = next(tensor for key, tensor in saved.items() if key.endswith(name))
        np.testing.assert_array_equal(var.numpy(), stored.numpy())


def test_a_damaged_state_of_the_validation_is_an_error(
    everything: TrainConfig, train: Train
) -> None:
    train(everything, StopAfter(8))
    path = Path(everything.output) / "checkpoint-000008" / "validation.json"
    # The file names the step of the best of the validations so far.
    assert json.loads(path.read_text())["step"] in {4, 8}
    path.write_text("{}")
    with pytest.raises(tc.WeightsFormatError, match=r"is damaged: validation\.json: "):
        train(everything.with_(resume="latest"))


def test_the_average_of_the_adapter_follows_its_formula(everything: TrainConfig) -> None:
    parameters: list[dict[str, np.ndarray]] = []

    class ParameterRecorder(Callback):
        def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
            assert trainer.step == report.step
            parameters.append({n: v.numpy().copy() for n, v in trainer.parameters.items()})

    # Without validation, `validate_every` must have its default.
    config = everything.with_(save_every=0, **NO_PREVIEWS, validation_split=0.0, validate_every=100)
    run = train_adapter(
        config, callbacks=[ParameterRecorder()], progress=False, report=lambda _: None
    )
    # The average starts from the untrained adapter, which the run's seed draws again.
    task = LatentTask(Digits(Path(config.weights), "f32", "cpu", config))
    tc.manual_seed(config.seed)
    expected = {n: v.numpy().copy() for n, v in task.attach().named_parameters().items()}
    # `step` is 0 for the first update of the average.
    for step, trained in enumerate(parameters):
        decay = min(config.ema_decay, (1 + step) / (10 + step))
        expected = {n: decay * expected[n] + (1 - decay) * trained[n] for n in expected}
    for name, var in run.adapter.named_parameters().items():
        np.testing.assert_allclose(var.numpy(), expected[name], rtol=1e-4, atol=1e-6)


@pytest.fixture
def schedule_free(everything: TrainConfig) -> TrainConfig:
    return everything.with_(
        ema_decay=0.0, optimizer="adamwschedulefree", lr_scheduler="constant", learning_rate=0.02
    )


def test_the_average_of_a_schedule_free_optimizer_is_saved(
    schedule_free: TrainConfig,
) -> None:
    run = train_adapter(schedule_free, progress=False, report=lambda _: None)
    checkpoint = Path(schedule_free.output) / "checkpoint-000012"
    trained = tc.load_file(checkpoint / "parameters.safetensors")
    saved = tc.load_file(run.adapter_path)
    states = tc.load_file(checkpoint / "optimizer.safetensors")
    different = 0
    for number, (name, var) in enumerate(run.adapter.named_parameters().items()):
        stored = next(tensor for key, tensor in saved.items() if key.endswith(name)).numpy()
        np.testing.assert_array_equal(var.numpy(), stored)
        y = next(tensor for key, tensor in trained.items() if key.endswith(name)).numpy()
        z = states[f"{number}.z"].numpy()
        # With beta1 = 0.9, the trained parameters are y = 0.9 x + 0.1 z. Here x is the average that
        # the run saves (`stored`), and z are the values that the optimizer's updates change.
        np.testing.assert_allclose(y, 0.9 * stored + 0.1 * z, rtol=1e-4, atol=1e-6)
        different += not np.array_equal(y, stored)
    assert different > 0


def test_a_schedule_free_run_resumes_bit_for_bit(schedule_free: TrainConfig, train: Train) -> None:
    expected = train(schedule_free.with_(output=f"{schedule_free.output}-uninterrupted"))
    train(schedule_free, StopAfter(5))
    assert train(schedule_free.with_(resume="latest")) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ema_decay": 0.9}, "already averages the adapter; set --ema-decay to 0"),
        ({"lr_scheduler": "cosine"}, "needs no schedule; set --lr-scheduler to constant"),
    ],
    ids=["ema_decay", "lr_scheduler"],
)
def test_settings_that_contradict_a_schedule_free_optimizer_are_rejected(
    schedule_free: TrainConfig, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule_free.with_(**change)
