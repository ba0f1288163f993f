"""A run ends early when its validation loss no longer improves."""

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import trainable_candle as tc
from trainable_candle.errors import ConfigError
from trainable_candle.run import ADAPTER, JSON_LOG, train_adapter
from trainable_candle.session import SAMPLES
from trainable_candle.settings.checks import check_settings
from trainable_candle.train import Callback, StepReport, TrainConfig, Trainer
from trainable_candle.train.evaluation import Validation, best_path, step_adapters
from trainable_candle.train.logs import read_json_log
from trainable_candle.train.state import checkpoints

Train = Callable[..., dict[str, bytes]]


def validation_count(losses: list[float], patience: int) -> int:
    """Return the number of validations after which a run ends, by the definition of `early_stop`.

    A run ends when none of the last `patience` losses is below the lowest loss before them, or when
    there are no more losses.
    """
    for number in range(patience + 1, len(losses) + 1):
        if min(losses[number - patience : number]) >= min(losses[: number - patience]):
            return number
    return len(losses)


@pytest.fixture
def fluctuating(config: TrainConfig) -> TrainConfig:
    """Return settings with so large a learning rate that the validation loss rises and falls."""
    return config.with_(
        learning_rate=0.3, lr_scheduler="constant", warmup_steps=0, steps=40, save_every=3,
        validation_split=0.3, validate_every=2, keep_checkpoints=40,
    )  # fmt: skip


def validations(output: str) -> dict[int, float]:
    """Return the validation losses of a run by step, except the one before the first step."""
    rows = read_json_log(Path(output) / JSON_LOG)
    found = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    return {step: loss for step, loss in found.items() if step}


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_a_run_ends_after_validations_without_improvement(
    fluctuating: TrainConfig, train: Train, tmp_path: Path, patience: int
) -> None:
    train(fluctuating)
    losses = validations(fluctuating.output)
    expected = validation_count(list(losses.values()), patience)
    # Some validations are left out, so that this run tests an early stop.
    assert patience < expected < len(losses)
    early = fluctuating.with_(
        early_stop=patience, output=str(tmp_path / "early"), sample_prompts=["a zero"],
        sample_steps=2, sample_every=1000,
    )  # fmt: skip
    lines: list[str] = []
    run = train_adapter(early, progress=False, report=lines.append)
    # A validation follows every second step.
    assert (run.completed, run.step, run.stopped_by) == (True, 2 * expected, None)
    assert validations(early.output) == dict(list(losses.items())[:expected])
    best = min(validations(early.output), key=losses.__getitem__)
    words = "1 validation" if patience == 1 else f"{patience} validations"
    assert (
        f"early stop: after step {run.step} of 40, because {words} in a row had no lower loss than "
        f"that of step {best}"
    ) in lines
    file = best_path(run.output)
    assert f"best: {file} (step {best}, loss {losses[best]:.4f})" in lines
    # The step at which the run ends counts as the last one: it has the finished adapter, a preview
    # and a checkpoint, but no intermediate adapter.
    assert run.adapter_path.exists()
    assert (run.output / SAMPLES / f"step-{run.step:06d}.png").exists()
    assert checkpoints(run.output)[-1].name == f"checkpoint-{run.step:06d}"
    assert all(f"{run.step:06d}" not in path.name for path in step_adapters(run.output))


