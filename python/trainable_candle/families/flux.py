"""Flux.1 (dev and schnell): its text encoders, and what differs from other flow models."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

import trainable_candle as tc
from trainable_candle._core import pipeline_parts
from trainable_candle.errors import ConfigError
from trainable_candle.families.flow import Features, FlowFamily
from trainable_candle.families.flow.patches import over_tokens
from trainable_candle.families.flow.schedule import FlowSchedule
from trainable_candle.families.pipeline.clip import clip_tokenizer
from trainable_candle.families.pipeline.identity import parts_identity, tokenizers_identity
from trainable_candle.families.pipeline.t5 import T5
from trainable_candle.models import CLIPTextModel
from trainable_candle.settings.objective import DistilledGuidance
from trainable_candle.tasks.latent.drawing import DrawingDefaults
from trainable_candle.text import PAD_OF_CLIP_L
from trainable_candle.text.clip_tokenizer import SHIPPED as CLIP_TOKENIZER
from trainable_candle.text.t5_tokenizer import SHIPPED as T5_TOKENIZER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainable_candle import Tensor
    from trainable_candle.data.buckets import Frame
    from trainable_candle.models import FluxTransformer
    from trainable_candle.settings import Group
    from trainable_candle.train.trainer import Inputs

_TOKENS: Final = {True: 512, False: 256}
"""Whether the model takes a guidance scale (dev does, schnell does not) -> the most tokens of a
caption that T5 reads."""


class FluxTexts:
    """CLIP-L and T5 with their tokenizers.

    Args:
        family: the family with the weights.

    Raises:
        MissingFileError, WeightsFormatError, ConfigError: a part is missing, damaged, or of another
            model.
    """

    def __init__(self, family: Flux) -> None:
        self._clip = CLIPTextModel.from_pretrained(
            **family.source("text_encoder"), dtype=family.dtype, device=family.device
        )
        self._tokenizer = clip_tokenizer(family.weights, "tokenizer", PAD_OF_CLIP_L, self._clip)
        self._t5 = T5.load(family, "text_encoder_2", family.text_tokens)
        self._device = family.device

    def size_of(self, caption: str) -> int:  # noqa: ARG002 - longer captions are truncated
        """Return 1: every caption takes one row of tokens in each encoder."""
        return 1

    def truncates(self, caption: str) -> bool:
        """Return whether a caption has more tokens than T5 reads.

        CLIP reads fewer tokens. A caption that only CLIP truncates does not count: T5 reads it all.
        """
        return self._t5.truncates(caption)

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Encode B captions: `encoder_hidden_states` (B, L, 4096), `pooled_projections` (B, 768).

        L is the family's `text_tokens`; shorter captions are padded.
        """
        rows = [self._tokenizer.chunks(caption, most=1)[0] for caption in captions]
        states = self._clip(tc.tensor(rows, device=self._device)).last_hidden_state
        # Pool here: the result `pooled` of a CLIP-L that was made for another model may be
        # projected, and Flux's is not. The pooled features are those of the first end token.
        ends = [int((row == self._tokenizer.end).argmax()) for row in rows]
        pooled = [states[i : i + 1, end] for i, end in enumerate(ends)]
        return {
            "encoder_hidden_states": self._t5(captions),
            "pooled_projections": tc.cat(pooled, 0),
        }


