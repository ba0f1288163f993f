"""The noise levels with which a flow model draws images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from trainable_candle.errors import ArgumentError, ConfigError
from trainable_candle.files import parse_json

if TYPE_CHECKING:
    from pathlib import Path


TRAINED_LEVELS = 1000
"""The models were trained with this number of noise levels: i / 1000 for i from 1 to 1000."""
_MOST_FITTED: Final = 4300
"""The most tokens of an image for which FLUX.2's mu, the logarithm of the shift, depends on the
number of steps."""


def shifted_last(shift: float) -> float:
    """Return the lowest noise level of training, 1 / TRAINED_LEVELS, after one shift.

    Stable Diffusion 3's pipeline takes the levels from its scheduler. The scheduler spaces them
    equally from 1 down to this shifted level, and then shifts all levels, so that the lowest one is
    shifted twice.
    """
    least = 1 / TRAINED_LEVELS
    return shift * least / (1 + (shift - 1) * least)


@dataclass(frozen=True)
class FlowSchedule:
    """Noise levels: a shift k maps equally spaced levels s to k * s / (1 + (k - 1) * s).

    Follows diffusers' `FlowMatchEulerDiscreteScheduler` and, if the shift grows with the image,
    `calculate_shift` of its Flux pipeline:
    https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/schedulers/scheduling_flow_match_euler_discrete.py
    """

    shift: float = 1.0
    """The shift k with which images of all sizes are drawn; not used if `grows`."""
    last: float | None = None
    """The last level above 0, before `shift` is applied; None: 1 divided by the number of steps."""
    grows: bool = False
    """Whether k grows with the image: k = exp(mu), and mu is linear in the number of tokens."""
    tokens: tuple[float, float] = (256, 4096)
    """The numbers of tokens at two points of the line of mu."""
    mu: tuple[float, float] = (0.5, 1.15)
    """The values of mu at the two numbers in `tokens`."""
    terminal: float | None = None
    """The last level above 0, after the shift: the shifted levels are stretched so that they end at
    `terminal`. None: the shifted levels stay as they are."""

    def at(self, tokens: int) -> float:
        """Return the shift k for an image of this many tokens, whatever the number of steps."""
        if not self.grows:
            return self.shift
        (few, many), (low, high) = self.tokens, self.mu
        return math.exp(low + (high - low) * (tokens - few) / (many - few))

    def drawing(self, steps: int, tokens: int) -> float:  # noqa: ARG002 - for subclasses
        """Return the shift k for drawing an image of this many tokens in this many steps."""
        return self.at(tokens)

    def in_training(self, tokens: int) -> float:
        """Return the shift k for training on an image of this many tokens.

        If drawing uses one shift for all sizes, k in training is proportional to the square root
        of the number of tokens (arXiv:2403.03206, section 5.3.2). For an image of `tokens[1]`
        tokens (1024x1024 pixels), it equals the shift of drawing.
        """
        if self.grows:
            return self.at(tokens)
        return self.shift * math.sqrt(tokens / self.tokens[1])

    def levels(self, steps: int, tokens: int) -> list[float]:
        """Return `steps` descending noise levels for an image of `tokens` tokens, followed by 0.

        Raises:
            ArgumentError: `steps` is below 1.
        """
        if steps < 1:
            raise ArgumentError(f"sampler: found {steps} steps, expected at least 1")
        last = 1 / steps if self.last is None else self.last
        k = self.drawing(steps, tokens)
        spaced = [1 - (1 - last) * i / max(1, steps - 1) for i in range(steps)]
        levels = [k * level / (1 + (k - 1) * level) for level in spaced]
        if self.terminal is not None and steps > 1:
            stretch = (1 - self.terminal) / (1 - levels[-1])
            levels = [1 - (1 - level) * stretch for level in levels]
        return [*levels, 0.0]

    @classmethod
    def of(cls, weights: Path, default: FlowSchedule) -> FlowSchedule:
        """Return the schedule that the scheduler's configuration in a pipeline's folder describes.

        Args:
            weights: the pipeline's folder, or a single file, which has no such configuration.
            default: the family's schedule, which is the result for weights without a configuration.
                With one, it gives `tokens` and `mu` where the configuration omits them, and decides
                whether `last` comes from the training levels. Other omitted values are those that
                diffusers assumes: a shift of 1, which does not grow, and no terminal level.

        Raises:
            ConfigError: the configuration is damaged, or a number in it is not above 0.
        """
        path = weights / "scheduler" / "scheduler_config.json"
        if not path.is_file():
            return default
        try:
            fields = parse_json(path.read_bytes())
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{path}: expected an object, found {type(fields).__name__}")

        def number(name: str, otherwise: float) -> float:
            value = fields.get(name)
            if value is None:
                return otherwise
            if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
                raise ConfigError(f"{path}: {name} is {value!r}, expected a number above 0")
            return float(value)

        (few, many), (low, high) = default.tokens, default.mu
        shift = number("shift", 1.0)
        # A terminal level of null or 0 means none.
        terminal = fields.get("shift_terminal") and number("shift_terminal", 0.0)
        return cls(
            shift=shift,
            last=default.last and shifted_last(shift),
            grows=fields.get("use_dynamic_shifting") is True,
            tokens=(number("base_image_seq_len", few), number("max_image_seq_len", many)),
            mu=(number("base_shift", low), number("max_shift", high)),
            terminal=terminal or None,
        )


@dataclass(frozen=True)
class KleinSchedule(FlowSchedule):
    """FLUX.2's schedule, whose shift for drawing also depends on the number of steps.

    In training the shift depends on the image alone, as for Flux.1. `drawing` follows
    `compute_empirical_mu` of diffusers' pipeline:
    https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/pipelines/flux2/pipeline_flux2_klein.py
    """

    def drawing(self, steps: int, tokens: int) -> float:
        """Return the shift k, which is exp(mu) if it grows with the image.

        mu is linear in the number of steps, on a line through fits for 10 and for 200 steps. For
        images of more than `_MOST_FITTED` tokens, mu is always that of 200 steps.
        """
        if not self.grows:
            return self.shift
        at_10 = 8.73809524e-05 * tokens + 1.89833333
        at_200 = 0.00016927 * tokens + 0.45666666
        if tokens > _MOST_FITTED:
            return math.exp(at_200)
        # The line through (10, at_10) and (200, at_200), whose steps differ by 190.
        return math.exp(at_200 + (steps - 200) * (at_200 - at_10) / 190)
