"""Write a full-size SDXL pipeline with random f16 weights, and images to train it on.

python benches/full_size.py FOLDER [--device cuda]

The weights of each part are drawn on the device and then saved. The tokenizers are those of the
tiny SDXL that ships in the wheel; names and shapes are those of diffusers and transformers.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Iterator

VAE_WIDTHS = (128, 256, 512, 512)
VAE_LAYERS = 2
LATENT_CHANNELS = 4
VOCABULARY = 49408
TOKENS = 77
# By folder: hidden size, intermediate size, layers, heads, activation, projection.
ENCODERS: dict[str, tuple[int, int, int, int, str, int | None]] = {
    "text_encoder": (768, 3072, 12, 12, "quick_gelu", None),
    "text_encoder_2": (1280, 5120, 32, 20, "gelu", 1280),
}
# Width and height: square, landscape and portrait of 1.0 to 1.2 MP, and a landscape of 1.6 MP.
SIZES = ((1024, 1024), (1280, 960), (960, 1280), (1536, 1024))

Shapes = dict[str, tuple[int, ...]]


def write_pipeline(folder: Path, device: str = "cpu") -> None:
    """Write the folder of a pipeline in the layout of diffusers. The folder takes 6.9 GB."""
    shipped = Path(str(files("trainable_candle") / "assets" / "sdxl_tiny"))
    for name in ("scheduler", "tokenizer", "tokenizer_2", "model_index.json"):
        source = shipped / name
        copy: Any = shutil.copytree if source.is_dir() else shutil.copy
        folder.mkdir(parents=True, exist_ok=True)
        copy(source, folder / name)
    for part, config in configurations(shipped).items():
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    unet = tc.models.SDXLUNet.from_config(
        folder / "unet" / "config.json", dtype="f16", device=device
    )
    shapes = {name: tensor.shape for name, tensor in unet.named_tensors().items()}
    del unet
    weights = "diffusion_pytorch_model.safetensors"
    tc.save_file(_random_weights(shapes, device), folder / "unet" / weights)
    tc.save_file(_random_weights(vae_shapes(), device), folder / "vae" / weights)
    for part, (width, inner, layers, _, _, projection) in ENCODERS.items():
        shapes = text_shapes(width, inner, layers, projection)
        tc.save_file(_random_weights(shapes, device), folder / part / "model.safetensors")


def configurations(shipped: Path) -> dict[str, dict[str, Any]]:
    """SDXL's configurations by folder, made from those of the tiny SDXL."""
    found = {
        "unet": {
            "attention_head_dim": [5, 10, 20],  # diffusers' name for the numbers of heads
            "block_out_channels": [320, 640, 1280],
            "transformer_layers_per_block": [1, 2, 10],
            "layers_per_block": 2,
            "cross_attention_dim": 2048,
            "addition_time_embed_dim": 256,
            "projection_class_embeddings_input_dim": 2816,
            "norm_num_groups": 32,
            "sample_size": 128,
        },
        "vae": {
            "block_out_channels": list(VAE_WIDTHS),
            "layers_per_block": VAE_LAYERS,
            "norm_num_groups": 32,
            "sample_size": 1024,
        },
    }
    for part, (width, inner, layers, heads, activation, projection) in ENCODERS.items():
        found[part] = {
            "hidden_size": width,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "hidden_act": activation,
            "projection_dim": projection or width,
            "vocab_size": VOCABULARY,
        }
    return {
        part: json.loads((shipped / part / "config.json").read_text()) | values
        for part, values in found.items()
    }


