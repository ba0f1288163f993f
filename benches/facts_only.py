"""Write folders that have the configurations of published models without their weights.

Predictions of memory need only the configurations.
"""

from __future__ import annotations

import json
import struct
from importlib.resources import files
from pathlib import Path
from typing import Any

import full_flow
import full_size
from gpu_lm import CLASSES, LLAMA3, QWEN2

Config = dict[str, Any]


def _sdxl() -> dict[str, Config]:
    # `full_size.configurations` replaces the sizes of this tiny model by those of SDXL.
    shipped = Path(str(files("trainable_candle") / "assets" / "sdxl_tiny"))
    return full_size.configurations(shipped)


def _pipeline(name: str) -> dict[str, Config]:
    _class, _scheduler, parts = full_flow.PIPELINES[name]
    return {part: config for part, (_kind, config) in parts.items()}


def _text(config: Config) -> dict[str, Config]:
    # The folder of a language model has its config.json at the top: the name of the part is "".
    return {"": config | {"architectures": [CLASSES[config["model_type"]]]}}


MODELS = {
    "SDXL": ("sdxl", _sdxl),
    "SD3.5-medium": ("sd3", lambda: _pipeline("sd3")),
    "SD3.5-large": ("sd3", lambda: _pipeline("sd3-large")),
    "Flux.1-dev": ("flux", lambda: _pipeline("flux")),
    "Chroma": ("chroma", lambda: _pipeline("chroma")),
    "FLUX.2-klein-4B": ("flux2", lambda: _pipeline("flux2")),
    "FLUX.2-klein-9B": ("flux2", lambda: _pipeline("flux2-9b")),
    "Z-Image": ("zimage", lambda: _pipeline("zimage")),
    "Qwen-Image": ("qwen-image", lambda: _pipeline("qwen-image")),
    "Qwen2-1.5B": ("causal-lm", lambda: _text(QWEN2)),
    "Llama-3-8B": ("causal-lm", lambda: _text(LLAMA3)),
}
"""The family of each published model, and a function that returns its configurations by folder."""


def write_model(folder: Path, name: str) -> Path:
    """Write each configuration, and beside it a weight file with one number; return `folder`."""
    _family, configurations = MODELS[name]
    for part, config in configurations().items():
        part_folder = folder / part
        part_folder.mkdir(parents=True, exist_ok=True)
        (part_folder / "config.json").write_text(json.dumps(config))
        # The safetensors format: the header's length, the header, the bytes of the tensors.
        header = json.dumps({"x": {"dtype": "BF16", "shape": [1], "data_offsets": [0, 2]}})
        # Only diffusers' configurations have `_class_name`; the others are transformers'.
        stem = "diffusion_pytorch_model" if "_class_name" in config else "model"
        path = part_folder / f"{stem}.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(2))
    return folder
