"""FLUX.2-klein: its text encoder and what differs from other flow models."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Final

import trainable_candle as tc
from trainable_candle._core import pipeline_parts
from trainable_candle.data import file_identity
from trainable_candle.errors import ConfigError
from trainable_candle.families.flow import Features, FlowFamily
from trainable_candle.families.flow.coder import NormedKLCoder
from trainable_candle.families.flow.patches import as_tokens, from_tokens, positions
from trainable_candle.families.flow.schedule import FlowSchedule, KleinSchedule
from trainable_candle.families.pipeline.facts import index_of
from trainable_candle.families.pipeline.identity import parts_identity
from trainable_candle.families.pipeline.qwen import MOST_TOKENS, Qwen3, tokenizer_folder
from trainable_candle.tasks.latent.drawing import DrawingDefaults

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainable_candle import Tensor
    from trainable_candle.models import Flux2Transformer
    from trainable_candle.tasks.latent.coders import KLCoder
    from trainable_candle.train.trainer import Inputs

LAYERS: Final = (9, 18, 27)
"""The decoder layers of Qwen3 whose outputs are used, counted from 1."""


class Flux2Texts:
    """Qwen3 with its tokenizer; a token's features are the outputs of `LAYERS`, concatenated.

    Captions are padded to 512 tokens. The features include those of the padding, as in
    `encode_prompt` of diffusers' pipeline:
    https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/pipelines/flux2/pipeline_flux2_klein.py

    Args:
        family: the family with the weights.

    Raises:
        MissingFileError, WeightsFormatError, ConfigError: a part is missing, damaged, or of another
            model.
    """

    def __init__(self, family: Flux2) -> None:
        self._qwen3 = Qwen3(family, LAYERS, thinks=False)

    def size_of(self, caption: str) -> int:  # noqa: ARG002 - longer captions are truncated
        """Return 1: every caption takes one row of 512 tokens."""
        return 1

    def truncates(self, caption: str) -> bool:
        """Return whether a caption in Qwen3's chat template has more than `MOST_TOKENS` tokens."""
        # `encode` returns at most as many tokens as its second argument says.
        return len(self._qwen3.tokenizer.encode(caption, MOST_TOKENS + 1)) > MOST_TOKENS

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Encode B captions: `encoder_hidden_states` (B, 512, 3 times Qwen3's width)."""
        rows = []
        for caption in captions:
            tokens = self._qwen3.tokenizer.encode(caption, MOST_TOKENS)
            rows.append(tc.cat(self._qwen3.padded_states(tokens, MOST_TOKENS), 1).unsqueeze(0))
        return {"encoder_hidden_states": tc.cat(rows, 0)}


class Flux2(FlowFamily[Flux2Texts]):
    """FLUX.2-klein 4B and 9B, base and distilled."""

    name: ClassVar[str] = "flux2"
    summary: ClassVar[str] = "FLUX.2-klein 4B or 9B, base or distilled"
    download: ClassVar[str] = (
        "black-forest-labs/FLUX.2-klein-base-4B (about 16 GB, Apache-2.0) or FLUX.2-klein-base-9B "
        "(about 35 GB, FLUX Non-Commercial License, after a login) on the Hugging Face hub; use "
        "the adapter on FLUX.2-klein-4B or -9B"
    )
    parts: ClassVar[tuple[str, ...]] = tuple(pipeline_parts("flux2"))
    # The layers that diffusers' training script adapts: in double-stream blocks, the attention
    # layers of the image; in single-stream blocks, the attention layers, which are fused with those
    # of the feed-forward network.
    targets: ClassVar[tuple[str, ...]] = (
        r"transformer_blocks\.\d+\.attn\.to_(q|k|v|out\.0)",
        r"single_transformer_blocks\.\d+\.attn\.to_(qkv_mlp_proj|out)",
    )
    schedule: ClassVar[FlowSchedule] = KleinSchedule(grows=True)
    coder_kind: ClassVar[type[KLCoder]] = NormedKLCoder
    drawing: ClassVar[DrawingDefaults] = DrawingDefaults(steps=50, guidance=4.0)
    text_tokens: ClassVar[int] = MOST_TOKENS
    goes_with: ClassVar[str] = "FLUX.2-klein 4B goes with Qwen3 4B, and 9B with Qwen3 8B"
    model: Flux2Transformer

    @cached_property
    def is_distilled(self) -> bool:
        """Whether the model was distilled to 4 steps.

        The field `is_distilled` of the pipeline's `model_index.json` decides. Without it, a model
        is distilled if the name of its weights has "klein" and not "base".

        Raises:
            ConfigError: `model_index.json` is damaged.
        """
        stated = index_of(self.weights).get("is_distilled")
        if isinstance(stated, bool):
            return stated
        name = self.shown_name.lower()
        return "klein" in name and "base" not in name

    @property
    def distilled_guidance(self) -> bool:
        """Whether the model draws without classifier-free guidance, as the distilled models do."""
        return self.is_distilled

    def require_own(self) -> None:
        """Check that the weights are FLUX.2-klein, not FLUX.2-dev, and that the parts fit together.

        Raises:
            MissingFileError, WeightsFormatError: a part is missing or damaged.
            ConfigError: the parts do not fit together, or the model is FLUX.2-dev.
        """
        if self.facts.config["guidance_embeds"]:
            raise ConfigError(
                f"weights: {self.weights} is FLUX.2-dev, which takes a guidance scale and is "
                "not supported; expected FLUX.2-klein"
            )
        super().require_own()

    @property
    def text_features(self) -> Mapping[str, Features]:
        """The width of the text features from Qwen3, and the width that the transformer reads."""
        width = len(LAYERS) * self.facts.parts["text_encoder"].config["hidden_size"]
        read = self.facts.config["joint_attention_dim"]
        return {"text_encoder": Features(produced=width, read=read)}

    def check(self) -> None:
        """Check the parts, and that no setting asks a distilled model for guidance.

        Raises:
            MissingFileError, WeightsFormatError: a part is missing or damaged.
            ConfigError: the model is distilled, and the settings have a guidance scale other than 1
                or a negative prompt; or the parts do not fit together.
        """
        super().check()
        if not self.is_distilled:
            return
        for option, given in (
            ("--guidance", self.config.guidance not in {None, 1.0}),
            ("--negative-prompt", bool(self.config.negative_prompt)),
        ):
            if given:
                raise ConfigError(
                    f"{option} has no effect on the distilled FLUX.2-klein, which draws without "
                    "guidance; leave it out"
                )

    @property
    def distillation(self) -> str | None:
        """A note that training undoes the distillation; None for base models."""
        if not self.is_distilled:
            return None
        undone = "training the distilled FLUX.2-klein directly undoes its distillation to 4 steps"
        return f"{undone}; train the base, and use the adapter on the distilled model"

    def load_encoders(self) -> Flux2Texts:
        """Load Qwen3, up to the last layer in `LAYERS`, and its tokenizer."""
        return Flux2Texts(self)

    @property
    def text_values(self) -> int:
        """The number of values in a caption's features: tokens times features of a token."""
        return int(self.text_tokens * self.facts.config["joint_attention_dim"])

    @property
    def text_working_values(self) -> int:
        """The number of values in Qwen3's widest layer and outputs plus `text_values`.

        All numbers are for one caption.
        """
        qwen3 = self.facts.parts["text_encoder"].config
        # The outputs of all layers up to the last of `LAYERS` stay in memory. The widest layer has
        # four more tensors of `hidden_size` features, and two of the feed-forward network's width.
        hidden = (max(LAYERS) + 4) * qwen3["hidden_size"]
        return int(self.text_tokens * (2 * qwen3["intermediate_size"] + hidden)) + self.text_values

    def predict(self, sample: Tensor, times: Tensor, conditions: Inputs) -> Tensor:
        """Return the velocity that the transformer predicts, in the shape of `sample`.

        `times` go from 0 to 1000; the transformer takes them from 0 to 1.
        """
        height, width = sample.shape[2:]
        text = conditions["encoder_hidden_states"]
        image_at, text_at = positions(height, width, text.shape[1], self.device, has_text_axis=True)
        predicted = self.model(as_tokens(sample), text, times / 1000.0, image_at, text_at)
        return from_tokens(predicted, (height, width))

    def text_identity(self) -> dict[str, str]:
        """Return what encoded captions depend on: encoder, tokenizer, dtype, token count."""
        return {
            **parts_identity(self.facts, self.facts.text_encoders),
            "tokenizer": file_identity(tokenizer_folder(self)),
            "dtype": self.text_precision,
            "tokens": str(MOST_TOKENS),
        }
