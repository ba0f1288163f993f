"""Training objectives: what models predict from noised latents, behind one interface.

`noise` returns the model's inputs and the target as tensors by name, and `loss` compares a
prediction with them. `sample` is the noised latents, `times` the level of the noise (0 to 1000,
f32), `target` the right prediction. If present, `mask` weighs the elements of the latents, and
`weights` the examples.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Protocol

import trainable_candle as tc
from trainable_candle.train.objective import DiffusionObjective, FlowMatching, NoisedLatents

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from trainable_candle import Tensor
    from trainable_candle.settings import TrainConfig
    from trainable_candle.train.objective import NoiseSchedule
    from trainable_candle.train.trainer import Inputs

FLOW_TIMES: Final = 1000
"""The time of pure noise in a flow model."""
VALIDATION_SEED: Final = 20_261_121


class Objective(Protocol):
    """The noising of latents, and the loss of a prediction."""

    def noise(self, latents: Tensor, samples: Sequence[int], seed: int) -> dict[str, Tensor]:
        """Add noise to latents (B, ...), to each example at its own level.

        Args:
            latents: the latents to learn.
            samples: the number of each sample in the run; noise and level depend only on this
                number and `seed`.
            seed: the seed of the run.
        """

    def validation_noise(self, latents: Tensor, examples: Sequence[int]) -> dict[str, Tensor]:
        """Add noise; an example gets the same noise and level at every call of every run."""

    def loss(self, prediction: Tensor, inputs: Inputs) -> Tensor:
        """Return the loss of a prediction: one element, f32.

        Args:
            prediction: the model's output for `inputs["sample"]`.
            inputs: the result of `noise`. It may also have `mask` (B, 1, ...), which weighs
                the elements and is divided by its mean over an example, and `weights` (B,), which
                multiply the examples' losses.
        """


class Stepper(Protocol):
    """A sampler, which goes from noise to latents step by step, such as `tc.train.Sampler`."""

    @property
    def timesteps(self) -> list[float]:
        """The model's time at each step."""

    def init_noise(self, noise: Tensor, /) -> Tensor:
        """Return the first sample, from standard normal numbers."""

    def scale_input(self, x: Tensor, i: int, /) -> Tensor:
        """Return the sample of step `i`, scaled as the model expects."""

    def step(self, model_output: Tensor, i: int, x: Tensor, /) -> Tensor:
        """Return the sample of step `i + 1`."""


class NoiseObjective:
    """Prediction of the noise, or of the velocity, on a schedule of discrete timesteps.

    Raises:
        ConfigError, ArgumentError: a setting is outside its range.
    """

    def __init__(self, schedule: NoiseSchedule, config: TrainConfig, device: str) -> None:
        self._objective = DiffusionObjective(
            schedule,
            timesteps=config.timesteps or "uniform",
            shift=1.0 if config.timestep_shift is None else config.timestep_shift,
            min_timestep=config.min_timestep,
            max_timestep=config.max_timestep,
            min_snr_gamma=config.min_snr_gamma,
            noise_offset=config.noise_offset,
            multires_noise_iterations=config.multires_noise_iterations,
            multires_noise_discount=config.multires_noise_discount,
            loss=config.loss,
            huber_delta=config.huber_delta,
            huber_schedule=config.huber_schedule,
            device=device,
        )

    def noise(self, latents: Tensor, samples: Sequence[int], seed: int) -> dict[str, Tensor]:
        """See `Objective.noise`."""
        return _parts(self._objective.noise(latents, samples, seed))

    def validation_noise(self, latents: Tensor, examples: Sequence[int]) -> dict[str, Tensor]:
        """See `Objective.validation_noise`."""
        return _parts(self._objective.validation_noise(latents, examples))

    def loss(self, prediction: Tensor, inputs: Inputs) -> Tensor:
        """See `Objective.loss`."""
        noised = NoisedLatents(inputs["sample"], inputs["timesteps"], inputs["target"])
        return self._objective.loss(
            prediction, noised, mask=inputs.get("mask"), weights=inputs.get("weights")
        )


def _parts(noised: NoisedLatents) -> dict[str, Tensor]:
    return {
        "sample": noised.sample,
        "times": noised.timesteps.to("f32"),
        # The timesteps as integers, which index the objective's tables.
        "timesteps": noised.timesteps,
        "target": noised.target,
    }


