"""Qwen-Image: its text encoder and what differs from other flow models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

from trainable_candle._core import pipeline_parts
from trainable_candle.data import file_identity
from trainable_candle.errors import ConfigError
from trainable_candle.families.flow import Features, FlowFamily
from trainable_candle.families.flow.coder import QwenImageCoder
from trainable_candle.families.flow.patches import from_squares, over_tokens, squares
from trainable_candle.families.flow.rows import in_rows
from trainable_candle.families.flow.schedule import FlowSchedule
from trainable_candle.families.pipeline.facts import index_of
from trainable_candle.families.pipeline.identity import parts_identity
from trainable_candle.families.pipeline.qwen import Qwen25VL, tokenizer_folder
from trainable_candle.tasks.latent.drawing import DrawingDefaults

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainable_candle import Tensor
    from trainable_candle.models import QwenImageTransformer
    from trainable_candle.settings import TrainConfig
    from trainable_candle.tasks.latent.coders import KLCoder
    from trainable_candle.train.trainer import Inputs

_SYSTEM: Final = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:"
)
"""The system message of the chat template that the model was trained with."""
_DROPPED: Final = 34
"""The chat template starts with this number of tokens, whose hidden states are not used."""
_MOST_TOKENS: Final = 1024
"""The most tokens of a caption in the chat template, in addition to `_DROPPED`."""
_USUAL_TOKENS: Final = 128
"""The number of tokens of a caption that memory estimates assume."""
_PIPELINES: Final = ("QwenImagePipeline", "QwenImageImg2ImgPipeline")
"""The `_class_name` that `model_index.json` may have."""


class QwenImageTexts:
    """Qwen2.5-VL with its tokenizer.

    The features are the hidden states after the final norm, without those of the first `_DROPPED`
    tokens. Follows `_get_qwen_prompt_embeds` of diffusers' pipeline:
    https://github.com/huggingface/diffusers/blob/58eb52c0803ea9af3abec60841c2a093bdf1f951/src/diffusers/pipelines/qwenimage/pipeline_qwenimage.py

    Args:
        family: the family with the weights.

    Raises:
        MissingFileError, WeightsFormatError, ConfigError: a part is missing, damaged, or of another
            model.
    """

    def __init__(self, family: QwenImage) -> None:
        self._encoder = Qwen25VL(family, _SYSTEM)

    def _tokens(self, caption: str) -> list[int]:
        return self._encoder.tokenizer.encode(caption, _DROPPED + _MOST_TOKENS)

    def size_of(self, caption: str) -> int:
        """Return the number of tokens in a caption's features."""
        return len(self._tokens(caption)) - _DROPPED

    def truncates(self, caption: str) -> bool:
        """Return whether a caption in the template has more tokens than the encoder reads."""
        most = _DROPPED + _MOST_TOKENS
        # `encode` truncates to its second argument, so it gets one token more than the most.
        return len(self._encoder.tokenizer.encode(caption, most + 1)) > most

    def __call__(self, captions: Sequence[str]) -> dict[str, Tensor]:
        """Encode B captions: `encoder_hidden_states` (B, L, 3584) and `lengths` (B,), in tokens.

        L is the longest length. Zeros follow the features of shorter captions.
        """
        # Each text is (1, tokens, 3584).
        texts = [self._encoder.states(self._tokens(caption)) for caption in captions]
        return in_rows([text.narrow(1, _DROPPED, text.shape[1] - _DROPPED) for text in texts])


