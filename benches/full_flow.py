"""Write full-size pipelines of flow models with random bf16 weights, for benchmarks.

python benches/full_flow.py FOLDER MODEL [--device cuda]

Parts are made on the device and saved from there, one after another. The package ships the
tokenizers of CLIP and T5. For Qwen's text encoders, the script writes a tokenizer whose tokens are
bytes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_transformers import CHROMA, FLUX, KLEIN, SD3_LARGE, SD3_MEDIUM, Z_IMAGE
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

Config = dict[str, Any]

LEVELS = 4
"""The number of entries of an autoencoder's `block_out_channels`."""
AUTOENCODER: Config = {
    "_class_name": "AutoencoderKL", "act_fn": "silu", "in_channels": 3, "out_channels": 3,
    "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "norm_num_groups": 32,
    "down_block_types": ["DownEncoderBlock2D"] * LEVELS,
    "up_block_types": ["UpDecoderBlock2D"] * LEVELS,
    "sample_size": 1024, "latent_channels": 16, "mid_block_add_attention": True,
}  # fmt: skip
SD3_AND_FLUX = {"use_quant_conv": False, "use_post_quant_conv": False, "force_upcast": True}
VAE_SD3 = AUTOENCODER | SD3_AND_FLUX | {"scaling_factor": 1.5305, "shift_factor": 0.0609}
VAE_FLUX = AUTOENCODER | SD3_AND_FLUX | {"scaling_factor": 0.3611, "shift_factor": 0.1159}
VAE_FLUX2 = AUTOENCODER | {
    "_class_name": "AutoencoderKLFlux2", "latent_channels": 32, "batch_norm_eps": 1e-4,
    "patch_size": [2, 2], "use_quant_conv": True, "use_post_quant_conv": True,
}  # fmt: skip


def clip(projects: bool) -> Config:
    """CLIP ViT-L's text encoder; `projects`: with the projection of its pooled result."""
    kind = "CLIPTextModelWithProjection" if projects else "CLIPTextModel"
    return {
        "architectures": [kind], "vocab_size": 49408, "hidden_size": 768,
        "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "max_position_embeddings": 77, "hidden_act": "quick_gelu", "eos_token_id": 49407,
        "layer_norm_eps": 1e-5, "projection_dim": 768,
    }  # fmt: skip


# OpenCLIP ViT-bigG's text encoder.
BIG_G = clip(projects=True) | {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
    "num_attention_heads": 20, "hidden_act": "gelu", "projection_dim": 1280,
}  # fmt: skip
T5: Config = {
    "architectures": ["T5EncoderModel"], "vocab_size": 32128, "d_model": 4096, "d_kv": 64,
    "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu",
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
}  # fmt: skip
QWEN3: Config = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
QWEN3_8B: Config = QWEN3 | {
    "hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False,
}  # fmt: skip
KLEIN_9B: Config = KLEIN | {
    "num_layers": 8, "num_single_layers": 24, "num_attention_heads": 32,
    "joint_attention_dim": 12288,
}  # fmt: skip
SCHNELL: Config = FLUX | {"guidance_embeds": False}
QWEN_IMAGE: Config = {
    "in_channels": 64, "out_channels": 16, "num_layers": 60, "num_attention_heads": 24,
    "attention_head_dim": 128, "joint_attention_dim": 3584, "axes_dims_rope": [16, 56, 56],
}  # fmt: skip
QWEN_VAE: Config = {
    "_class_name": "AutoencoderKLQwenImage", "base_dim": 96, "z_dim": 16,
    "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2,
}  # fmt: skip
# Layers of QWEN_VAE that change the number of frames: output and input channels. Images do not need
# them, but diffusers expects them in the file.
TIME_CONVS = {
    "encoder.down_blocks.5": (192, 192), "encoder.down_blocks.8": (384, 384),
    "decoder.up_blocks.0.upsamplers.0": (768, 384), "decoder.up_blocks.1.upsamplers.0": (768, 384),
}  # fmt: skip
QWEN25_VL: Config = {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
    "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "max_position_embeddings": 128000, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": False, "hidden_act": "silu",
    # transformers also builds a vision tower, which has no weights in the file and is not used.
    "vision_config": {
        "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 1,
        "out_hidden_size": 3584,
    },
}  # fmt: skip
DYNAMIC_SHIFT = {"use_dynamic_shifting": True, "shift": 3.0}

Parts = dict[str, tuple[str, Config]]
"""For each folder, the class of its model in `tc.models`, and its configuration."""


def _parts(transformer: str, config: Config, vae: Config, *encoders: tuple[str, Config]) -> Parts:
    names = ("text_encoder", "text_encoder_2", "text_encoder_3")
    class_field = {"_class_name": f"{transformer}2DModel"}  # diffusers' name of the class
    return {
        "transformer": (transformer, config | class_field),
        # tc.models.AutoencoderKL is also the class of FLUX.2's autoencoder.
        "vae": (vae["_class_name"].removesuffix("Flux2"), vae),
        **dict(zip(names, encoders, strict=False)),  # not all pipelines have three encoders
    }