class FlowObjective:
    """Flow matching: the model reads (1 - s) * data + s * noise and predicts noise - data.

    The signal-to-noise ratio (SNR) at level s is ((1 - s) / s)**2. Loss weights and Huber schedules
    are those of `DiffusionObjective` at the same SNR. Min-SNR weighs the squared error of the
    predicted data by min(SNR, gamma). This error is s**2 times the squared error of the velocity,
    whose weight is thus s**2 * min(SNR, gamma) (arXiv:2303.09556, section 3.4).

    Other weights are those of diffusers' script for Stable Diffusion 3: "sigma_sqrt" is 1 / s**2,
    "cosmap" is 2 / (pi * (1 - 2 * s + 2 * s**2)) (arXiv:2403.03206, section 3.1).

    Args:
        config: the settings of noise levels and loss.
        timesteps: the default distribution of levels.
        shift: the default shift of levels: a number, or a function that returns it for the height
            and width of latents.

    Raises:
        ArgumentError: a setting is outside its range.
    """

    def __init__(
        self,
        config: TrainConfig,
        *,
        timesteps: str = "uniform",
        shift: float | Callable[[tuple[int, int]], float] = 1.0,
    ) -> None:
        self._timesteps = config.timesteps or timesteps
        self._shift = shift if config.timestep_shift is None else config.timestep_shift
        # Check the settings now, even if the shift is a function.
        self._flow = FlowMatching(self._timesteps, 1.0 if callable(self._shift) else self._shift)
        self._loss = config.loss
        self._delta = config.huber_delta
        self._schedule = config.huber_schedule
        self._gamma = config.min_snr_gamma
        self._weighting = config.loss_weighting

    def noise(self, latents: Tensor, samples: Sequence[int], seed: int) -> dict[str, Tensor]:
        """See `Objective.noise`."""
        return _flow_parts(*self._flow_of(latents).noise(latents, samples, seed))

    def validation_noise(self, latents: Tensor, examples: Sequence[int]) -> dict[str, Tensor]:
        """See `Objective.validation_noise`."""
        flow = self._flow_of(latents)
        return _flow_parts(*flow.validation_noise(latents, examples, VALIDATION_SEED))

    def _flow_of(self, latents: Tensor) -> FlowMatching:
        """Return flow matching with the shift for latents of this size."""
        if not callable(self._shift):
            return self._flow
        height, width = latents.shape[2:]
        return FlowMatching(self._timesteps, self._shift((height, width)))

    def loss(self, prediction: Tensor, inputs: Inputs) -> Tensor:
        """See `Objective.loss`."""
        prediction, target = prediction.to("f32"), inputs["target"]
        mask, weights = inputs.get("mask"), inputs.get("weights")
        count = target.shape[0]
        s = inputs["times"] / FLOW_TIMES
        of_level = self._weights(s)
        if self._loss == "mse" and of_level is None and mask is None and weights is None:
            return tc.nn.functional.mse_loss(prediction, target)
        levels = s.reshape(count, *[1] * (target.ndim - 1))
        each = self._elements(prediction - target, levels)
        if mask is not None:
            mean = mask.reshape(count, -1).mean(dim=1).reshape(levels.shape)
            # An example whose mask is 0 everywhere has a loss of 0.
            each = each * mask / tc.where(mean > 0, mean, tc.ones_like(mean))
        losses = each.reshape(count, -1).mean(dim=1)
        if of_level is not None:
            losses = losses * of_level
        return (losses if weights is None else losses * weights).mean()

    def _weights(self, s: Tensor) -> Tensor | None:
        """Return the weight of the loss at each noise level; None if all weights are 1."""
        if self._gamma is not None:
            return ((1 - s) ** 2).minimum(s * s * self._gamma)
        if self._weighting == "sigma_sqrt":
            # Below the lowest level of the models' own training, the weight does not grow further.
            return 1 / s.maximum(1 / FLOW_TIMES) ** 2
        if self._weighting == "cosmap":
            return 2 / math.pi / (1 - 2 * s + 2 * s * s)
        return None

    def _elements(self, error: Tensor, levels: Tensor) -> Tensor:
        """Return the loss of each element of `error`; `levels` broadcasts to its shape."""
        if self._loss == "mse":
            return error * error
        if self._loss == "l1":
            return error.abs()
        delta = self._deltas(levels)
        size = error.abs()
        huber = tc.where(size <= delta, error * error * 0.5, delta * (size - delta * 0.5))
        return huber / delta if self._loss == "smooth_l1" else huber

    def _deltas(self, levels: Tensor) -> Tensor:
        """Return the absolute error above which the Huber losses are linear, for each noise level.

        The schedules are those of arXiv:2403.16728.
        """
        if self._schedule == "exponential":
            return (levels * math.log(self._delta)).exp()
        if self._schedule == "snr":
            # The paper divides by (1 + sigma)^2; here sigma = s / (1 - s), so 1 + sigma is
            # 1 / (1 - s).
            return (1 - levels) ** 2 * (1 - self._delta) + self._delta
        return tc.ones_like(levels) * self._delta


def _flow_parts(sample: Tensor, levels: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"sample": sample, "times": levels * FLOW_TIMES, "target": target}


class FlowSampler:
    """Euler's method along the predicted velocity, from noise to data.

    Args:
        levels: the noise levels, falling from 1 to 0: one more than there are steps.
    """

    def __init__(self, levels: Sequence[float]) -> None:
        self._flow = FlowMatching()
        self.levels = list(levels)
        self.timesteps = [FLOW_TIMES * level for level in self.levels[:-1]]
        """The model's time at each step."""

    def init_noise(self, noise: Tensor) -> Tensor:
        """Return the first sample: the noise itself."""
        return noise

    def scale_input(self, x: Tensor, i: int) -> Tensor:  # noqa: ARG002
        """Return the sample itself."""
        return x

    def step(self, model_output: Tensor, i: int, x: Tensor) -> Tensor:
        """Return the sample at the next noise level."""
        return self._flow.euler_step(x, model_output, self.levels[i], self.levels[i + 1])
