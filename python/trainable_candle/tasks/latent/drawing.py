"""Draws images from prompts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

import trainable_candle as tc
from trainable_candle.data.buckets import Frame
from trainable_candle.draws import draw_from
from trainable_candle.errors import ConfigError, NonFiniteError
from trainable_candle.train.graphs import PassGraphs
from trainable_candle.train.sampler import Guided

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from trainable_candle import Tensor
    from trainable_candle.tasks.latent.model import LatentModel
    from trainable_candle.train.sampler import ConditionedModel

    Features = Callable[[Sequence[str]], Mapping[str, Tensor]]
    """A function that maps prompts to text features by name."""


class DrawingDefaults(NamedTuple):
    """The model's values for the options of drawing that are not given."""

    steps: int = 25
    """Steps of the sampler."""
    guidance: float = 1.0
    """Scale of classifier-free guidance; 1 turns it off."""


@dataclass(frozen=True)
class SampleOptions:
    """How images are drawn; for options that are None, the model or the task has a default."""

    steps: int | None = None
    """Steps of the sampler, at least 1."""
    seed: int = 0
    """Seed of the noise, 0 to 2**64 - 1."""
    guidance: float | None = None
    """Scale of classifier-free guidance; 1 turns it off."""
    negative_prompt: str = ""
    """The prompt that guidance leads away from; empty: the model's `no_prompt`."""
    size: tuple[int, int] | None = None
    """Width and height, px."""
    sampler: str | None = None
    """`euler` or `dpmpp_2m`."""

    def chosen(self, defaults: DrawingDefaults) -> DrawingDefaults:
        """Return the steps and the guidance of these options; None is replaced by the default."""
        return DrawingDefaults(
            defaults.steps if self.steps is None else self.steps,
            defaults.guidance if self.guidance is None else self.guidance,
        )


def parse_size(text: str) -> tuple[int, int]:
    """Return width and height from `1024x768`, or from `1024` for a square.

    Raises:
        ConfigError: the text has neither form, or a side is 0 or has more than five digits.
    """
    match = re.fullmatch(r"(\d{1,5})(?:[xX](\d{1,5}))?", text.strip(), re.ASCII)
    if match is None or not int(match[1]) or not int(match[2] or 1):
        raise ConfigError(
            f"size: {text!r} is not a size in pixels, expected WIDTHxHEIGHT, or one number for a "
            "square"
        )
    return int(match[1]), int(match[2] or match[1])


