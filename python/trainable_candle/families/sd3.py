"""Stable Diffusion 3 and 3.5: their text encoders, and what differs from other flow models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import trainable_candle as tc
from trainable_candle._core import pipeline_parts
from trainable_candle.errors import ConfigError
from trainable_candle.families.flow import Features, FlowFamily
from trainable_candle.families.flow.schedule import FlowSchedule, shifted_last
from trainable_candle.families.pipeline.clip import clip_tokenizer, pooled_width
from trainable_candle.families.pipeline.identity import parts_identity, tokenizers_identity
from trainable_candle.families.pipeline.t5 import T5
from trainable_candle.models import CLIPTextModel
from trainable_candle.tasks.latent.drawing import DrawingDefaults
from trainable_candle.text import PAD_OF_BIG_G, PAD_OF_CLIP_L
from trainable_candle.text.clip_tokenizer import SHIPPED as CLIP_TOKENIZER
from trainable_candle.text.t5_tokenizer import SHIPPED as T5_TOKENIZER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainable_candle import Tensor
    from trainable_candle.data import Dataset
    from trainable_candle.models import SD3Transformer
    from trainable_candle.settings import TrainConfig
    from trainable_candle.train.trainer import Inputs

_CLIP_TOKENS: Final = 77
"""The number of tokens that each CLIP encoder reads, with padding."""
_T5_TOKENS: Final = 256
"""The number of tokens that T5 reads, with padding, as in diffusers and in kohya's scripts."""


