"""Which noise levels a flow model is drawn with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from trainable_candle.errors import ArgumentError, ConfigError
from trainable_candle.files import parse_json

if TYPE_CHECKING:
    from pathlib import Path


TRAINED_LEVELS = 1000
"""How many levels models were trained with."""
_MOST_FITTED: Final = 4300
"""Tokens of an image above which mu of FLUX.2 does not depend on the number of steps."""


def shifted_last(shift: float) -> float:
    """The lowest level that a model was trained with, by a shift.

    The pipeline of Stable Diffusion 3 leaves the levels to the scheduler, which goes down to it in
    equal steps, and shifts them once more.
    """
    least = 1 / TRAINED_LEVELS
    return shift * least / (1 + (shift - 1) * least)


@dataclass(frozen=True)
class FlowSchedule:
    """Where the levels s of equal steps go: to k s / (1 + (k - 1) s), by a shift k.

    Follows diffusers' `FlowMatchEulerDiscreteScheduler` and, where the shift grows with the image,
    `calculate_shift` of its Flux pipeline:
    https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/schedulers/scheduling_flow_match_euler_discrete.py
    """

    shift: float = 1.0
    """k, for images of any size; not used if the shift grows with the image."""
    last: float | None = None
    """The last level before 0 and before it is shifted: a number, or one step's (None)."""
    grows: bool = False
    """Whether k is exp(mu), and mu on a line through two numbers of tokens."""
    tokens: tuple[float, float] = (256, 4096)
    """Tokens of an image at the ends of the line."""
    mu: tuple[float, float] = (0.5, 1.15)
    """mu there."""

    def at(self, tokens: int) -> float:
        """The shift k of an image of this many tokens."""
        if not self.grows:
            return self.shift
        (first, last), (low, high) = self.tokens, self.mu
        return math.exp(low + (high - low) * (tokens - first) / (last - first))

    def drawing(self, steps: int, tokens: int) -> float:  # noqa: ARG002 - for others
        """The shift k of drawing an image of this many tokens in this many steps."""
        return self.at(tokens)

    def in_training(self, tokens: int) -> float:
        """The shift k of an image of this many tokens that is trained on.

        Where drawing has one shift for all sizes, it is that of images of 1024x1024, and k grows
        with the root of the number of tokens (arXiv:2403.03206, section 5.3.2).
        """
        if self.grows:
            return self.at(tokens)
        return self.shift * math.sqrt(tokens / self.tokens[1])

    def levels(self, steps: int, tokens: int) -> list[float]:
        """The noise levels of `steps` calls of the model for an image of this many tokens.

        Raises:
            ArgumentError: there are no steps.
        """
        if steps < 1:
            raise ArgumentError(f"sampler: found {steps} steps, expected at least 1")
        last = 1 / steps if self.last is None else self.last
        k = self.drawing(steps, tokens)
        equal = [1 - (1 - last) * i / max(1, steps - 1) for i in range(steps)]
        return [k * level / (1 + (k - 1) * level) for level in equal] + [0.0]

    @classmethod
    def of(cls, weights: Path, default: FlowSchedule) -> FlowSchedule:
        """As the scheduler's configuration in a pipeline's folder says.

        Args:
            weights: the folder; a file says nothing.
            default: the family's, where there is no such configuration.

        Raises:
            ConfigError: it is damaged, or has another value than a number.
        """
        path = weights / "scheduler" / "scheduler_config.json"
        if not path.is_file():
            return default
        try:
            found = parse_json(path.read_bytes())
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{path}: expected an object, found {type(found).__name__}")

        def number(name: str, otherwise: float) -> float:
            value = found.get(name)
            if value is None:
                return otherwise
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ConfigError(f"{path}: {name} is {value!r}, expected a number above 0")
            return float(value)

        (first, last), (low, high) = default.tokens, default.mu
        shift = number("shift", 1.0)
        return cls(
            shift=shift,
            last=default.last and shifted_last(shift),
            grows=found.get("use_dynamic_shifting") is True,
            tokens=(number("base_image_seq_len", first), number("max_image_seq_len", last)),
            mu=(number("base_shift", low), number("max_shift", high)),
        )


@dataclass(frozen=True)
class KleinSchedule(FlowSchedule):
    """Where the shift also falls with the number of steps: FLUX.2's, whose mu was fitted.

    In training it grows with the image alone, as Flux.1's. Follows `compute_empirical_mu` of
    diffusers' pipeline:
    https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/pipelines/flux2/pipeline_flux2_klein.py
    """

    def drawing(self, steps: int, tokens: int) -> float:
        """exp(mu), of which mu is on a line between the fits for 10 and for 200 steps."""
        if not self.grows:
            return self.shift
        at_10 = 8.73809524e-05 * tokens + 1.89833333
        at_200 = 0.00016927 * tokens + 0.45666666
        if tokens > _MOST_FITTED:
            return math.exp(at_200)
        return math.exp(at_200 + (steps - 200) * (at_200 - at_10) / 190)
