"""The settings `optimizer_args` and `lr_scheduler_args`: names, values and errors."""

from typing import Any

import pytest

import trainable_candle as tc
from trainable_candle.errors import ConfigError
from trainable_candle.settings.arguments import parsed
from trainable_candle.train import TrainConfig
from trainable_candle.train.optimizers import make_optimizer, make_scheduler


def optimizer_of(config: TrainConfig) -> tc.optim.Optimizer:
    """Return the optimizer of the settings for a variable of three elements."""
    learning_rate = 0.1
    return make_optimizer(config, [([tc.Var(tc.ones(3))], learning_rate)])


def test_arguments_given_as_text_become_python_values() -> None:
    texts = ["eps=1e-6", "betas=0.9, 0.99", "Nesterov=True", "clip=none", "d-coef=(1, 2)", "n=3"]
    # The first argument is the setting's name, for errors.
    assert parsed("x", texts) == {
        "eps": 1e-6, "betas": (0.9, 0.99), "Nesterov": True, "clip": None, "d_coef": (1, 2), "n": 3,
    }  # fmt: skip


def values_after_steps(config: TrainConfig) -> list[float]:
    """Return the elements of a variable after three steps on the sum of their cubes."""
    v = tc.Var(tc.tensor([1.0, -2.0, 3.0]))
    learning_rate = 0.1
    optimizer = make_optimizer(config, [([v], learning_rate)])
    for _ in range(3):
        optimizer.zero_grad()
        (v * v * v).sum().backward()
        optimizer.step()
    return v.tolist()


def test_arguments_reach_the_optimizer() -> None:
    settings: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 0.1}
    found = values_after_steps(TrainConfig(**settings, optimizer_args=["betas=0.5,0.7", "eps=0.1"]))
    v = tc.Var(tc.tensor([1.0, -2.0, 3.0]))
    # A weight decay of 0.01 is the default of the settings.
    adamw = tc.optim.AdamW([v], lr=0.1, betas=(0.5, 0.7), eps=0.1, weight_decay=0.01)
    for _ in range(3):
        adamw.zero_grad()
        (v * v * v).sum().backward()
        adamw.step()
    assert found == v.tolist()
    assert found != values_after_steps(TrainConfig(**settings))
    # One string of the list may have several arguments.
    assert found == values_after_steps(
        TrainConfig(**settings, optimizer_args=["betas=0.5, 0.7 eps=0.1"])
    )
    # As in kohya, the weight decay may be an argument.
    as_argument = TrainConfig(**settings, optimizer_args=["weight_decay=0.5"])
    assert values_after_steps(as_argument) == values_after_steps(
        TrainConfig(**settings, weight_decay=0.5)
    )


def test_arguments_reach_the_schedule() -> None:
    texts = ["lr_end=0.05", "power=2"]
    config = TrainConfig(
        learning_rate=0.1, lr_scheduler="polynomial", lr_scheduler_args=texts, steps=10
    )
    optimizer = optimizer_of(config)
    make_scheduler(config, optimizer).set_step(5)
    expected = tc.optim.lr_scheduler.polynomial(
        optimizer_of(config), total_steps=10, lr_end=0.05, power=2
    )
    expected.set_step(5)
    assert optimizer.group_lrs == expected.get_last_lr()
    # After half of the steps, the learning rate is no longer the initial one.
    assert optimizer.group_lrs != [0.1]


# By default, the optimizer is adamw8bit and the schedule is constant.
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"optimizer_args": ["weight_decay=0.5"], "weight_decay": 0.1},
            "--weight-decay and --optimizer-args both set the weight decay",
        ),
        ({"optimizer_args": ["eps"]}, "found `eps`, expected name=value"),
        ({"optimizer_args": ["eps=small"]}, "found `eps=small`, expected a number"),
        ({"optimizer_args": ["eps=1", "eps=2"]}, "`eps` is given twice"),
        ({"optimizer_args": ["epss=1"]}, "adamw8bit has no `epss`; did you mean `eps`"),
        ({"optimizer_args": ["lr=1"]}, "`lr` has a setting of its own: give --learning-rate"),
        ({"optimizer_args": ["eps=-1"]}, "optimizer_args: AdamW8bit: "),
        ({"optimizer_args": ["betas=1"]}, "optimizer_args: AdamW8bit: "),
        ({"optimizer_args": ["params=1"]}, "adamw8bit has no `params`"),
        ({"lr_scheduler_args": ["power=2"]}, "constant has no `power`; it takes no arguments"),
        (
            {"lr_scheduler": "cosine", "lr_scheduler_args": ["num_cycles=-1"]},
            "lr_scheduler_args: ",
        ),
        (
            {"lr_scheduler": "cosine", "lr_scheduler_args": ["warmup_steps=1"]},
            "give --warmup-steps",
        ),
    ],
    ids=str,
)
def test_wrong_arguments_are_rejected_when_settings_are_made(
    settings: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**settings)
    assert text in str(caught.value)


def test_muon_has_match_rms_adamw_unless_an_argument_disables_it() -> None:
    muon = TrainConfig(model="digits", dataset="d", output="o", optimizer="muon")
    assert muon.optimizer_arguments["match_rms_adamw"] is True
    without = muon.with_(optimizer_args=["match_rms_adamw=false"])
    assert without.optimizer_arguments["match_rms_adamw"] is False