class SD3Texts:
    """CLIP-L, OpenCLIP-bigG and T5 with their tokenizers.

    Args:
        family: the family with the weights.

    Raises:
        MissingFileError, WeightsFormatError, ConfigError: a part is missing, damaged, or of another
            model.
    """

    def __init__(self, family: SD3) -> None:
        self._clips = []
        for suffix, pad in (("", PAD_OF_CLIP_L), ("_2", PAD_OF_BIG_G)):
            model = CLIPTextModel.from_pretrained(
                **family.source(f"text_encoder{suffix}"), dtype=family.dtype, device=family.device
            )
            tokenizer = clip_tokenizer(family.weights, f"tokenizer{suffix}", pad, model)
            self._clips.append((model, tokenizer))
        self._t5 = T5.load(family, "text_encoder_3", _T5_TOKENS)
        self._device = family.device

    def size_of(self, caption: str) -> int:  # noqa: ARG002 - longer captions are truncated
        """Return 1: every caption takes one row of tokens in each encoder."""
        return 1

    def truncates(self, caption: str) -> bool:
        """Return whether a caption has more tokens than T5 reads, so that its end is lost.

        Both CLIP encoders read fewer tokens, but T5 also reads what they leave out.
        """
        return self._t5.truncates(caption)

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Encode captions: `encoder_hidden_states` (B, 333, 4096), `pooled_projections` (B, 2048).

        The hidden states of both CLIP encoders, for 77 tokens, are concatenated along the features
        and padded with zeros to T5's width. T5's outputs for 256 tokens follow:
        https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/pipelines/stable_diffusion_3/pipeline_stable_diffusion_3.py#L379
        """
        states, pooled = [], []
        for model, tokenizer in self._clips:
            # At most one row of tokens for each caption.
            rows = [tokenizer.chunks(caption, most=1)[0] for caption in captions]
            output = model(tc.tensor(rows, device=self._device))
            states.append(output.hidden_states[-2])  # the output of the last layer but one
            pooled.append(output.pooled)
        of_t5 = self._t5(captions)
        of_clip = tc.cat(states, 2)
        batch, length, width = of_clip.shape
        missing = (batch, length, of_t5.shape[2] - width)
        zeros = tc.zeros(missing, dtype=of_clip.dtype, device=self._device)
        return {
            "encoder_hidden_states": tc.cat([tc.cat([of_clip, zeros], 2), of_t5], 1),
            "pooled_projections": tc.cat(pooled, 1),
        }


class SD3(FlowFamily[SD3Texts]):
    """Stable Diffusion 3.5 medium and large, and Stable Diffusion 3."""

    name: ClassVar[str] = "sd3"
    summary: ClassVar[str] = "Stable Diffusion 3.5 medium or large"
    download: ClassVar[str] = (
        "stabilityai/stable-diffusion-3.5-medium (about 16 GB) or -large (28 GB) on the Hugging "
        "Face hub, under the Stability AI Community License, after a login there"
    )
    parts: ClassVar[tuple[str, ...]] = tuple(pipeline_parts("sd3"))
    # The layers that SimpleTuner adapts: those of the image tokens' attention. Some blocks of
    # medium, the "dual" ones, have a second such attention, whose layers are adapted too.
    targets: ClassVar[tuple[str, ...]] = ("to_q", "to_k", "to_v", "to_out.0")
    drawing: ClassVar[DrawingDefaults] = DrawingDefaults(steps=28, guidance=4.5)
    # diffusers' pipeline shifts its lowest noise level twice; see `shifted_last`.
    schedule: ClassVar[FlowSchedule] = FlowSchedule(shift=3.0, last=shifted_last(3.0))
    text_tokens: ClassVar[int] = _CLIP_TOKENS + _T5_TOKENS
    scaling: ClassVar[float | None] = 1.5305  # the `scaling_factor` of the autoencoder
    goes_with: ClassVar[str] = "SD3.5 goes with CLIP-L, OpenCLIP-bigG and T5-XXL"
    # `in_channels` of the transformer counts the channels of a latent pixel, not of an image token.
    packs: ClassVar[bool] = False
    model: SD3Transformer

    @classmethod
    def defaults(cls, config: TrainConfig) -> Mapping[str, Any]:
        """Return the defaults of image models and, as in SimpleTuner, a low `max_grad_norm`.

        Training Stable Diffusion 3.5 large is unstable without this limit on the gradient's norm.
        """
        return {**super().defaults(config), "max_grad_norm": 0.1}

    @property
    def text_features(self) -> Mapping[str, Features]:
        """See `FlowFamily.text_features`; the pooled features are those of both CLIP encoders."""
        config, parts = self.facts.config, self.facts.parts
        clips = ("text_encoder", "text_encoder_2")
        clips_width = sum(pooled_width(parts[part].config) for part in clips)
        t5_width = parts["text_encoder_3"].config["d_model"]
        return {
            "text_encoder with text_encoder_2": Features(
                produced=clips_width, read=config["pooled_projection_dim"]
            ),
            "text_encoder_3": Features(produced=t5_width, read=config["joint_attention_dim"]),
        }

    @property
    def distillation(self) -> str | None:
        """A note that training undoes turbo's distillation; None if the model is not turbo.

        Only the name of the weights distinguishes SD3.5-large-turbo.
        """
        if "turbo" not in self.shown_name.lower():
            return None
        undone = "training SD3.5-large-turbo directly undoes its distillation to 4 steps"
        return f"{undone}; train SD3.5-large, and use the adapter on turbo"

    def dataset(self, folder: str) -> Dataset:
        """See `FlowFamily.dataset`; the position embedding must also cover all sides of images.

        Raises:
            DatasetError, ConfigError: images or captions cannot be used, `--bucket-step` is not a
                multiple of an image token's side, or the side of an image is too long.
        """
        images = super().dataset(folder)
        # Positions along a side, one for each image token, times the side of a token in pixels.
        most = self.facts.config["pos_embed_max_size"] * self.multiple
        largest = max(max(item.fit.bucket.width, item.fit.bucket.height) for item in images.items)
        if largest > most:
            raise ConfigError(
                f"dataset: a side of an image would be {largest} px, expected at most {most} px, "
                f"the last position that this model knows; give --max-side {most} or a smaller "
                "--resolution"
            )
        return images

    def load_encoders(self) -> SD3Texts:
        """Load CLIP-L, OpenCLIP-bigG and T5 with their tokenizers."""
        return SD3Texts(self)

    @property
    def text_values(self) -> int:
        """The number of values in a caption's features: those of its tokens and pooled ones."""
        config = self.facts.config
        return int(
            self.text_tokens * config["joint_attention_dim"] + config["pooled_projection_dim"]
        )

    @property
    def text_working_values(self) -> int:
        """The number of values in T5's widest layer plus `text_values`, for one caption."""
        return T5.working_values(self, "text_encoder_3", _T5_TOKENS) + self.text_values

    def predict(self, sample: Tensor, times: Tensor, conditions: Inputs) -> Tensor:
        """Return the velocity that the transformer predicts, in the shape of `sample`."""
        text, pooled = conditions["encoder_hidden_states"], conditions["pooled_projections"]
        predicted: Tensor = self.model(sample, text, pooled, times)
        return predicted

    def text_identity(self) -> dict[str, str]:
        """Return what encoded captions depend on: encoders, tokenizers, dtype, token count."""
        # The package's copies, which are used if the weights have no tokenizers.
        shipped = {
            "tokenizer": CLIP_TOKENIZER,
            "tokenizer_2": CLIP_TOKENIZER,
            "tokenizer_3": T5_TOKENIZER,
        }
        return {
            **parts_identity(self.facts, self.facts.text_encoders),
            **tokenizers_identity(self.weights, shipped),
            "dtype": self.text_precision,
            "tokens": str(self.text_tokens),
        }
