"""Sampling turns noise into latents, in steps, with a denoising model.

Sampling with `sample`::

    sampler = Sampler(schedule, steps=25, kind="dpmpp_2m")
    model = Guided(unet, positive={...}, negative={...}, scale=7.0)
    latents = sample(sampler, model, tc.randn((1, 4, 128, 128)))

or the loop of `sample`, if intermediate results are needed::

    x = sampler.init_noise(noise)
    for i, timestep in enumerate(sampler.timesteps):
        x = sampler.step(model(sampler.scale_input(x, i), timestep), i, x)
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

import trainable_candle as tc
from trainable_candle._core import Sampler, classifier_free_guidance
from trainable_candle.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainable_candle import Tensor

__all__ = ["ConditionedModel", "Guided", "Sampler", "classifier_free_guidance", "sample"]


class ConditionedModel(Protocol):
    """A denoising model, such as a UNet, called with its conditioning by name."""

    def __call__(self, x: Tensor, timestep: float, /, **conditioning: Tensor) -> Tensor:
        """Return the model's prediction for `x` at a timestep, in the shape of `x`."""


class Guided:
    """A model with a prompt and a negative prompt: classifier-free guidance (arXiv:2207.12598).

    ```python
    def denoise(x, timestep, text):
        return x * 0 + text.mean(1, keepdim=True)

    guided = tc.train.Guided(denoise, {"text": tc.ones(1, 8)}, {"text": tc.zeros(1, 8)}, scale=5.0)
    assert guided(tc.zeros(1, 4), 500.0).tolist() == [[5.0] * 4]
    ```

    Args:
        model: the denoising model, called as `model(x, timestep, **conditioning)`.
        positive: the conditioning for the prompt: tensors by name, with the batch as first axis.
        negative: the conditioning for the negative prompt, with the same names.
        scale: the guidance scale; 1 uses the prompt alone, at half the cost.
        batched: whether to call the model once, with a batch that has x twice: for the negative
            prompt, then for the prompt. If False, it is called twice, which needs less memory.
        rescale: takes the guided prediction and the prediction for the prompt, and returns the
            result; by default the result is the guided prediction. Not called if the scale is 1.

    Raises:
        ArgumentError: `positive` and `negative` have different names, or the scale is not finite.
        ShapeError: tensors of the same name cannot be put into one batch (if `batched`, and the
            scale is not 1).
    """

    def __init__(
        self,
        model: ConditionedModel,
        positive: Mapping[str, Tensor],
        negative: Mapping[str, Tensor],
        scale: float,
        *,
        batched: bool = True,
        rescale: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        if positive.keys() != negative.keys():
            raise ArgumentError(
                f"guidance: the prompt has {sorted(positive)}, the negative prompt "
                f"{sorted(negative)}; expected the same names"
            )
        if not math.isfinite(scale):
            raise ArgumentError(f"guidance: found scale {scale}, expected a finite number")
        self._model = model
        self._scale = scale
        self._rescale = rescale
        # The conditioning of each call of the model.
        if scale == 1.0:
            self._calls = [dict(positive)]
        elif batched:
            self._calls = [{name: tc.cat([negative[name], positive[name]]) for name in positive}]
        else:
            self._calls = [dict(negative), dict(positive)]

    def __call__(self, x: Tensor, timestep: float) -> Tensor:
        """Return the guided prediction for `x`."""
        if self._scale == 1.0:
            return self._model(x, timestep, **self._calls[0])
        if len(self._calls) == 1:
            outputs = self._model(tc.cat([x, x]), timestep, **self._calls[0])
            negative, positive = outputs.chunk(2)
        else:
            negative, positive = (self._model(x, timestep, **call) for call in self._calls)
        guided = classifier_free_guidance(negative, positive, self._scale)
        return guided if self._rescale is None else self._rescale(guided, positive)


@tc.no_grad()
def sample(sampler: Sampler, model: Callable[[Tensor, float], Tensor], noise: Tensor) -> Tensor:
    """Run all steps of a sampler, from noise to the final sample.

    ```python
    sampler = tc.train.Sampler(tc.train.NoiseSchedule(), 10)
    image = tc.train.sample(sampler, lambda x, timestep: x * 0, tc.randn(1, 4, 8, 8))
    ```

    Args:
        sampler: the sampler, which defines the steps.
        model: takes a noisy sample and a timestep, returns a prediction; a `Guided`, for example.
        noise: standard normal values in the shape of the sample.

    Returns:
        The sample after the last step, f32.
    """
    x = sampler.init_noise(noise)
    for i, timestep in enumerate(sampler.timesteps):
        x = sampler.step(model(sampler.scale_input(x, i), timestep), i, x)
    return x
