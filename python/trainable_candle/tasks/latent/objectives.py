"""Training objectives: what models predict from noised latents, behind one interface.

An objective's `noise` returns tensors by name: `sample` (the noised latents), `times` (their noise
levels as times from 0 to 1000, f32), `target` (the right prediction), and what else `loss` needs.
Its `loss` takes these tensors with the model's prediction. The caller may add `mask`, which weighs
the elements of the latents, and `weights`, which weighs the examples.
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
"""The seed of the noise and the noise levels of flow models in validation, in every run."""


class Objective(Protocol):
    """The noising of latents, and the loss of a prediction."""

    def noise(self, latents: Tensor, samples: Sequence[int], seed: int) -> dict[str, Tensor]:
        """Add noise to latents (B, ...), to each example at its own level.

        Args:
            latents: the latents to learn.
            samples: the number of each sample in the run; noise and level depend only on this
                number and `seed`.
            seed: the seed of the run.

        Returns:
            The tensors that the docstring of this module describes, by name.
        """

    def validation_noise(self, latents: Tensor, examples: Sequence[int]) -> dict[str, Tensor]:
        """Add noise as `noise` does, but the same to an example at every call and in every run.

        Args:
            latents: the latents of a validation batch.
            examples: the number of each example in the validation; noise and level depend only on
                this number.
        """

    def loss(self, prediction: Tensor, inputs: Inputs) -> Tensor:
        """Return the loss of a prediction: one element, f32.

        Args:
            prediction: the model's output for `inputs["sample"]`.
            inputs: the result of `noise` or `validation_noise`. It may also have `mask`
                (B, 1, ...) and `weights` (B,). `loss` divides an example's mask by the mask's mean
                and multiplies the elements' losses by the result; it multiplies the examples'
                losses by `weights`.
        """


class Stepper(Protocol):
    """A sampler, which goes from noise to latents step by step, such as `tc.train.Sampler`."""

    @property
    def timesteps(self) -> list[float]:
        """The model's time at each step."""

    def init_noise(self, noise: Tensor, /) -> Tensor:
        """Return the sample of step 0, made from standard normal numbers."""

    def scale_input(self, x: Tensor, i: int, /) -> Tensor:
        """Return the sample of step `i`, scaled as the model expects."""

    def step(self, model_output: Tensor, i: int, x: Tensor, /) -> Tensor:
        """Return the sample of step `i + 1`."""