def write_images(folder: Path, count: int = 24, sizes: tuple[tuple[int, int], ...] = SIZES) -> None:
    """Write smooth random PNG images with captions; image n has `sizes[n % len(sizes)]`."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for number in range(count):
        small = random.integers(0, 255, (12, 12, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize(sizes[number % len(sizes)], Image.Resampling.BICUBIC)
        image.save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text(f"a photo of a sks thing number {number}")


def vae_shapes() -> Shapes:
    """The parameters of SDXL's autoencoder, by diffusers' names."""
    deepest = VAE_WIDTHS[-1]  # the channels at the lowest resolution
    shapes: Shapes = {}

    def coder(
        name: str, ends: tuple[int, int], widths: list[int], resnets: int, scaled: str
    ) -> None:
        # Adds an encoder or a decoder to `shapes`. `ends`: the channels of its input and of its
        # output. `widths`: the channels of each level. `resnets`: the number of residual blocks of
        # a level. `scaled`: the name of the layers that change the resolution, after every level
        # but the last.
        _conv(shapes, f"{name}.conv_in", widths[0], ends[0], 3)
        channels = widths[0]  # of the feature map so far
        kind = "down" if scaled == "downsamplers" else "up"
        for level, width in enumerate(widths):
            block = f"{name}.{kind}_blocks.{level}"
            for number in range(resnets):
                _resnet(shapes, f"{block}.resnets.{number}", channels, width)
                channels = width
            if level + 1 < len(widths):
                _conv(shapes, f"{block}.{scaled}.0.conv", width, width, 3)
        for number in range(2):
            _resnet(shapes, f"{name}.mid_block.resnets.{number}", deepest, deepest)
        attention = f"{name}.mid_block.attentions.0"
        _norm(shapes, f"{attention}.group_norm", deepest)
        for layer in ("to_q", "to_k", "to_v", "to_out.0"):
            _linear(shapes, f"{attention}.{layer}", deepest, deepest)
        _norm(shapes, f"{name}.conv_norm_out", widths[-1])
        _conv(shapes, f"{name}.conv_out", ends[1], widths[-1], 3)

    widths = list(VAE_WIDTHS)
    moments = 2 * LATENT_CHANNELS  # mean and log variance of each latent channel
    coder("encoder", (3, moments), widths, VAE_LAYERS, "downsamplers")
    # In diffusers, a level of the decoder has one residual block more than a level of the encoder.
    coder("decoder", (LATENT_CHANNELS, 3), widths[::-1], VAE_LAYERS + 1, "upsamplers")
    _conv(shapes, "quant_conv", moments, moments, 1)
    _conv(shapes, "post_quant_conv", LATENT_CHANNELS, LATENT_CHANNELS, 1)
    return shapes


def text_shapes(width: int, inner: int, layers: int, projection: int | None) -> Shapes:
    """The parameters of a CLIP text encoder, by transformers' names."""
    shapes: Shapes = {
        "text_model.embeddings.token_embedding.weight": (VOCABULARY, width),
        "text_model.embeddings.position_embedding.weight": (TOKENS, width),
    }
    for number in range(layers):
        layer = f"text_model.encoder.layers.{number}"
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            _linear(shapes, f"{layer}.self_attn.{name}", width, width)
        _norm(shapes, f"{layer}.layer_norm1", width)
        _linear(shapes, f"{layer}.mlp.fc1", inner, width)
        _linear(shapes, f"{layer}.mlp.fc2", width, inner)
        _norm(shapes, f"{layer}.layer_norm2", width)
    _norm(shapes, "text_model.final_layer_norm", width)
    if projection is not None:
        shapes["text_projection.weight"] = (projection, width)
    return shapes


# Each of the following functions adds the shapes of a layer's or block's parameters to `shapes`.


def _conv(shapes: Shapes, name: str, out: int, inputs: int, kernel: int) -> None:
    shapes |= {f"{name}.weight": (out, inputs, kernel, kernel), f"{name}.bias": (out,)}


def _linear(shapes: Shapes, name: str, out: int, inputs: int) -> None:
    shapes |= {f"{name}.weight": (out, inputs), f"{name}.bias": (out,)}


def _norm(shapes: Shapes, name: str, width: int) -> None:
    shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}


def _resnet(shapes: Shapes, name: str, inputs: int, width: int) -> None:
    _norm(shapes, f"{name}.norm1", inputs)
    _conv(shapes, f"{name}.conv1", width, inputs, 3)
    _norm(shapes, f"{name}.norm2", width)
    _conv(shapes, f"{name}.conv2", width, width, 3)
    if inputs != width:
        _conv(shapes, f"{name}.conv_shortcut", width, inputs, 1)


def _random_weights(shapes: Shapes, device: str) -> dict[str, tc.Tensor]:
    tc.manual_seed(0)
    return dict(_random_tensors(shapes, device))


def _random_tensors(shapes: Shapes, device: str) -> Iterator[tuple[str, tc.Tensor]]:
    """Normal weights of deviation 0.5 / √(inputs per output). Norms have scale 1, biases 0."""
    for name, shape in shapes.items():
        if len(shape) == 1:
            is_scale = name.endswith("weight") and "norm" in name
            tensor = tc.full(shape, 1.0 if is_scale else 0.0, device=device)
        else:
            spread = 0.5 / math.sqrt(math.prod(shape[1:]))
            tensor = tc.randn(shape, device=device) * spread
        yield name, tensor.to("f16")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    write_pipeline(given.folder / "sdxl", given.device)
    write_images(given.folder / "images")
