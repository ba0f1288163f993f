"""What sets SDXL apart from other latent models."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

import trainable_candle as tc
from trainable_candle.errors import ConfigError
from trainable_candle.families.sdxl import files
from trainable_candle.families.sdxl.estimate import (
    encode_area,
    estimate,
    sampling_bytes,
    text_parts,
)
from trainable_candle.families.sdxl.files import TEXT_ENCODERS
from trainable_candle.families.sdxl.identity import latents_identity, text_identity
from trainable_candle.families.sdxl.text import TextEncoders, unread_layers
from trainable_candle.models import SDXLUNet
from trainable_candle.settings import GROUPS
from trainable_candle.tasks.estimate import memory_limit
from trainable_candle.tasks.latent.coders import KLCoder
from trainable_candle.tasks.latent.family import LatentFamily
from trainable_candle.tasks.latent.objectives import NoiseObjective
from trainable_candle.train.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from trainable_candle import Tensor
    from trainable_candle.data import Dataset
    from trainable_candle.data.buckets import Frame
    from trainable_candle.models import Model
    from trainable_candle.settings import Group, TrainConfig
    from trainable_candle.tasks.estimate import Estimate, Shape
    from trainable_candle.tasks.task import Split
    from trainable_candle.train.objective import NoiseSchedule
    from trainable_candle.train.trainer import Inputs


class SDXL(LatentFamily):
    """Stable Diffusion XL: a UNet under text features of CLIP-L and OpenCLIP-bigG, and sizes."""

    name: ClassVar[str] = "sdxl"
    summary: ClassVar[str] = "Stable Diffusion XL (a tiny one that draws flowers is built in)"
    groups: ClassVar[tuple[type[Group], ...]] = GROUPS
    parts: ClassVar[tuple[str, ...]] = files.SUBFOLDERS
    component: ClassVar[str] = "unet"
    formats: ClassVar[tuple[str, ...]] = ("kohya", "diffusers", "peft", "comfyui")
    # Every layer of the transformers, as kohya's scripts choose.
    targets: ClassVar[tuple[str, ...]] = (
        r".*attentions\.\d+\.proj_(in|out)",
        r".*\.transformer_blocks\..*",
    )
    text_targets: ClassVar[tuple[str, ...]] = (
        "q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2",
    )  # fmt: skip
    guidance: ClassVar[float] = 5.0

    @classmethod
    def default_weights(cls) -> Path | None:
        """The small checkpoint that the package ships."""
        return files.shipped()

    @property
    def facts(self) -> files.Facts:
        """What the headers of the checkpoint say.

        Raises:
            MissingFileError, WeightsFormatError: it is no SDXL model.
        """
        return files.facts(self.weights)

    def require_own(self) -> None:
        """Look for the parts of SDXL."""
        _ = self.facts

    @property
    def resolution(self) -> int:
        """The side of the images that the model was made for, px."""
        return files.resolution(self.weights)

    def check(self) -> None:
        """Check that the text encoders have the layers that are left out.

        Raises:
            ConfigError: they have not.
        """
        counts = [self.facts.parts[name].config["num_hidden_layers"] for name in TEXT_ENCODERS]
        # The last layer is left out anyway, and one must remain to have adapters.
        most = min(counts) - 2
        if self.config.clip_skip is not None and self.config.clip_skip > most:
            raise ConfigError(
                f"--clip-skip is {self.config.clip_skip}, expected at most {most}: "
                f"the text encoders have {' and '.join(map(str, counts))} layers"
            )

    def layers(self) -> Mapping[str, Shape]:
        """The layers of the UNet."""
        return self.facts.parts["unet"].layers

    def text_layers(self) -> Mapping[str, Mapping[str, Shape]]:
        """Those of the two text encoders."""
        return {name: self.facts.parts[name].layers for name in TEXT_ENCODERS}

    def estimate(self, config: TrainConfig, data: Split[Dataset], limit: float) -> Estimate:
        """From the configuration of the UNet and the headers of the files."""
        return estimate(self, config, data, limit)

    def drawing_bytes(self, size: tuple[int, int], count: int) -> int:
        """Models, predictions with guidance, decoding, images."""
        return sampling_bytes(self.facts, size, count, self.dtype)

    def encode_area(self) -> int:
        """As many pixels as the memory allows on a GPU."""
        return encode_area(self.facts, self.config, memory_limit(self.config))

    def text_parts(self) -> int:
        """Rows of tokens that are encoded at once."""
        return text_parts(self.config)

    @cached_property
    def model(self) -> SDXLUNet:
        """The UNet."""
        return SDXLUNet.from_pretrained(
            self.weights, dtype=self.dtype, device=self.device, subfolder="unet"
        )

    @cached_property
    def coder(self) -> KLCoder:
        """The autoencoder."""
        config, factor = self.facts.parts["vae"].config, self.facts.factor
        return KLCoder(self.weights, config, factor, self.device, latents_identity)

    @cached_property
    def encoders(self) -> TextEncoders:
        """The text encoders with their tokenizers."""
        skipped = self.config.clip_skip or 0
        return TextEncoders.load(self.weights, self.dtype, self.device, skipped)

    @property
    def text_models(self) -> Mapping[str, Model]:
        """The text encoders."""
        return dict(zip(TEXT_ENCODERS, self.encoders.models, strict=True))

    def drop_text_models(self) -> None:
        """Forget the text encoders."""
        self.__dict__.pop("encoders", None)

    @property
    def schedule(self) -> NoiseSchedule:
        """The noise that the model was trained with."""
        return files.schedule(self.weights, self.config.prediction_type)

    def objective(self, device: str) -> NoiseObjective:
        """Noise or velocity, as the checkpoint or the settings say."""
        return NoiseObjective(self.schedule, self.config, device)

    def stepper(self, steps: int, sampler: str | None, size: tuple[int, int]) -> Sampler:  # noqa: ARG002
        """Euler's method unless another is asked for."""
        return Sampler(self.schedule, steps, sampler or "euler")

    def predict(self, sample: Tensor, times: Tensor, conditions: Inputs) -> Tensor:
        """What the UNet says."""
        return self.model(
            sample,
            times,
            conditions["encoder_hidden_states"],
            text_embeds=conditions["text_embeds"],
            time_ids=conditions["time_ids"],
        )

    def conditions(self, frames: Sequence[Frame]) -> dict[str, Tensor]:
        """Sizes and cuts: "micro-conditioning", arXiv:2307.01952, section 2.2."""
        return {"time_ids": tc.tensor(np.array([time_ids(frame) for frame in frames], np.float32))}

    def features(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """`encoder_hidden_states` (B, 77 n, 2048) and `text_embeds` (B, 1280)."""
        return self.encoders(captions)

    def text_identity(self) -> dict[str, str]:
        """The text encoders' files, and how they encode."""
        how = {"clip_skip": str(self.config.clip_skip or 0), "dtype": str(self.dtype)}
        return {**text_identity(self.weights), **how}

    def text_length(self, caption: str) -> int:
        """How many times 77 tokens a caption needs."""
        return self.encoders.chunks(caption)

    def tokens(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """The tokens of captions for each encoder."""
        return self.encoders.tokens(captions)

    def encode_tokens(self, tokens: Inputs, batch: int) -> dict[str, Tensor]:
        """The features of `batch` captions from their tokens."""
        return self.encoders.encode(tokens, batch)

    def unread_layers(self, part: str) -> list[str]:
        """The last layers of the first encoder; of the second, the pooled text needs all."""
        if part != TEXT_ENCODERS[0]:
            return []
        count = self.facts.parts[part].config["num_hidden_layers"]
        return unread_layers(count, self.config.clip_skip or 0)

    def adapted_parts(self, path: Path) -> Sequence[str]:
        """The parts that an adapter file is for, whatever its names' style."""
        return files.adapted_parts(path)

    def save_merged(self, models: Mapping[str, Model], output: Path) -> None:
        """Write a folder if the checkpoint is one; else, or for `.safetensors`, a file.

        Raises:
            ConfigError: there is something else.
            OSError: it cannot be written.
        """
        if output.suffix == ".safetensors":
            files.save_merged_file(self.weights, models, output)
        elif self.weights.is_dir():
            files.save_merged_folder(self.weights, models, output)
        else:
            raise ConfigError(
                f"--output is {output}, expected the name of a .safetensors file: "
                f"{self.weights.name} is one"
            )


def time_ids(frame: Frame) -> tuple[int, ...]:
    """Height and width of the original; top and left of the cut; height and width of the cut."""
    width, height = frame.original
    return height, width, frame.top, frame.left, frame.bucket.height, frame.bucket.width
