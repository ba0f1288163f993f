"""Settings of the objective: what the model predicts, at which noise levels, with which loss.

A `Condition` has the names of settings, and a function of the configuration of a whole run: the
settings have an effect only if the function returns True. Its `needed` completes the usual error
message, "... has no effect without ..."; its `complaint` replaces the whole message. A function in
`contradictions` returns the message about settings that exclude each other, or None.

In a `Setting`, `low` is the least value, or with `above=True` a bound that the value must exceed.
With `below`, the value must be less than that bound. The short help omits a setting with
`rare=True`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from trainable_candle.settings import sections
from trainable_candle.settings.setting import Condition, Group, Setting

LOSSES: Final = ("mse", "l1", "huber", "smooth_l1")
HUBER_SCHEDULES: Final = ("constant", "exponential", "snr")
"""The ways in which `huber_delta` may vary with the noise level."""
TIMESTEPS: Final = ("uniform", "logit_normal", "mode")
"""The distributions of noise levels."""
WEIGHTINGS: Final = ("none", "sigma_sqrt", "cosmap")
"""The weights of the loss as functions of the noise level."""
PREDICTIONS: Final = ("epsilon", "v_prediction")
"""What models with discrete timesteps may predict: the noise, or the velocity."""


def _no_timesteps(config: Any) -> str | None:
    """Return why no timestep is between the limits; None if there is one."""
    if config.max_timestep is not None and config.min_timestep >= config.max_timestep:
        return (
            f"--min-timestep is {config.min_timestep}, and --max-timestep is "
            f"{config.max_timestep}: no timestep is between them"
        )
    return None


@dataclass(frozen=True)
class NoisePrediction(Group):
    """The objective of models that predict noise or velocity at discrete timesteps."""

    section: ClassVar[str] = sections.OBJECTIVE
    contradictions: ClassVar = (_no_timesteps,)
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("multires_noise_discount",),
            lambda c: c.multires_noise_iterations > 0,
            needed="--multires-noise-iterations",
        ),
    )

    prediction_type: Annotated[
        str | None,
        Setting("what the model predicts (default: model's)", choices=PREDICTIONS, rare=True),
    ] = None
    min_timestep: Annotated[int, Setting("lowest timestep to train at", low=0, rare=True)] = 0
    max_timestep: Annotated[
        int | None, Setting("train only below this timestep (default: model's)", low=1, rare=True)
    ] = None
    noise_offset: Annotated[
        float,
        Setting(
            "strength of extra noise that is constant in each channel",
            low=0,
            rare=True,
            synonyms=("offset-noise-weight", "train.noise-offset"),
        ),
    ] = 0.0
    multires_noise_iterations: Annotated[
        int, Setting("levels of multiresolution noise; 0: none; 6 is usual", low=0, rare=True)
    ] = 0
    multires_noise_discount: Annotated[
        float,
        Setting(
            "weight of a multiresolution level relative to the level before",
            low=0,
            above=True,
            below=1,
            rare=True,
        ),
    ] = 0.3


@dataclass(frozen=True)
class Loss(Group):
    """The loss function, and its dependence on the noise level."""

    section: ClassVar[str] = sections.OBJECTIVE
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("huber_delta", "huber_schedule"),
            lambda c: c.loss in {"huber", "smooth_l1"},
            needed="--loss huber or --loss smooth_l1",
        ),
    )

    loss: Annotated[
        str,
        Setting(
            "loss function",
            choices=LOSSES,
            rare=True,
            synonyms=("loss-type", "train.loss-type"),
            spellings={"l2": "mse"},
        ),
    ] = "mse"
    huber_delta: Annotated[
        float, Setting("error above which the Huber loss is linear", low=0, above=True, rare=True)
    ] = 0.1
    huber_schedule: Annotated[
        str,
        Setting(
            "how --huber-delta varies with the noise level", choices=HUBER_SCHEDULES, rare=True
        ),
    ] = "constant"
    min_snr_gamma: Annotated[
        float | None,
        Setting(
            "limit of the signal-to-noise ratio in loss weights; 5 is usual",
            low=0,
            above=True,
            rare=True,
            synonyms=("train.min-snr-gamma",),
        ),
    ] = None


@dataclass(frozen=True)
class NoiseLevels(Group):
    """The distribution from which noise levels are drawn."""

    section: ClassVar[str] = sections.OBJECTIVE

    timesteps: Annotated[
        str | None,
        Setting("distribution of noise levels (default: model's)", choices=TIMESTEPS, rare=True),
    ] = None
    timestep_shift: Annotated[
        float | None,
        Setting(
            "shift of noise levels; above 1: more noise (default: model's)",
            low=0,
            above=True,
            rare=True,
        ),
    ] = None


@dataclass(frozen=True)
class Flow(Group):
    """The objective of flow models."""

    section: ClassVar[str] = sections.OBJECTIVE
    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            ("resolution_shift",),
            lambda c: c.timestep_shift is None,
            complaint=(
                "--resolution-shift replaces the model's shift by one that depends on the size of "
                "an image, and --timestep-shift replaces it by a constant; give one of the two"
            ),
        ),
        Condition(
            ("loss_weighting",),
            lambda c: c.min_snr_gamma is None,
            complaint=(
                "--loss-weighting and --min-snr-gamma both weigh noise levels; give one of the two"
            ),
        ),
    )

    resolution_shift: Annotated[
        bool, Setting("shift noise levels by the size of each image", rare=True)
    ] = False
    loss_weighting: Annotated[
        str,
        Setting("weight of the loss at each noise level", choices=WEIGHTINGS, rare=True),
    ] = "none"


@dataclass(frozen=True)
class DistilledGuidance(Group):
    """The guidance scale in the training of models that take one as input."""

    section: ClassVar[str] = sections.OBJECTIVE

    train_guidance: Annotated[
        float, Setting("guidance scale that the model gets as input in training", low=0, rare=True)
    ] = 1.0
