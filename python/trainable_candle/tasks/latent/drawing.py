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


class Usual(NamedTuple):
    """How a model draws images: its family's values for options that are not given."""

    steps: int = 25
    """Steps of the sampler."""
    guidance: float = 1.0
    """Scale of classifier-free guidance; 1 turns it off."""


@dataclass(frozen=True)
class SampleOptions:
    """How images are drawn; None means the default of the model."""

    steps: int | None = None
    """Steps of the sampler, at least 1."""
    seed: int = 0
    """Seed of the noise."""
    guidance: float | None = None
    """Scale of classifier-free guidance; 1 turns it off."""
    negative_prompt: str = ""
    """The negative prompt, away from which guidance leads; empty: the model's own default."""
    size: tuple[int, int] | None = None
    """Width and height, px."""
    sampler: str | None = None
    """`euler` or `dpmpp_2m`."""

    def chosen(self, usual: Usual) -> Usual:
        """Return these options' steps and guidance, or those of `usual` where they are None."""
        return Usual(
            usual.steps if self.steps is None else self.steps,
            usual.guidance if self.guidance is None else self.guidance,
        )


def parse_size(text: str) -> tuple[int, int]:
    """Return width and height from `1024x768`, or from `1024` for a square.

    Raises:
        ConfigError: the text has neither form, or a side is 0.
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

    Images that are drawn together have noise from one seed: `options.seed` plus the index of the
    first of these images. The state of the library's random generator does not change.

    Args:
        family: the model.
        prompts: what to draw.
        options: how to draw.
        features: maps prompts to text features.
        size: default width and height, px.

    Raises:
        ConfigError, ArgumentError: a prompt, the sampler or the number of steps does not suit the
            model, or a side is not a multiple of `family.multiple`.
        MissingFileError, WeightsFormatError: a part of the model that is not loaded yet is missing,
            damaged, or of another model.
        NonFiniteError: an image has a NaN or an infinity.
    """
    width, height = options.size or size
    factor = family.coder.factor
    require_multiple((width, height), family.multiple)
    graphs = _graphs(family)
    shape = (family.coder.channels, height // factor, width // factor)
    steps, guidance = options.chosen(family.usual)
    # A model with distilled guidance is called once per step, without a negative prompt.
    scale = 1.0 if family.distilled_guidance else guidance
    images = []
    for start in range(0, len(prompts), family.at_once):
        group = prompts[start : start + family.at_once]
        noise = _noise((options.seed + start) % 2**64, (len(group), *shape), family.device)
        positive = features(group)
        other = options.negative_prompt or family.no_prompt
        negative = positive if scale == 1 else features([other] * len(group))
        if not family.reads_texts_apart:
            positive, negative = paired(positive, negative)
        frames = [Frame.whole(width, height)] * len(group)
        conditions = {
            name: tensor.to(family.device)
            for name, tensor in family.conditions(frames, guidance).items()
        }
        guided = Guided(
            _predictor(graphs, len(group)),
            {**positive, **conditions},
            {**negative, **conditions},
            scale,
            batched=not family.reads_texts_apart,
            rescale=family.rescaled,
        )
        stepper = family.stepper(steps, options.sampler, (width, height))
        latents = stepper.init_noise(noise)
        for step, timestep in enumerate(stepper.timesteps):
            prediction = guided(stepper.scale_input(latents, step), timestep)
            latents = stepper.step(prediction, step, latents)
        images.append(to_pixels(family.coder.decode(latents)))
    return np.concatenate(images)


def require_multiple(size: tuple[int, int], factor: int) -> None:
    """Check that images of a width and height can be drawn.

    Raises:
        ConfigError: a side is not a multiple of `factor`.
    """
    width, height = size
    if width % factor or height % factor:
        raise ConfigError(
            f"sample: the size is {width}x{height} px, expected multiples of {factor}"
        )


def paired(
    positive: Mapping[str, Tensor], negative: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Repeat the features of the shorter of two texts up to the length of the longer."""
    one, other = dict(positive), dict(negative)
    for name, found in positive.items():
        if found.ndim < 3:
            continue
        length = max(found.shape[1], other[name].shape[1])
        for features in (one, other):
            text = whole = features[name]
            while whole.shape[1] < length:
                missing = min(text.shape[1], length - whole.shape[1])
                whole = tc.cat([whole, text.narrow(1, 0, missing)], 1)
            features[name] = whole
    return one, other


def _noise(seed: int, shape: tuple[int, ...], device: str) -> Tensor:
    noise: Tensor = draw_from(seed, lambda: tc.randn(shape, device=device))
    return noise


def _graphs(family: LatentModel) -> PassGraphs:
    """Return the model as a function of `sample`, `times`, conditions; CUDA graphs on a GPU."""

    def predict(inputs: Mapping[str, Tensor], _first: bool) -> Tensor:
        return family.predict(inputs["sample"], inputs["times"], inputs)

    shapes = 2 if family.reads_texts_apart else 1
    return PassGraphs(predict, keep=shapes * family.device.startswith("cuda"))


def _predictor(graphs: PassGraphs, count: int) -> ConditionedModel:
    """Return the model in the form that `Guided` calls, to draw `count` images."""

    def predict(x: Tensor, timestep: float, /, **conditions: Tensor) -> Tensor:
        # For one image, the prompt and the negative prompt in one batch share one row of times.
        rows = 1 if count == 1 else x.shape[0]
        times = tc.full((rows,), timestep, device=x.device)
        return graphs({"sample": x, "times": times, **conditions}, first=True)

    return predict


def to_pixels(image: Tensor) -> npt.NDArray[np.uint8]:
    """Convert (n, 1 or 3, h, w), -1 to 1, to (n, h, w, 3), 0 to 255, rounded and clipped.

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