class QwenImage(FlowFamily[QwenImageTexts]):
    """Qwen-Image and Qwen-Image-2512."""

    name: ClassVar[str] = "qwen-image"
    summary: ClassVar[str] = "Qwen-Image or Qwen-Image-2512"
    download: ClassVar[str] = (
        "Qwen/Qwen-Image or Qwen/Qwen-Image-2512 on the Hugging Face hub (about 58 GB each, "
        "Apache-2.0)"
    )
    parts: ClassVar[tuple[str, ...]] = tuple(pipeline_parts("qwen-image"))
    drawing: ClassVar[DrawingDefaults] = DrawingDefaults(steps=50, guidance=4.0)
    no_prompt: ClassVar[str] = " "
    # Prompt and negative prompt may differ in length. In one batch they would need a mask, which is
    # slow, so drawing calls the model for each of them.
    reads_texts_apart: ClassVar[bool] = True
    # The shift grows from exp(0.5) for an image of 256 tokens to exp(0.9) for 8192 tokens. The last
    # noise level above 0 is 0.02.
    schedule: ClassVar[FlowSchedule] = FlowSchedule(
        grows=True, tokens=(256, 8192), mu=(0.5, 0.9), terminal=0.02
    )
    coder_kind: ClassVar[type[KLCoder]] = QwenImageCoder
    text_tokens: ClassVar[int] = _USUAL_TOKENS
    overflows: ClassVar[bool] = True  # some values are too large for f16
    goes_with: ClassVar[str] = "Qwen-Image goes with Qwen2.5-VL 7B"
    model: QwenImageTransformer

    @property
    def targets(self) -> tuple[str, ...]:  # type: ignore[override]
        """The layers of the blocks except the modulation, as in musubi-tuner and OneTrainer.

        Nothing reads the last block's outputs for the text. The layers that only make these outputs
        would learn nothing, so they are left out.
        """
        all_but_last = "|".join(map(str, range(self.facts.config["num_layers"] - 1)))
        return (
            r"transformer_blocks\.\d+\.attn\.(to_(q|k|v|out\.0)|add_(k|v)_proj)",
            r"transformer_blocks\.\d+\.img_mlp\.net\.(0\.proj|2)",
            rf"transformer_blocks\.({all_but_last})\.attn\.(to_add_out|add_q_proj)",
            rf"transformer_blocks\.({all_but_last})\.txt_mlp\.net\.(0\.proj|2)",
        )

    @classmethod
    def defaults(cls, config: TrainConfig) -> Mapping[str, Any]:  # noqa: ARG003
        """Return musubi-tuner's learning rate, lower than that of other image models."""
        return {"learning_rate": 5e-5}

    def require_own(self) -> None:
        """See `FlowFamily.require_own`; also checks the pipeline's class.

        Raises:
            MissingFileError, WeightsFormatError: a part is missing or damaged.
            ConfigError: the folder holds a related pipeline, such as Qwen-Image-Edit, or the parts
                do not fit together.
        """
        super().require_own()
        # Without a class name, as in a checkpoint of one file, the parts alone decide.
        pipeline = index_of(self.weights).get("_class_name", _PIPELINES[0])
        if pipeline not in _PIPELINES:
            raise ConfigError(
                f"weights: {self.weights} is a {pipeline}, which is not supported; expected "
                f"Qwen-Image ({_PIPELINES[0]})"
            )

    @property
    def text_features(self) -> Mapping[str, Features]:
        """See `FlowFamily.text_features`."""
        # The shape of a linear weight is (out, in); `in` is the width of the hidden states.
        width = self.facts.parts["text_encoder"].layers["model.layers.0.self_attn.q_proj"][1]
        read = self.facts.config["joint_attention_dim"]
        return {"text_encoder": Features(produced=width, read=read)}

    def load_encoders(self) -> QwenImageTexts:
        """Load Qwen2.5-VL, without its vision encoder, and its tokenizer."""
        return QwenImageTexts(self)

    @property
    def text_values(self) -> int:
        """The number of values in a caption's features: tokens times features of a token."""
        return int(self.text_tokens * self.facts.config["joint_attention_dim"])

    @property
    def text_working_values(self) -> int:
        """The number of values in Qwen2.5-VL's widest layer plus `text_values`, for one caption."""
        layers = self.facts.parts["text_encoder"].layers
        # The estimate counts, for each token, the results of the gate and up projections (`inner`
        # values each), and four times the values of a hidden state.
        inner, width = layers["model.layers.0.mlp.up_proj"]
        return int((_DROPPED + _MOST_TOKENS) * (2 * inner + 4 * width)) + self.text_values

    def rescaled(self, guided: Tensor, positive: Tensor) -> Tensor:
        """Scale each token of the `guided` prediction to the norm that it has in `positive`.

        Args:
            guided: the prediction with guidance, (B, C, H, W).
            positive: the prediction for the prompt alone, of the same shape.
        """
        # `squares` turns the 2x2 latent pixels of a token into channels, so dimension 1 has the
        # features of a token.
        tokens, expected = squares(guided.to("f32")), squares(positive.to("f32"))
        norm, expected_norm = ((x * x).sum(1, keepdim=True).sqrt() for x in (tokens, expected))
        return from_squares(tokens * (expected_norm / norm))

    def predict(self, sample: Tensor, times: Tensor, conditions: Inputs) -> Tensor:
        """Return the velocity that the transformer predicts, in the shape of `sample`."""
        # `times` are from 0 to 1000; the model takes times from 0 to 1.
        text = conditions["encoder_hidden_states"]
        # A single text has no padding. In a batch, zeros follow shorter texts, and `lengths` masks
        # the zeros.
        lengths = conditions["lengths"] if sample.shape[0] > 1 else None
        # `image_at` and `text_at` are positions of tokens; `centred` puts row 0 and column 0 in the
        # middle of the image.
        return over_tokens(
            sample,
            text.shape[1],
            lambda tokens, image_at, text_at: self.model(
                tokens, text, times / 1000.0, image_at, text_at, lengths
            ),
            centred=True,
        )

    def text_identity(self) -> dict[str, str]:
        """Return what encoded captions depend on: encoder, tokenizer, dtype, token counts."""
        return {
            **parts_identity(self.facts, self.facts.text_encoders),
            "tokenizer": file_identity(tokenizer_folder(self, Qwen25VL.display_name)),
            "dtype": self.text_precision,
            "tokens": f"{_MOST_TOKENS} after {_DROPPED}",
        }
