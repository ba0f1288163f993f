"""Pictures from prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

import trainable_candle as tc
from trainable_candle.draws import draw_from
from trainable_candle.errors import ConfigError, NonFiniteError
from trainable_candle.recipes.sdxl.tiles import tile_size
from trainable_candle.train.graphs import PassGraphs
from trainable_candle.train.sampler import Guided, Sampler

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt

    from trainable_candle import Tensor
    from trainable_candle.models import AutoencoderKL, SDXLUNet
    from trainable_candle.recipes.base import SampleOptions
    from trainable_candle.train.objective import NoiseSchedule

GUIDANCE: Final = 5.0
SAMPLER: Final = "euler"


@tc.no_grad()
def draw(
    unet: SDXLUNet,
    vae: AutoencoderKL,
    schedule: NoiseSchedule,
    features: Callable[[Sequence[str]], Mapping[str, Tensor]],
    prompts: Sequence[str],
    options: SampleOptions,
    size: tuple[int, int],
    device: str,
) -> npt.NDArray[np.uint8]:
    """One picture a prompt, the noise of picture n from seed + n; shape (n, height, width, 3).

    The library's generator is left as it was.

    Args:
        unet: predicts.
        vae: decodes.
        schedule: the noise that the UNet was trained with.
        features: from prompts to `encoder_hidden_states` and `text_embeds`.
        prompts: what to draw.
        options: how.
        size: width and height, px, where the options name none.
        device: of the models.

    Raises:
        ConfigError: the size is no multiple of what the models need.
        NonFiniteError: a picture has a NaN or an infinity.
    """
    width, height = options.size or size
    factor = vae.downscale
    require_multiple((width, height), factor)
    graphs = _graphs(unet, device)
    shape = (1, 4, height // factor, width // factor)
    pictures = []
    for number, prompt in enumerate(prompts):
        noise: Tensor = draw_from(
            (options.seed + number) % 2**64, lambda: tc.randn(shape, device=device)
        )
        positive, negative = _paired(features([prompt]), features([options.negative_prompt]))
        time_ids = tc.tensor(
            np.array([[height, width, 0, 0, height, width]], np.float32), device=device
        )
        latents = _denoise(
            graphs,
            schedule,
            noise,
            {**positive, "time_ids": time_ids},
            {**negative, "time_ids": time_ids},
            options,
        )
        latents = latents.to("f32") / vae.scaling_factor
        image = vae.decode(latents, tile_size=tile_size(width, height))
        pictures.append(_pixels(image))
    return np.concatenate(pictures)


def require_multiple(size: tuple[int, int], factor: int) -> None:
    """Check that pictures of a width and height can be drawn.

    Raises:
        ConfigError: the size is no multiple of what the models need.
    """
    width, height = size
    if width % factor or height % factor:
        raise ConfigError(
            f"sample: the size is {width}x{height} px, expected multiples of {factor}"
        )


def _paired(
    positive: Mapping[str, Tensor], negative: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The features with texts of the same length: the shorter one is said again."""
    one, other = dict(positive), dict(negative)
    name = "encoder_hidden_states"
    length = max(one[name].shape[1], other[name].shape[1])
    for features in (one, other):
        text = features[name]
        while text.shape[1] < length:
            missing = min(features[name].shape[1], length - text.shape[1])
            text = tc.cat([text, features[name].narrow(1, 0, missing)], 1)
        features[name] = text
    return one, other


def _graphs(unet: SDXLUNet, device: str) -> PassGraphs:
    """The UNet, from `sample`, `timestep` and conditioning: on a GPU as a CUDA graph."""

    def predict(inputs: Mapping[str, Tensor], _first: bool) -> Tensor:
        conditioning = dict(inputs)
        sample, timestep = conditioning.pop("sample"), conditioning.pop("timestep")
        return unet(sample, timestep, **conditioning)

    return PassGraphs(predict, keep=int(device.startswith("cuda")))


def _denoise(
    graphs: PassGraphs,
    schedule: NoiseSchedule,
    noise: Tensor,
    positive: Mapping[str, Tensor],
    negative: Mapping[str, Tensor],
    options: SampleOptions,
) -> Tensor:
    sampler = Sampler(schedule, options.steps, options.sampler or SAMPLER)
    scale = GUIDANCE if options.guidance is None else options.guidance

    def predict(x: Tensor, timestep: float, /, **conditioning: Tensor) -> Tensor:
        time = tc.full((1,), timestep, device=x.device)
        return graphs({"sample": x, "timestep": time, **conditioning}, first=True)

    guided = Guided(predict, positive, negative, scale)
    latents = sampler.init_noise(noise)
    for step, timestep in enumerate(sampler.timesteps):
        prediction = guided(sampler.scale_input(latents, step), timestep)
        latents = sampler.step(prediction, step, latents)
    return latents


def _pixels(image: Tensor) -> npt.NDArray[np.uint8]:
    """(n, 3, h, w), -1 to 1 -> (n, h, w, 3), 0 to 255."""
    values = image.permute(0, 2, 3, 1).to("f32").numpy()
    if not np.isfinite(values).all():
        raise NonFiniteError(
            "sample: the picture has values that are no finite numbers; the adapter may be broken "
            "(`trainable-candle verify` tells), or f16 too narrow for the model"
        )
    pixels: npt.NDArray[np.uint8] = np.clip(np.rint((values + 1.0) * 127.5), 0, 255).astype(
        np.uint8
    )
    return pixels
