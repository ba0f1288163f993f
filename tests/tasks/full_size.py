"""Folders that say what published models are, without their weights: enough for estimates."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from pathlib import Path

Config = dict[str, Any]

_LEVELS: Final = 4
_VAE: Config = {
    "_class_name": "AutoencoderKL", "act_fn": "silu", "in_channels": 3, "out_channels": 3,
    "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2, "norm_num_groups": 32,
    "down_block_types": ["DownEncoderBlock2D"] * _LEVELS,
    "up_block_types": ["UpDecoderBlock2D"] * _LEVELS,
    "sample_size": 1024, "latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159,
    "use_quant_conv": False, "use_post_quant_conv": False,
}  # fmt: skip
_CLIP_L: Config = {
    "architectures": ["CLIPTextModel"], "vocab_size": 49408, "hidden_size": 768,
    "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "max_position_embeddings": 77, "hidden_act": "quick_gelu", "eos_token_id": 49407,
    "layer_norm_eps": 1e-5, "projection_dim": 768,
}  # fmt: skip
_CLIP_G: Config = _CLIP_L | {
    "architectures": ["CLIPTextModelWithProjection"], "hidden_size": 1280,
    "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "hidden_act": "gelu", "projection_dim": 1280,
}  # fmt: skip
_T5: Config = {
    "architectures": ["T5EncoderModel"], "vocab_size": 32128, "d_model": 4096, "d_kv": 64,
    "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu",
    "relative_attention_num_buckets": 32, "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
}  # fmt: skip
_FLUX: Config = {
    "_class_name": "FluxTransformer2DModel", "in_channels": 64, "num_layers": 19,
    "num_single_layers": 38, "attention_head_dim": 128, "num_attention_heads": 24,
    "joint_attention_dim": 4096, "pooled_projection_dim": 768, "guidance_embeds": True,
    "axes_dims_rope": [16, 56, 56],
}  # fmt: skip
_SDXL: Config = {
    "_class_name": "UNet2DConditionModel", "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048, "attention_head_dim": [5, 10, 20],
    "transformer_layers_per_block": [1, 2, 10], "layers_per_block": 2, "norm_num_groups": 32,
    "sample_size": 128, "projection_class_embeddings_input_dim": 2816,
    "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "in_channels": 4,
    "out_channels": 4, "flip_sin_to_cos": True, "use_linear_projection": True,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
}  # fmt: skip
LLAMA_3_8B: Config = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 5e5, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
QWEN2_1B: Config = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936,
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip

PIPELINES: Final[dict[str, dict[str, Config]]] = {
    "flux": {"transformer": _FLUX, "vae": _VAE, "text_encoder": _CLIP_L, "text_encoder_2": _T5},
    "sdxl": {
        "unet": _SDXL,
        "vae": _VAE | {"latent_channels": 4, "use_quant_conv": True, "use_post_quant_conv": True},
        "text_encoder": _CLIP_L,
        "text_encoder_2": _CLIP_G,
    },
}
"""Configurations by the names of folders."""


def write_model(folder: Path, config: Config) -> Path:
    """A configuration beside a file of weights that has one number."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensor = {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}
    header = json.dumps({"x": tensor}).encode()
    name = "diffusion_pytorch_model" if "_class_name" in config else "model"
    path = folder / f"{name}.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(2))
    return folder


def write_pipeline(folder: Path, model: str) -> Path:
    """All parts of a pipeline."""
    for part, config in PIPELINES[model].items():
        write_model(folder / part, config)
    return folder


def write_image(folder: Path, side: int = 1024) -> Path:
    """A data set of one image."""
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((side, side, 3), np.uint8)).save(folder / "a.png")
    (folder / "a.txt").write_text("a square")
    return folder
