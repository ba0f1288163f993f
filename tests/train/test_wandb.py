"""The log for Weights & Biases, tested with a stand-in for the module `wandb`."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainable_candle.run import train_adapter
from trainable_candle.train import TrainConfig
from trainable_candle.train.wandb_log import WandbLog


class Wandb:
    """A stand-in for the module `wandb`, which keeps the arguments of its calls."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0

    def init(self, **arguments: Any) -> Any:
        """Start a run with the given id, or a new run, which has the id "abc"."""
        self.inits.append(arguments)
        return SimpleNamespace(id=arguments["id"] or "abc", log=self.log, finish=self.finish)

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_run_logs_its_settings_steps_and_validations(config: TrainConfig, wandb: Wandb) -> None:
    settings = config.with_(wandb="loras", name="digit", validation_split=0.3, validate_every=5)
    train_adapter(settings, progress=False, report=lambda _: None)
    (start,) = wandb.inits
    assert (start["project"], start["name"], start["id"]) == ("loras", "digit", None)
    assert start["config"]["rank"] == config.rank
    # The logged settings include those that the plan chose, here in place of "auto".
    assert start["config"]["gradient_checkpointing"] == "none"
    steps = [step for step, values in wandb.logged if "train/loss" in values]
    assert steps == list(range(1, config.steps + 1))
    # The last two entries are of the last step and of its validation.
    last_keys = wandb.logged[-1][1].keys() | wandb.logged[-2][1].keys()
    assert {"train/lr", "train/grad_norm", "train/epoch", "train/per_second"} <= last_keys
    # Validation runs before the first of the 12 steps, after every fifth step and after the last.
    assert [step for step, values in wandb.logged if "validation/loss" in values] == [0, 5, 10, 12]
    assert wandb.finished == 1


def test_a_resumed_run_continues_its_run_in_wandb(tmp_path: Path, wandb: Wandb) -> None:
    trainer: Any = SimpleNamespace(step=0, settings={})
    for step in (0, 4):  # a new run, and a run that is resumed after step 4
        trainer.step = step
        log = WandbLog("p", "n", tmp_path)
        log.on_train_begin(trainer)
        log.on_train_end(trainer)
    assert [(arguments["id"], arguments["resume"]) for arguments in wandb.inits] == [
        (None, None),
        ("abc", "allow"),
    ]


def test_without_wandb_the_error_says_how_to_install_it_before_the_run_starts(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # now `import wandb` fails
    with pytest.raises(ModuleNotFoundError, match=r'pip install "trainable-candle\[wandb\]"'):
        train_adapter(config.with_(wandb="loras"), progress=False)
    assert not Path(config.output).exists()