def _sd3(config: Config) -> Parts:
    clips = [("CLIPTextModel", clip(projects=True)), ("CLIPTextModel", BIG_G)]
    return _parts("SD3Transformer", config, VAE_SD3, *clips, ("T5Encoder", T5))


def _flux(config: Config) -> Parts:
    encoders = [("CLIPTextModel", clip(projects=False)), ("T5Encoder", T5)]
    return _parts("FluxTransformer", config, VAE_FLUX, *encoders)


Z_IMAGE_PARTS = _parts("ZImageTransformer", Z_IMAGE, VAE_FLUX, ("CausalLM", QWEN3))
# By model: the class of its pipeline, the configuration of its scheduler, its parts.
PIPELINES: Mapping[str, tuple[str, Config, Parts]] = {
    "sd3": ("StableDiffusion3Pipeline", {"shift": 3.0}, _sd3(SD3_MEDIUM)),
    "sd3-large": ("StableDiffusion3Pipeline", {"shift": 3.0}, _sd3(SD3_LARGE)),
    "flux": ("FluxPipeline", DYNAMIC_SHIFT, _flux(FLUX)),
    "flux-schnell": ("FluxPipeline", {"shift": 1.0}, _flux(SCHNELL)),
    "chroma": (
        "ChromaPipeline",
        DYNAMIC_SHIFT,
        _parts("ChromaTransformer", CHROMA, VAE_FLUX, ("T5Encoder", T5)),
    ),
    "zimage": ("ZImagePipeline", {"shift": 3.0}, Z_IMAGE_PARTS),
    # Has the shape of the base model. `trainable-candle` recognises turbo by its folder's name.
    "zimage-turbo": ("ZImagePipeline", {"shift": 3.0}, Z_IMAGE_PARTS),
    "flux2": (
        "Flux2KleinPipeline",
        DYNAMIC_SHIFT,
        _parts("Flux2Transformer", KLEIN, VAE_FLUX2, ("CausalLM", QWEN3)),
    ),
    "flux2-9b": (
        "Flux2KleinPipeline",
        DYNAMIC_SHIFT,
        _parts("Flux2Transformer", KLEIN_9B, VAE_FLUX2, ("CausalLM", QWEN3_8B)),
    ),
    "qwen-image": (
        "QwenImagePipeline",
        DYNAMIC_SHIFT | {"max_shift": 0.9, "max_image_seq_len": 8192, "shift_terminal": 0.02},
        _parts("QwenImageTransformer", QWEN_IMAGE, QWEN_VAE, ("CausalLM", QWEN25_VL)),
    ),
}  # fmt: skip


def write_pipeline(folder: Path, model: str, device: str = "cpu") -> None:
    """Write the folder of a pipeline in the layout of diffusers.

    The folder takes 15 GB (sd3), 26 (sd3-large), 34 (flux), 28 (chroma), 21 (zimage), 16 (flux2),
    35 (flux2-9b) or 54 (qwen-image).
    """
    class_name, scheduler, parts = PIPELINES[model]
    tc.manual_seed(0)
    for part, (kind, config) in parts.items():
        write_part(folder / part, kind, config, device)
    flow = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
    _write(folder / "scheduler" / "scheduler_config.json", flow | scheduler)
    _write(folder / "model_index.json", {"_class_name": class_name})
    if any(kind == "CausalLM" for kind, _ in parts.values()):
        write_tokenizer(folder / "tokenizer")


def write_part(folder: Path, kind: str, config: Config, device: str) -> None:
    """Write a model of the class `kind` of `tc.models`, with weights drawn on the device."""
    path = folder / "config.json"
    _write(path, config)
    model = getattr(tc.models, kind).from_config(path, dtype="bf16", device=device)
    model.save_pretrained(folder)
    if kind == "AutoencoderKLQwenImage":
        weights = folder / "diffusion_pytorch_model.safetensors"
        tc.save_file(tc.load_file(weights) | dict(_time_convs()), weights)
    # Write the file again: save_pretrained leaves out fields that only other programs read.
    _write(path, config)
    del model
    if device.startswith("cuda"):
        tc.cuda.empty_cache()


def _time_convs() -> Iterator[tuple[str, tc.Tensor]]:
    for name, (outputs, inputs) in TIME_CONVS.items():
        weight = tc.randn((outputs, inputs, 3, 1, 1)) * 0.02
        yield f"{name}.time_conv.weight", weight.to("bf16")
        yield f"{name}.time_conv.bias", tc.zeros((outputs,), dtype="bf16")


def _write(path: Path, values: Config) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n")


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer whose tokens are bytes and Qwen's special tokens."""
    # ByteLevel writes each of the 256 bytes as a letter.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<think>", "</think>"])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("model", choices=sorted(PIPELINES))
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    write_pipeline(given.folder, given.model, given.device)