class StopAt(Callback):
    """Ends the run after step `step`, as Ctrl-C would."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        if report.step == self._step:
            trainer.stop()


def test_a_resumed_run_continues_to_count_losses_without_improvement(
    fluctuating: TrainConfig, train: Train, tmp_path: Path
) -> None:
    config = fluctuating.with_(early_stop=3, save_every=1)
    expected = train(config)
    losses = validations(config.output)
    # The step at which the run ended early, and the step with the lowest loss.
    end = max(losses)
    best = min(losses, key=losses.__getitem__)
    # A validation follows every second step. Interrupt the run when 0, 1 and 2 losses in a row had
    # no improvement, and once between two validations, at `best + 3`.
    for step in (best, best + 2, best + 3, best + 4):
        interrupted = config.with_(output=str(tmp_path / f"interrupted-{step}"))
        train(interrupted, StopAt(step))
        assert train(interrupted.with_(resume="latest")) == expected
        assert validations(interrupted.output) == losses
    # A run that continues in another folder, and finds no lower loss, has no best adapter there.
    elsewhere = config.with_(output=str(tmp_path / "elsewhere"))
    lines: list[str] = []
    from_end = elsewhere.with_(resume=str(checkpoints(Path(config.output))[-1]))
    train_adapter(from_end, progress=False, report=lines.append)
    facts = f"(step {best}, loss {losses[best]:.4f})"
    assert f"best: in the folder of the earlier run {facts}" in lines
    # A run that has ended early takes no further step, unless `early_stop` is removed.
    again = config.with_(resume="latest")
    lines = []
    run = train_adapter(again, progress=False, report=lines.append)
    assert (run.completed, run.step) == (True, end)
    assert any(line.startswith(f"early stop: after step {end} of 40") for line in lines)
    train(again.with_(early_stop=None, steps=end + 3))
    # `end` is even, so step `end + 3` has a validation only because it is the last step.
    assert max(validations(config.output)) == end + 3


@pytest.mark.parametrize("patience", [1, 2, 3, None])
def test_losses_without_improvement_are_counted_as_defined(patience: int | None) -> None:
    losses = [4.0, 3.0, 3.0, math.nan, 2.0, 2.5, 2.0, 1.0, 5.0, 4.0, 3.0, 2.0]
    # The additional loss, 9.0, is the one before the first step.
    results = iter([9.0, *losses])
    trainer: Any = SimpleNamespace(step=0, steps=len(losses), output=None, report=lambda _: None)
    validation = Validation(
        loss=lambda: next(results),
        every=1,
        evaluated=nullcontext,
        adapter=Mock(),
        patience=patience,
    )
    validation.on_train_begin(trainer)
    while trainer.step < trainer.steps:
        trainer.step += 1
        validation.on_step_end(trainer, SimpleNamespace(step=trainer.step))  # type: ignore[arg-type]
    # An equal loss is not an improvement, and neither is NaN. The losses of steps 3 and 4 do not
    # improve on that of step 2, and those of steps 9 to 11 do not improve on that of step 8.
    assert trainer.step == {1: 3, 2: 4, 3: 11, None: 12}[patience]
    assert validation.ends_early == (patience is not None)


def test_the_best_and_the_last_adapter_are_also_written_for_other_tools(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    rows = [{"instruction": f"say {n}", "output": "yes " * n} for n in range(1, 13)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = TrainConfig(
        model="causal-lm", dataset=str(data), output=str(tmp_path / "run"), device="cpu",
        precision="f32", learning_rate=5e-2, steps=60, validation_split=0.3, validate_every=2,
        early_stop=2,
    )  # fmt: skip
    lines: list[str] = []
    run = train_adapter(config, progress=False, report=lines.append)
    losses = validations(config.output)
    # The run ended early: two validations after the best one, which is four steps.
    assert run.step < 60
    assert min(losses, key=losses.__getitem__) == run.step - 4
    folder = run.output / "best" / "peft"
    assert f"best for other tools: {folder}" in lines

    def tensors(path: Path) -> dict[str, list[float]]:
        return {name: tensor.tolist() for name, tensor in tc.load_file(path).items()}

    best, last = tensors(best_path(run.output)), tensors(run.output / ADAPTER)
    assert best != last
    assert tensors(folder / "adapter_model.safetensors") == best
    assert tensors(run.output / "peft" / "adapter_model.safetensors") == last
    settings = [json.loads((path / "adapter_config.json").read_text())
                for path in (folder, run.output / "peft")]  # fmt: skip
    assert settings[0] == settings[1]
    # The model that the run returns has the last adapter.
    for name, var in run.adapter.named_parameters().items():
        (stored,) = (values for key, values in last.items() if key.endswith(name))
        assert var.numpy().tolist() == stored


def test_early_stop_needs_validation() -> None:
    with pytest.raises(ConfigError, match="--early-stop has no effect without --validation-split"):
        check_settings(TrainConfig(early_stop=3))
    with pytest.raises(ConfigError, match="early_stop is 0, expected at least 1"):
        TrainConfig(early_stop=0)
