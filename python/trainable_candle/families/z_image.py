"""Z-Image: its text encoder and what differs from other flow models."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final

from trainable_candle._core import pipeline_parts
from trainable_candle.data import file_identity
from trainable_candle.families.flow import Features, FlowFamily
from trainable_candle.families.flow.rows import in_rows
from trainable_candle.families.flow.schedule import FlowSchedule
from trainable_candle.families.pipeline.identity import parts_identity
from trainable_candle.families.pipeline.qwen import MOST_TOKENS, Qwen3, tokenizer_folder
from trainable_candle.tasks.latent.drawing import DrawingDefaults

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainable_candle import Tensor
    from trainable_candle.models import ZImageTransformer
    from trainable_candle.train.trainer import Inputs

_MULTIPLE: Final = 32
"""The transformer pads texts to multiples of this many tokens."""
_USUAL_TOKENS: Final = 128
"""The number of tokens of a caption that memory estimates assume."""


class ZImageTexts:
    """Qwen3 with its tokenizer; the features are the outputs of the last decoder layer but one.

    Follows `encode_prompt` of diffusers' pipeline:
    https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/pipelines/z_image/pipeline_z_image.py

    Args:
        family: the family with the weights.

    Raises:
        MissingFileError, WeightsFormatError, ConfigError: a part is missing, damaged, or of another
            model.
    """

    def __init__(self, family: ZImage) -> None:
        layer_count = family.facts.parts["text_encoder"].config["num_hidden_layers"]
        # `Qwen3` counts layers from 1, so this is the last layer but one. With `thinks`, the chat
        # template does not end with the empty thoughts that keep the answer from having any.
        self._qwen3 = Qwen3(family, [layer_count - 1], thinks=True)

    def _tokens(self, caption: str) -> list[int]:
        return self._qwen3.tokenizer.encode(caption, MOST_TOKENS)

    def size_of(self, caption: str) -> int:
        """Return the number of tokens of a caption divided by 32, rounded up."""
        return -(-len(self._tokens(caption)) // _MULTIPLE)

    def truncates(self, caption: str) -> bool:
        """Return whether a caption in its chat template has more than `MOST_TOKENS` tokens."""
        return len(self._qwen3.tokenizer.encode(caption, MOST_TOKENS + 1)) > MOST_TOKENS

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Encode B captions: `encoder_hidden_states` (B, L, 2560) and `lengths` (B,) in tokens.

        L is the greatest length, rounded up to a multiple of 32. The transformer does not read the
        features of a caption after its length.
        """
        # `states` returns a list with the features after each of the layers, here one.
        rows = [self._qwen3.states(self._tokens(caption))[0] for caption in captions]
        return in_rows(rows, _MULTIPLE)


class ZImage(FlowFamily[ZImageTexts]):
    """Z-Image: the base model and turbo, which was distilled to a few steps."""

    name: ClassVar[str] = "zimage"
    summary: ClassVar[str] = "Z-Image base or turbo"
    download: ClassVar[str] = (
        "Tongyi-MAI/Z-Image (to train) or Tongyi-MAI/Z-Image-Turbo on the Hugging Face hub (about "
        "21 GB each, Apache-2.0)"
    )
    parts: ClassVar[tuple[str, ...]] = tuple(pipeline_parts("zimage"))
    # The layers that musubi-tuner and OneTrainer adapt: the attention and feed-forward layers of
    # the blocks that read both image and text. The refiner blocks, which read either image or text,
    # have no adapters.
    targets: ClassVar[tuple[str, ...]] = (
        r"layers\.\d+\.(attention\.to_(q|k|v|out\.0)|feed_forward\.w[123])",
    )
    drawing: ClassVar[DrawingDefaults] = DrawingDefaults(steps=50, guidance=5.0)
    distilled: ClassVar[DrawingDefaults] = DrawingDefaults(steps=9, guidance=1.0)
    # Drawing calls the model separately for the prompt and the negative prompt.
    reads_texts_apart: ClassVar[bool] = True
    schedule: ClassVar[FlowSchedule] = FlowSchedule(shift=3.0)
    text_tokens: ClassVar[int] = _USUAL_TOKENS
    # Some values are too large for f16.
    overflows: ClassVar[bool] = True
    # The autoencoder's `scaling_factor`.
    scaling: ClassVar[float | None] = 0.3611
    goes_with: ClassVar[str] = "Z-Image goes with Qwen3 4B"
    # `in_channels` counts the channels of a latent pixel, not those of an image token.
    packs: ClassVar[bool] = False
    model: ZImageTransformer

    @property
    def text_features(self) -> Mapping[str, Features]:
        """See `FlowFamily.text_features`."""
        width = self.facts.parts["text_encoder"].config["hidden_size"]
        return {"text_encoder": Features(produced=width, read=self.facts.config["cap_feat_dim"])}

    @property
    def distillation(self) -> str | None:
        """A note that training undoes turbo's distillation; None if the model is not turbo.

        Only the name of the weights distinguishes turbo from the base and from De-Turbo.
        """
        name = self.shown_name.lower()
        if "turbo" not in name or "de-turbo" in name or "de_turbo" in name:
            return None
        return (
            "training Z-Image-Turbo directly undoes its distillation to a few steps; train the "
            "base, or Z-Image-De-Turbo"
        )

    def load_encoders(self) -> ZImageTexts:
        """Load Qwen3, without its last decoder layer, and its tokenizer."""
        return ZImageTexts(self)

    @property
    def width(self) -> int:
        """The number of features of a token in the transformer."""
        return int(self.facts.config["dim"])

    @property
    def text_values(self) -> int:
        """The number of values in a caption's features: tokens times features of a token."""
        return int(self.text_tokens * self.facts.config["cap_feat_dim"])

    @property
    def text_working_values(self) -> int:
        """The number of values in Qwen3's widest layer plus `text_values`, for one caption."""
        qwen3 = self.facts.parts["text_encoder"].config
        # The estimate counts, for each token, the results of the gate and up projections, and four
        # times the values of a hidden state.
        values_of_token = 2 * qwen3["intermediate_size"] + 4 * qwen3["hidden_size"]
        return int(MOST_TOKENS * values_of_token) + self.text_values

    def predict(self, sample: Tensor, times: Tensor, conditions: Inputs) -> Tensor:
        """Return the velocity from latents to noise, in the shape of `sample`.

        `times` run from latents (0) to noise (1000). The transformer itself takes times from noise
        (0) to latents (1), and predicts the velocity in that direction.
        """
        predicted = self.model(
            sample,
            conditions["encoder_hidden_states"],
            1.0 - times / 1000.0,
            conditions["lengths"],
            # Attention reads a text's padding up to the next multiple of 32 tokens. A single text
            # has no more padding than that, so no mask is needed. In a batch, shorter texts may
            # have more, which a mask hides.
            rows_are_full=sample.shape[0] == 1,
        )
        return -predicted

    def text_identity(self) -> dict[str, str]:
        """Return what the encoded captions depend on: files, dtype, quantization, token limit."""
        return {
            **parts_identity(self.facts, self.facts.text_encoders),
            "tokenizer": file_identity(tokenizer_folder(self)),
            "dtype": self.text_precision,
            "tokens": str(MOST_TOKENS),
        }