@tc.no_grad()
def draw(
    family: LatentModel,
    prompts: Sequence[str],
    options: SampleOptions,
    features: Features,
    size: tuple[int, int],
) -> npt.NDArray[np.uint8]:
    """Draw one image per prompt; shape (n, height, width, 3).

    Up to `family.at_once` images are drawn as a batch. The noise of a batch has one seed:
    `options.seed` plus the index of the first image of the batch. The state of the library's
    random generator does not change.

    Args:
        family: the model.
        prompts: what to draw, at least one prompt.
        options: how to draw.
        features: maps prompts to text features.
        size: width and height if `options.size` is None, px.

    Raises:
        ConfigError, ArgumentError: a prompt, the sampler or the number of steps does not suit the
            model, or a side is not a multiple of `family.multiple`.
        MissingFileError, WeightsFormatError: a part of the model that is not loaded yet is missing,
            damaged, or of another model.
        NonFiniteError: an image has a NaN or an infinity.
    """
    width, height = options.size or size
    require_multiple((width, height), family.multiple)
    factor = family.coder.factor
    shape = (family.coder.channels, height // factor, width // factor)
    graphs = _graphs(family)
    steps, guidance = options.chosen(family.drawing_defaults)
    # A model with distilled guidance takes `guidance` as an input, one of `conditions`. It is
    # called once per step, without a negative prompt.
    scale = 1.0 if family.distilled_guidance else guidance
    images = []
    for start in range(0, len(prompts), family.at_once):
        batch = prompts[start : start + family.at_once]
        noise = _noise((options.seed + start) % 2**64, (len(batch), *shape), family.device)
        positive = features(batch)
        negative_prompt = options.negative_prompt or family.no_prompt
        negative = positive if scale == 1 else features([negative_prompt] * len(batch))
        # Unless the model reads the two prompts in separate calls, one batch has both.
        if not family.reads_texts_apart:
            positive, negative = paired(positive, negative)
        frames = [Frame.whole(width, height)] * len(batch)
        conditions = {
            name: tensor.to(family.device)
            for name, tensor in family.conditions(frames, guidance).items()
        }
        guided = Guided(
            _predictor(graphs, len(batch)),
            {**positive, **conditions},
            {**negative, **conditions},
            scale,
            batched=not family.reads_texts_apart,
            rescale=family.rescaled,  # adjusts the guided prediction, if the family needs it
        )
        stepper = family.stepper(steps, options.sampler, (width, height))
        latents = stepper.init_noise(noise)
        for step, timestep in enumerate(stepper.timesteps):
            prediction = guided(stepper.scale_input(latents, step), timestep)
            latents = stepper.step(prediction, step, latents)
        images.append(to_pixels(family.coder.decode(latents)))
    return np.concatenate(images)


def require_multiple(size: tuple[int, int], factor: int) -> None:
    """Check that width and height are multiples of `factor`.

    Raises:
        ConfigError: a side is not such a multiple.
    """
    width, height = size
    if width % factor or height % factor:
        raise ConfigError(
            f"sample: the size is {width}x{height} px, expected multiples of {factor}"
        )


def paired(
    positive: Mapping[str, Tensor], negative: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the features of two texts in equal lengths, as a batch of both needs them.

    The features of the shorter text are repeated up to the length of the longer. Unlike zeros,
    whole repetitions do not change the results of cross-attention.
    """
    both = dict(positive), dict(negative)
    for name in positive:
        # Features with fewer than three dimensions have no length.
        if positive[name].ndim < 3:
            continue
        length = max(positive[name].shape[1], negative[name].shape[1])
        for features in both:
            text = repeated = features[name]
            while repeated.shape[1] < length:
                count = min(text.shape[1], length - repeated.shape[1])
                repeated = tc.cat([repeated, text.narrow(1, 0, count)], 1)
            features[name] = repeated
    return both


def _noise(seed: int, shape: tuple[int, ...], device: str) -> Tensor:
    noise: Tensor = draw_from(seed, lambda: tc.randn(shape, device=device))
    return noise


def _graphs(family: LatentModel) -> PassGraphs:
    """Return a function that calls the model, on a GPU as a CUDA graph.

    The function's inputs are `sample`, `times` and the conditions, by name.
    """

    # `_first`, whether a call is the first of an optimizer step, has no meaning in drawing.
    def predict(inputs: Mapping[str, Tensor], _first: bool) -> Tensor:
        return family.predict(inputs["sample"], inputs["times"], inputs)

    # There is a graph for each shape of the inputs. If the prompt and the negative prompt are read
    # in separate calls, their texts may differ in length.
    shapes = 2 if family.reads_texts_apart else 1
    return PassGraphs(predict, keep=shapes if family.device.startswith("cuda") else 0)


def _predictor(graphs: PassGraphs, count: int) -> ConditionedModel:
    """Return `graphs` in the form that `Guided` calls, to draw a batch of `count` images."""

    def predict(x: Tensor, timestep: float, /, **conditions: Tensor) -> Tensor:
        # With one image, `times` has one entry even if `x` has the image twice, for both prompts:
        # the models of pipelines broadcast one time to the batch.
        entries = 1 if count == 1 else x.shape[0]
        times = tc.full((entries,), timestep, device=x.device)
        return graphs({"sample": x, "times": times, **conditions}, first=True)

    return predict


def to_pixels(image: Tensor) -> npt.NDArray[np.uint8]:
    """Convert images (n, 1 or 3, h, w), -1 to 1, to pixels (n, h, w, 3), 0 to 255.

    Values are rounded, and clipped to the range.

    Raises:
        NonFiniteError: there is a NaN or an infinity.
    """
    values = image.permute(0, 2, 3, 1).to("f32").numpy()
    if not np.isfinite(values).all():
        raise NonFiniteError(
            "sample: the image has non-finite values; the adapter may be broken (check it with "
            "`trainable-candle verify`), or the range of f16 may be too small for the model"
        )
    pixels: npt.NDArray[np.uint8] = np.clip(np.rint((values + 1.0) * 127.5), 0, 255).astype(
        np.uint8
    )
    return pixels if pixels.shape[3] == 3 else np.repeat(pixels, 3, axis=3)