class Flux(FlowFamily[FluxTexts]):
    """Flux.1, dev and schnell."""

    name: ClassVar[str] = "flux"
    summary: ClassVar[str] = "Flux.1 dev or schnell"
    download: ClassVar[str] = (
        "black-forest-labs/FLUX.1-dev (about 34 GB; FLUX.1 [dev] Non-Commercial License) or "
        "FLUX.1-schnell (Apache-2.0) on the Hugging Face hub, after a login there"
    )
    parts: ClassVar[tuple[str, ...]] = tuple(pipeline_parts("flux"))
    # The layers that diffusers' training script adapts: in double-stream blocks, the attention and
    # feed-forward layers; in single-stream blocks, the attention layers.
    targets: ClassVar[tuple[str, ...]] = (
        "to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
        "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
    )  # fmt: skip
    groups: ClassVar[tuple[type[Group], ...]] = (*FlowFamily.groups, DistilledGuidance)
    drawing: ClassVar[DrawingDefaults] = DrawingDefaults(steps=28, guidance=3.5)
    # The scaling factor that the autoencoder must have.
    scaling: ClassVar[float | None] = 0.3611
    goes_with: ClassVar[str] = "Flux.1 goes with CLIP-L and T5-XXL"
    # The shift of the noise levels grows with the size of the image.
    schedule: ClassVar[FlowSchedule] = FlowSchedule(grows=True)
    model: FluxTransformer

    @property
    def takes_guidance(self) -> bool:
        """Whether the model takes a guidance scale as an input: True for dev, False for schnell."""
        return bool(self.facts.config["guidance_embeds"])

    @cached_property
    def found_schedule(self) -> FlowSchedule:
        """The noise levels of sampling: those of the pipeline's scheduler, or else defaults.

        By default, schnell's noise levels are not shifted.
        """
        default = self.schedule if self.takes_guidance else FlowSchedule(shift=1.0)
        return FlowSchedule.of(self.weights, default)

    @property
    def distilled_guidance(self) -> bool:
        """True, because dev and schnell draw without classifier-free guidance."""
        return True

    @property
    def text_tokens(self) -> int:  # type: ignore[override]
        """The most tokens of a caption that T5 reads: 512 for dev, 256 for schnell."""
        return _TOKENS[self.takes_guidance]

    @property
    def text_features(self) -> Mapping[str, Features]:
        """How many features each text encoder produces, and how many the transformer reads."""
        config, parts = self.facts.config, self.facts.parts
        clip_width = parts["text_encoder"].config["hidden_size"]
        t5_width = parts["text_encoder_2"].config["d_model"]
        return {
            "text_encoder": Features(produced=clip_width, read=config["pooled_projection_dim"]),
            "text_encoder_2": Features(produced=t5_width, read=config["joint_attention_dim"]),
        }

    def check(self) -> None:
        """Check the parts, and that no setting asks for guidance that the model does not have.

        Raises:
            MissingFileError, WeightsFormatError: a part is missing or damaged.
            ConfigError: a setting has no effect on the model, or the parts do not fit together.
        """
        super().check()
        if self.config.negative_prompt:
            raise ConfigError(
                "--negative-prompt has no effect on Flux, which makes no second prediction for the "
                "negative prompt; leave it out"
            )
        if self.config.guidance is not None and not self.takes_guidance:
            raise ConfigError(
                "--guidance has no effect on Flux schnell, which takes no guidance scale; leave it "
                "out"
            )
        if self.config.train_guidance != 1 and not self.takes_guidance:
            raise ConfigError(
                "--train-guidance has no effect on Flux schnell, which takes no guidance scale; "
                "leave it out"
            )

    @property
    def distillation(self) -> str | None:
        """A note that training undoes schnell's distillation; None for dev."""
        if self.takes_guidance:
            return None
        undone = "training Flux schnell directly undoes its distillation to a few steps"
        return f"{undone}; prefer dev"

    def load_encoders(self) -> FluxTexts:
        """Load CLIP-L and T5 with their tokenizers."""
        return FluxTexts(self)

    @property
    def text_values(self) -> int:
        """The number of values in a caption's features: T5's tokens and CLIP's pooled features."""
        config = self.facts.config
        return int(
            self.text_tokens * config["joint_attention_dim"] + config["pooled_projection_dim"]
        )

    @property
    def text_working_values(self) -> int:
        """The number of values in T5's widest layer plus `text_values`, for one caption."""
        return T5.working_values(self, "text_encoder_2", self.text_tokens) + self.text_values

    def conditions(
        self, frames: Sequence[Frame], guidance: float | None = None
    ) -> dict[str, Tensor]:
        """Return `guidance` (B,), the guidance scale for each of B images; for schnell, no tensor.

        Args:
            frames: one for each image.
            guidance: the guidance scale; None: the value of `--train-guidance`.
        """
        if not self.takes_guidance:
            return {}
        guidance = self.config.train_guidance if guidance is None else guidance
        return {"guidance": tc.tensor(np.full(len(frames), guidance, np.float32))}

    def predict(self, sample: Tensor, times: Tensor, conditions: Inputs) -> Tensor:
        """Return the velocity that the transformer predicts, in the shape of `sample`.

        `times` are from 0 to 1000.
        """
        text, pooled = conditions["encoder_hidden_states"], conditions["pooled_projections"]
        guidance = conditions.get("guidance")
        # `over_tokens` turns the latents into tokens, and the function's result back into latents.
        # `image_at` and `text_at` are the positions of the image tokens and of the text tokens.
        return over_tokens(
            sample,
            text.shape[1],
            lambda tokens, image_at, text_at: self.model(
                tokens, text, pooled, times / 1000.0, image_at, text_at, guidance
            ),
        )

    def text_identity(self) -> dict[str, str]:
        """Return what encoded captions depend on: encoders, tokenizers, dtype, token count."""
        shipped = {"tokenizer": CLIP_TOKENIZER, "tokenizer_2": T5_TOKENIZER}
        return {
            **parts_identity(self.facts, self.facts.text_encoders),
            **tokenizers_identity(self.weights, shipped),
            "dtype": self.text_precision,
            "tokens": str(self.text_tokens),
            # Caches of earlier versions hold projected features if CLIP-L has a projection.
            "pooled": "not projected",
        }
