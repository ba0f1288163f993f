"""SDXL: its text encoders, its conditions and what differs from other pipelines."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

import trainable_candle as tc
from trainable_candle._core import pipeline_parts
from trainable_candle.data.buckets import Frame
from trainable_candle.errors import ConfigError
from trainable_candle.families.pipeline import PipelineFamily
from trainable_candle.families.pipeline.identity import parts_identity, tokenizers_identity
from trainable_candle.families.sdxl.schedule import schedule
from trainable_candle.families.sdxl.text import TextEncoders, unread_layers
from trainable_candle.settings import IMAGE_GROUPS
from trainable_candle.settings.adapter import TrainingAdapters
from trainable_candle.settings.objective import DistilledGuidance, Flow
from trainable_candle.tasks.latent.drawing import DrawingDefaults
from trainable_candle.tasks.latent.objectives import NoiseObjective
from trainable_candle.text.clip_tokenizer import SHIPPED
from trainable_candle.train.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainable_candle import Tensor
    from trainable_candle.models import Model, SDXLUNet
    from trainable_candle.settings import Group
    from trainable_candle.train.objective import NoiseSchedule
    from trainable_candle.train.trainer import Inputs

_TEXT_ENCODERS: Final = ("text_encoder", "text_encoder_2")
"""The folders of CLIP-L and OpenCLIP-bigG in a pipeline."""
_HELD_MAPS: Final = 12
"""The most values that the UNet holds at once without a tape, mostly skip connections and gates of
feed-forward layers. The unit is a feature map of the first level: the height and width of the
latents, times the channels of that level."""


class SDXL(PipelineFamily[TextEncoders]):
    """Stable Diffusion XL: a UNet that reads features of two text encoders, sizes and crops."""

    name: ClassVar[str] = "sdxl"
    summary: ClassVar[str] = "Stable Diffusion XL (a tiny one that draws flowers is built in)"
    groups: ClassVar[tuple[type[Group], ...]] = tuple(
        group for group in IMAGE_GROUPS if group not in {Flow, DistilledGuidance, TrainingAdapters}
    )
    parts: ClassVar[tuple[str, ...]] = tuple(pipeline_parts("sdxl"))
    component: ClassVar[str] = "unet"
    formats: ClassVar[tuple[str, ...]] = ("kohya", "diffusers", "peft", "comfyui")
    # The layers that kohya's scripts adapt: all layers of the transformer blocks, and the
    # projections before and after these blocks.
    targets: ClassVar[tuple[str, ...]] = (
        r".*attentions\.\d+\.proj_(in|out)",
        r".*\.transformer_blocks\..*",
    )
    text_targets: ClassVar[tuple[str, ...]] = (
        "q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2",
    )  # fmt: skip
    drawing: ClassVar[DrawingDefaults] = DrawingDefaults(steps=25, guidance=5.0)
    text_tokens: ClassVar[int] = 77
    model: SDXLUNet

    @classmethod
    def default_weights(cls) -> Path | None:
        """Return the folder of the small checkpoint in the package; None if it is missing."""
        folder = Path(str(files("trainable_candle") / "assets" / "sdxl_tiny"))
        return folder if folder.is_dir() else None

    def check(self) -> None:
        """Check that the text encoders have enough layers for `--clip-skip`.

        Raises:
            ConfigError: `--clip-skip` is too large for the text encoders.
        """
        counts = [self.facts.parts[name].config["num_hidden_layers"] for name in _TEXT_ENCODERS]
        # With `clip_skip` n, the features come from the layer before the last n + 1 layers, so an
        # encoder needs at least n + 2 layers.
        most = min(counts) - 2
        if self.config.clip_skip is not None and self.config.clip_skip > most:
            raise ConfigError(
                f"--clip-skip is {self.config.clip_skip}, expected at most {most}: "
                f"the text encoders have {' and '.join(map(str, counts))} layers"
            )

    @property
    def text_values(self) -> int:
        """The number of values in a caption's features, those of its tokens and the pooled ones."""
        config = self.facts.config
        # The UNet reads the pooled features and an embedding of each of `time_ids` as one vector.
        # The frame does not matter here: all have equally many `time_ids`.
        vector = config["projection_class_embeddings_input_dim"]
        count = len(time_ids(Frame.whole(1, 1)))
        pooled = vector - count * config["addition_time_embed_dim"]
        return int(self.text_tokens * config["cross_attention_dim"] + pooled)

    @property
    def text_working_values(self) -> int:
        """The number of values in both text encoders' hidden states of one row of tokens."""
        encoders = [self.facts.parts[part].config for part in _TEXT_ENCODERS]
        width = sum(encoder["num_hidden_layers"] * encoder["hidden_size"] for encoder in encoders)
        return int(self.text_tokens * width)

    def predicting_values(self, latents: int) -> int:
        """Return the number of values that the UNet holds at once; see `_HELD_MAPS`.

        Args:
            latents: the number of pixels of the latents.
        """
        return int(_HELD_MAPS * self.facts.config["block_out_channels"][0] * latents)

    def load_encoders(self) -> TextEncoders:
        """Load CLIP-L and OpenCLIP-bigG with their tokenizers."""
        return TextEncoders.load(self, self.config.clip_skip or 0)

    @property
    def text_models(self) -> Mapping[str, Model]:
        """The text encoders, by the names of their folders."""
        return dict(zip(_TEXT_ENCODERS, self.encoders.models, strict=True))

    @property
    def schedule(self) -> NoiseSchedule:
        """The noise schedule of the model, with the `--prediction-type` that is given, if any."""
        return schedule(self.weights, self.config.prediction_type)

    def objective(self, device: str) -> NoiseObjective:
        """Return the objective: to predict noise or velocity, as `schedule` says."""
        return NoiseObjective(self.schedule, self.config, device)

    def stepper(self, steps: int, sampler: str | None, size: tuple[int, int]) -> Sampler:  # noqa: ARG002
        """Return the sampler; by default Euler's method.

        Raises:
            ArgumentError: the sampler is unknown, or `steps` is out of range.
        """
        return Sampler(self.schedule, steps, sampler or "euler")

    def predict(self, sample: Tensor, times: Tensor, conditions: Inputs) -> Tensor:
        """Return the noise or velocity that the UNet predicts, in the shape of `sample`."""
        return self.model(
            sample,
            times,
            conditions["encoder_hidden_states"],
            text_embeds=conditions["text_embeds"],
            time_ids=conditions["time_ids"],
        )

    def conditions(
        self,
        frames: Sequence[Frame],
        guidance: float | None = None,  # noqa: ARG002
    ) -> dict[str, Tensor]:
        """Return `time_ids` of B frames, (B, 6); see arXiv:2307.01952, section 2.2."""
        return {"time_ids": tc.tensor(np.array([time_ids(frame) for frame in frames], np.float32))}

    def text_identity(self) -> dict[str, str]:
        """Return what the encoded captions depend on: files, clip skip, dtype and quantization."""
        settings = {"clip_skip": str(self.config.clip_skip or 0), "dtype": self.text_precision}
        # A checkpoint without tokenizers uses those of the package, `SHIPPED`.
        tokenizers = dict.fromkeys(("tokenizer", "tokenizer_2"), SHIPPED)
        return {
            **parts_identity(self.facts, _TEXT_ENCODERS),
            **tokenizers_identity(self.weights, tokenizers),
            **settings,
        }

    def tokens(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Return the token ids of captions for each encoder; see `TextEncoders.tokens`."""
        return self.encoders.tokens(captions)

    def encode_tokens(self, tokens: Inputs, batch: int) -> dict[str, Tensor]:
        """Return the features of `batch` captions from the result of `tokens`."""
        return self.encoders.encode(tokens, batch)

    def unread_layers(self, part: str) -> list[str]:
        """Return patterns of the names of a text encoder's layers that do not affect its features.

        In CLIP-L these are the last layers. OpenCLIP-bigG has none, because its pooled features
        come from the last layer.
        """
        clip_l, _ = _TEXT_ENCODERS
        if part != clip_l:
            return []
        count = self.facts.parts[part].config["num_hidden_layers"]
        return unread_layers(count, self.config.clip_skip or 0)


def time_ids(frame: Frame) -> tuple[int, ...]:
    """Return the original height and width, and the crop's top, left, height and width, px."""
    width, height = frame.original
    return height, width, frame.top, frame.left, frame.bucket.height, frame.bucket.width
