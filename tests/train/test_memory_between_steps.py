"""The estimate of memory against what a run holds in its first step and when it saves or validates.

The table of an estimate has no line for validation and checkpoints. A run holds no more memory then
than in a training step, which has a line.
"""

from pathlib import Path
from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle.families.digits import Digits
from trainable_candle.run import train_adapter
from trainable_candle.tasks.latent.prepared import PreparedLatents
from trainable_candle.train import Callback, StepReport, TrainConfig, Trainer
from trainable_candle.train.state import checkpoint_path

from .test_estimate import estimated_items


class Held(Callback):
    """Records the bytes of the tape and of the optimizer's states after each step."""

    def __init__(self) -> None:
        self.bytes: list[tuple[int, int]] = []

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:
        del report
        self.bytes.append((tc.memory.saved_bytes(), trainer.optimizer.state_bytes))


def estimated(config: TrainConfig) -> dict[str, int]:
    """Return the estimated bytes of each item of training, such as `model optimizer`."""
    return estimated_items(Digits(Path(str(config.weights)), "f32", "cpu", config).task())


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Record for each loss whether it has a gradient, and how much it adds to the tape."""
    found: list[tuple[bool, int]] = []
    compute = PreparedLatents.loss

    def loss(self: PreparedLatents, inputs: Any) -> tc.Tensor:
        before = tc.memory.saved_bytes()
        result = compute(self, inputs)
        found.append((result.requires_grad, tc.memory.saved_bytes() - before))
        return result

    monkeypatch.setattr(PreparedLatents, "loss", loss)
    return found


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "prodigy", "muon"])
def test_the_first_step_holds_what_later_steps_hold(config: TrainConfig, optimizer: str) -> None:
    held = Held()
    # Prodigy makes its states in the first step with a learning rate above 0.
    config = config.with_(optimizer=optimizer, steps=4, warmup_steps=0)
    train_adapter(config, callbacks=[held], progress=False, report=lambda _: None)
    # After each step the tape is empty.
    assert held.bytes == 4 * [(0, estimated(config)["model optimizer"])]


def test_a_validation_keeps_nothing_on_the_tape(
    config: TrainConfig, losses: list[tuple[bool, int]]
) -> None:
    # Without dropout, because the estimate does not count what dropout keeps on the tape.
    config = config.with_(validation_split=0.4, validate_every=1, steps=2, lora_dropout=0.0)
    train_adapter(config, progress=False, report=lambda _: None)
    in_steps = [saved for has_gradient, saved in losses if has_gradient]
    in_validations = [saved for has_gradient, saved in losses if not has_gradient]
    assert len(in_steps) == 2
    assert len(in_validations) >= 2
    assert not any(in_validations)
    assert max(in_steps) == pytest.approx(estimated(config)["model activations"], rel=0.2)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_checkpoint_copies_the_adapter_and_the_states_that_the_estimate_counts(
    config: TrainConfig, optimizer: str
) -> None:
    """The copies are in host memory, so a run on a GPU takes no more of its memory.

    On the CPU, host memory is that of the run. There the copies do not raise the peak, because the
    activations of the step are freed before and were larger.
    """
    # AdamW8bit quantizes the moments of variables of at least 4096 elements. With this rank, every
    # variable has at least 4096.
    config = config.with_(optimizer=optimizer, rank=512, steps=5)
    train_adapter(config, progress=False, report=lambda _: None)
    folder, items = checkpoint_path(Path(config.output), 5), estimated(config)
    parameters, states = (
        tc.load_file(folder / f"{name}.safetensors") for name in ("parameters", "optimizer")
    )
    assert sum(tensor.nbytes for tensor in parameters.values()) == items["model adapter"]
    # The names of a variable's states begin with its number. The estimate does not count other
    # tensors, such as the number of steps.
    of_variables = [tensor.nbytes for name, tensor in states.items() if name[0].isdecimal()]
    # AdamW has two moments for each variable; AdamW8bit has codes and scales of each moment.
    assert len(of_variables) == (2 if optimizer == "adamw" else 4) * len(parameters)
    assert sum(of_variables) == items["model optimizer"]
