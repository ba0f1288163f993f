"""Models: load one with `load`, or with its class; then fine-tune it with `add_adapter`."""

from trainable_candle._core import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    CausalLM,
    ChromaTransformer,
    CLIPTextModel,
    DigitsTransformer,
    Flux2Transformer,
    FluxTransformer,
    Generation,
    KVCache,
    Model,
    QwenImageTransformer,
    SD3Transformer,
    SDXLUNet,
    T5Encoder,
    TextFeatures,
    ZImageTransformer,
    save_checkpoint,
    set_resolver,
)
from trainable_candle.hub import resolve

load = Model.from_pretrained
# With this resolver, `load` and `from_pretrained` also take the names of models on the Hugging Face
# hub.
set_resolver(resolve)

__all__ = [
    "AutoencoderKL",
    "AutoencoderKLQwenImage",
    "CLIPTextModel",
    "CausalLM",
    "ChromaTransformer",
    "DigitsTransformer",
    "Flux2Transformer",
    "FluxTransformer",
    "Generation",
    "KVCache",
    "Model",
    "QwenImageTransformer",
    "SD3Transformer",
    "SDXLUNet",
    "T5Encoder",
    "TextFeatures",
    "ZImageTransformer",
    "load",
    "save_checkpoint",
]
