"""Chroma: its text encoder and what differs from other flow models."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from trainable_candle._core import pipeline_parts
from trainable_candle.families.flow import Features, FlowFamily
from trainable_candle.families.flow.patches import over_tokens
from trainable_candle.families.flow.rows import in_rows
from trainable_candle.families.flow.schedule import FlowSchedule
from trainable_candle.families.flux import Flux
from trainable_candle.families.pipeline.identity import parts_identity, tokenizers_identity
from trainable_candle.families.pipeline.t5 import T5
from trainable_candle.tasks.latent.drawing import DrawingDefaults
from trainable_candle.text.t5_tokenizer import SHIPPED as T5_TOKENIZER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainable_candle import Tensor
    from trainable_candle.models import ChromaTransformer
    from trainable_candle.train.trainer import Inputs

_TOKENS: Final = 512
"""The most tokens of a caption, including the end token, as in diffusers' pipeline."""


class ChromaTexts:
    """T5 with its tokenizer; a caption is encoded with at most one token of padding.

    Follows `_get_t5_prompt_embeds` of diffusers' pipeline:
    https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/pipelines/chroma/pipeline_chroma.py

    Args:
        family: the family with the weights.

    Raises:
        MissingFileError, WeightsFormatError, ConfigError: a part is missing, damaged, or of another
            model.
    """

    def __init__(self, family: Chroma) -> None:
        self._t5 = T5.load(family, "text_encoder", _TOKENS)

    def size_of(self, caption: str) -> int:
        """Return the number of tokens that T5 encodes for a caption; see `T5.read_tokens`.

        Captions with the same number can be encoded in one batch.
        """
        return self._t5.read_tokens(caption)

    def truncates(self, caption: str) -> bool:
        """Return whether a caption has more tokens than T5 reads."""
        return self._t5.truncates(caption)

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Encode B captions: `encoder_hidden_states` (B, L, 4096) and `lengths` (B,), in tokens.

        L is the longest length. Zeros follow the features of shorter captions.
        """
        return in_rows([self._t5.encode_one(caption) for caption in captions])


class Chroma(FlowFamily[ChromaTexts]):
    """Chroma, base and HD."""

    name: ClassVar[str] = "chroma"
    summary: ClassVar[str] = "Chroma1 base or HD"
    download: ClassVar[str] = (
        "lodestones/Chroma1-HD or lodestones/Chroma1-Base on the Hugging Face hub (about 28 GB "
        "each, Apache-2.0)"
    )
    parts: ClassVar[tuple[str, ...]] = tuple(pipeline_parts("chroma"))
    # Chroma's blocks have Flux's layers. As in other trainers, the approximator, which computes the
    # blocks' modulation, gets no adapters.
    targets: ClassVar[tuple[str, ...]] = Flux.targets
    # How images are drawn by default: with Chroma1 Base and HD, and with distilled Chroma1-Flash.
    drawing: ClassVar[DrawingDefaults] = DrawingDefaults(steps=35, guidance=5.0)
    distilled: ClassVar[DrawingDefaults] = DrawingDefaults(steps=16, guidance=1.0)
    # Prompt and negative prompt may differ in length. In one batch they would need a mask, which is
    # slow, so drawing calls the model for each of them.
    reads_texts_apart: ClassVar[bool] = True
    # The shift of the noise levels grows with the size of the image.
    schedule: ClassVar[FlowSchedule] = FlowSchedule(grows=True)
    text_tokens: ClassVar[int] = _TOKENS
    # The `scaling_factor` that the autoencoder must have.
    scaling: ClassVar[float | None] = 0.3611
    # The end of the error message for a text encoder whose features do not fit the transformer.
    goes_with: ClassVar[str] = "Chroma goes with T5-XXL"
    model: ChromaTransformer

    @property
    def text_features(self) -> Mapping[str, Features]:
        """See `FlowFamily.text_features`."""
        produced = self.facts.parts["text_encoder"].config["d_model"]
        read = self.facts.config["joint_attention_dim"]
        return {"text_encoder": Features(produced=produced, read=read)}

    @property
    def distillation(self) -> str | None:
        """A note that training undoes Chroma1-Flash's distillation; None for other models.

        Only "flash" in the name of the weights distinguishes Chroma1-Flash.
        """
        if "flash" not in self.shown_name.lower():
            return None
        undone = "training Chroma1-Flash directly undoes its distillation to a few steps"
        return f"{undone}; train Chroma1-Base or Chroma1-HD instead"

    def load_encoders(self) -> ChromaTexts:
        """Load T5 and its tokenizer."""
        return ChromaTexts(self)

    @property
    def text_values(self) -> int:
        """The number of values in a caption's features: tokens times features of a token."""
        return int(self.text_tokens * self.facts.config["joint_attention_dim"])

    @property
    def text_working_values(self) -> int:
        """The number of values in T5's widest layer plus `text_values`, for one caption."""
        return T5.working_values(self, "text_encoder", _TOKENS) + self.text_values

    def predict(self, sample: Tensor, times: Tensor, conditions: Inputs) -> Tensor:
        """Return the velocity that the transformer predicts, in the shape of `sample`."""
        text = conditions["encoder_hidden_states"]
        # A text has at most one padding token, which the model reads, as in diffusers. So a single
        # text needs no mask. In a batch, zeros follow shorter texts, and `lengths` masks the zeros.
        lengths = conditions["lengths"] if sample.shape[0] > 1 else None
        # `image_at` and `text_at` are the positions of the tokens. `times` are from 0 to 1000; the
        # transformer expects them from 0 to 1.
        return over_tokens(
            sample,
            text.shape[1],
            lambda tokens, image_at, text_at: self.model(
                tokens, text, times / 1000.0, image_at, text_at, lengths
            ),
        )

    def text_identity(self) -> dict[str, str]:
        """Return what encoded captions depend on: encoder, tokenizer, dtype, token count."""
        return {
            **parts_identity(self.facts, self.facts.text_encoders),
            **tokenizers_identity(self.weights, {"tokenizer": T5_TOKENIZER}),
            "dtype": self.text_precision,
            "tokens": f"{_TOKENS}, one of padding",
        }