class NoiseObjective:
    """Prediction of the noise, or of the velocity, on a schedule of discrete timesteps.

    Args:
        schedule: the noise schedule of the model's training.
        config: the settings of noise levels and loss.
        device: the device of the tensors that the methods take.

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
        return _by_name(self._objective.noise(latents, samples, seed))

    def validation_noise(self, latents: Tensor, examples: Sequence[int]) -> dict[str, Tensor]:
        """See `Objective.validation_noise`."""
        return _by_name(self._objective.validation_noise(latents, examples))

    def loss(self, prediction: Tensor, inputs: Inputs) -> Tensor:
        """See `Objective.loss`."""
        noised = NoisedLatents(inputs["sample"], inputs["timesteps"], inputs["target"])
        return self._objective.loss(
            prediction, noised, mask=inputs.get("mask"), weights=inputs.get("weights")
        )


def _by_name(noised: NoisedLatents) -> dict[str, Tensor]:
    return {
        "sample": noised.sample,
        "times": noised.timesteps.to("f32"),
        # `loss` needs the timesteps as integers, as indices of tables.
        "timesteps": noised.timesteps,
        "target": noised.target,
    }


class FlowObjective:
    """Flow matching: at noise level s, the model reads (1 - s) * data + s * noise.

    It predicts the velocity, noise - data. The signal-to-noise ratio (SNR) at level s is
    ((1 - s) / s)**2.

    As in `DiffusionObjective`, `min_snr_gamma` gives the squared error of the predicted data the
    weight min(SNR, gamma) (arXiv:2303.09556, section 3.4). This error is s**2 times the squared
    error of the velocity, so the latter gets the weight s**2 * min(SNR, gamma).

    The weights of `loss_weighting` are those of diffusers' script for Stable Diffusion 3:
    "sigma_sqrt" is 1 / s**2, and "cosmap" is 2 / (pi * (1 - 2 * s + 2 * s**2)) (arXiv:2403.03206,
    section 3.1).

    Args:
        config: the settings of noise levels and loss.
        timesteps: the distribution of levels, unless the settings have one.
        shift: the shift of levels, unless the settings have one: a number, or a function that
            returns the number for the height and width of latents.

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
        # Even if the shift is a function, this checks the distribution now.
        self._flow = FlowMatching(self._timesteps, 1.0 if callable(self._shift) else self._shift)
        self._loss = config.loss
        self._huber_delta = config.huber_delta
        self._huber_schedule = config.huber_schedule
        self._gamma = config.min_snr_gamma
        self._weighting = config.loss_weighting

    def noise(self, latents: Tensor, samples: Sequence[int], seed: int) -> dict[str, Tensor]:
        """See `Objective.noise`."""
        return _flow_by_name(*self._flow_of(latents).noise(latents, samples, seed))

    def validation_noise(self, latents: Tensor, examples: Sequence[int]) -> dict[str, Tensor]:
        """See `Objective.validation_noise`."""
        flow = self._flow_of(latents)
        return _flow_by_name(*flow.validation_noise(latents, examples, VALIDATION_SEED))

    def _flow_of(self, latents: Tensor) -> FlowMatching:
        """Return flow matching with the shift for the size of the latents."""
        if not callable(self._shift):
            return self._flow
        height, width = latents.shape[2:]
        return FlowMatching(self._timesteps, self._shift((height, width)))

    def loss(self, prediction: Tensor, inputs: Inputs) -> Tensor:
        """See `Objective.loss`."""
        prediction, target = prediction.to("f32"), inputs["target"]
        mask, weights = inputs.get("mask"), inputs.get("weights")
        count = target.shape[0]
        levels = inputs["times"] / FLOW_TIMES
        level_weights = self._weights(levels)
        if self._loss == "mse" and level_weights is None and mask is None and weights is None:
            return tc.nn.functional.mse_loss(prediction, target)
        spread_levels = levels.reshape(count, *[1] * (target.ndim - 1))
        elements = self._elements(prediction - target, spread_levels)
        if mask is not None:
            mean = mask.reshape(count, -1).mean(dim=1).reshape(spread_levels.shape)
            # An example whose mask is 0 everywhere has a loss of 0.
            elements = elements * mask / tc.where(mean > 0, mean, tc.ones_like(mean))
        losses = elements.reshape(count, -1).mean(dim=1)
        if level_weights is not None:
            losses = losses * level_weights
        return (losses if weights is None else losses * weights).mean()

    def _weights(self, s: Tensor) -> Tensor | None:
        """Return the weight of the loss at each noise level `s`; None if all weights are 1."""
        if self._gamma is not None:
            # s**2 * min(SNR, gamma), without a division by s, which may be 0.
            return ((1 - s) ** 2).minimum(s * s * self._gamma)
        if self._weighting == "sigma_sqrt":
            # diffusers' script has no levels below 1 / FLOW_TIMES: there, this weight is constant.
            return 1 / s.maximum(1 / FLOW_TIMES) ** 2
        if self._weighting == "cosmap":
            return 2 / math.pi / (1 - 2 * s + 2 * s * s)
        return None

    def _elements(self, error: Tensor, levels: Tensor) -> Tensor:
        """Return the loss of each element of `error`; `levels` broadcasts to the error's shape."""
        if self._loss == "mse":
            return error * error
        if self._loss == "l1":
            return error.abs()
        delta = self._deltas(levels)
        size = error.abs()
        huber = tc.where(size <= delta, error * error * 0.5, delta * (size - delta * 0.5))
        return huber / delta if self._loss == "smooth_l1" else huber

    def _deltas(self, levels: Tensor) -> Tensor:
        """Return, for each noise level, the absolute error above which the Huber losses are linear.

        The schedules are those of arXiv:2403.16728.
        """
        if self._huber_schedule == "exponential":
            return (levels * math.log(self._huber_delta)).exp()
        if self._huber_schedule == "snr":
            # The paper divides by (1 + sigma)^2; here sigma = s / (1 - s), so 1 + sigma is
            # 1 / (1 - s).
            return (1 - levels) ** 2 * (1 - self._huber_delta) + self._huber_delta
        return tc.ones_like(levels) * self._huber_delta


def _flow_by_name(sample: Tensor, levels: Tensor, target: Tensor) -> dict[str, Tensor]:
    return {"sample": sample, "times": levels * FLOW_TIMES, "target": target}


class FlowSampler:
    """Euler's method along the predicted velocity, from noise to data.

    Args:
        levels: the noise levels that the steps go through, from 1 down to 0.
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
        """Return the sample as it is."""
        return x

    def step(self, model_output: Tensor, i: int, x: Tensor) -> Tensor:
        """Return the sample at the next noise level."""
        return self._flow.euler_step(x, model_output, self.levels[i], self.levels[i + 1])
