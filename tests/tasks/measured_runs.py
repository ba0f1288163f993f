"""Runs of full-size models with measured peaks and times, and the facts to predict these from."""

from pathlib import Path
from typing import Any, NamedTuple

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.train import TrainConfig
from trainable_candle.train.adapters import adapter_config

from .full_size import write_model

# Adapter targets: the attention layers. In joint attention, the text has layers of its own.
ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
JOINT = [*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
# Sizes of inputs, as in `Run.sizes`.
FLUX = {"height": 128, "width": 128, "tokens": 512}
SDXL = {"height": 128, "width": 128, "tokens": 77}
SD3 = {"height": 128, "width": 128, "tokens": 333}  # 77 of CLIP, 256 of T5
Z_IMAGE = {"height": 128, "width": 128, "tokens": 128}
ROWS = {"tokens": 2048}  # a packed row of texts
FULL: dict[str, Any] = {"gradient_checkpointing": "full"}
SELECTIVE: dict[str, Any] = {"gradient_checkpointing": "selective"}
OFFLOAD: dict[str, Any] = {"gradient_checkpointing": "offload"}
MODULATION: dict[str, Any] = {"stream_modulation": True}
# All 57 blocks of Flux.1 are streamed. test_speed.py uses this.
ALL_FLUX: dict[str, Any] = FULL | {"stream_blocks": 57, "stream_modulation": True}


class Run(NamedTuple):
    """A run on one H100 in bf16 with the family's default adapter of rank 16.

    docs/memory.md has the command and the date.
    """

    model: str
    """The name for which `write_model` makes the files."""
    family: str
    sizes: dict[str, int]
    """The height and width of the latents and the tokens of text; only tokens for `causal-lm`."""
    settings: dict[str, Any]
    peak: float
    """The measured peak of GPU memory, GiB."""
    step: int | None
    """The measured time of a step, ms; None if only the peak was measured."""

    def config(self) -> TrainConfig:
        return TrainConfig(device="cuda", precision="bf16", rank=16, **self.settings)

    def adapter(self) -> tc.LoraConfig:
        kind = families.find(self.family)
        return adapter_config(self.config(), kind.targets, kind.formats)


# Model, family, sizes, settings, peak (GiB), time of a step (ms). In the settings, {} is a
# run without checkpointing and without streamed blocks. With `checkpoint_blocks`, full
# checkpointing or offloading is only for so many of the first blocks; the others get selective.
RUNS = [
    Run("SDXL", "sdxl", SDXL, FULL | {"stream_blocks": 17}, 5.13, 73),
    Run("SDXL", "sdxl", SDXL, SELECTIVE | {"stream_blocks": 52}, 6.24, 131),
    Run("SDXL", "sdxl", SDXL, SELECTIVE, 9.21, 52),
    Run("SD3.5-medium", "sd3", SD3, SELECTIVE | MODULATION | {"stream_blocks": 24}, 5.30, 139),
    Run("SD3.5-medium", "sd3", SD3, SELECTIVE | MODULATION | {"stream_blocks": 6}, 7.30, 89),
    Run("Flux.1-dev", "flux", FLUX, OFFLOAD | MODULATION | {"stream_blocks": 49}, 5.30, 785),
    Run("Flux.1-dev", "flux", FLUX, OFFLOAD | MODULATION | {"stream_blocks": 42}, 7.30, 689),
    Run("Flux.1-dev", "flux", FLUX, OFFLOAD | MODULATION | {"stream_blocks": 28}, 11.29, None),
    Run("Flux.1-dev", "flux", FLUX, FULL | MODULATION | {"stream_blocks": 35}, 10.88, 614),
    Run("Flux.1-dev", "flux", FLUX, FULL | MODULATION | {"stream_blocks": 21}, 14.65, 541),
    Run("Flux.1-dev", "flux", FLUX, SELECTIVE | MODULATION | {"stream_blocks": 42}, 20.94, None),
    Run("FLUX.2-klein-4B", "flux2", FLUX, OFFLOAD | {"stream_blocks": 9}, 6.94, 225),
    Run("FLUX.2-klein-4B", "flux2", FLUX, SELECTIVE | {"stream_blocks": 21}, 10.80, 241),
    Run("FLUX.2-klein-4B", "flux2", FLUX, {}, 18.11, 154),
    Run(
        "FLUX.2-klein-4B",
        "flux2",
        FLUX,
        OFFLOAD | {"checkpoint_blocks": 21, "stream_blocks": 12},
        7.01,
        234,
    ),
    Run(
        "FLUX.2-klein-4B",
        "flux2",
        FLUX,
        OFFLOAD | {"checkpoint_blocks": 9, "stream_blocks": 25, "base_precision": "int8"},
        6.59,
        202,
    ),
    Run("Qwen2-1.5B", "causal-lm", ROWS, {"stream_blocks": 14}, 5.00, 52),
    Run("Qwen2-1.5B", "causal-lm", ROWS, {}, 6.05, 32),
    Run("Llama-3-8B", "causal-lm", ROWS, FULL | {"stream_blocks": 32}, 4.30, 512),
    Run("Llama-3-8B", "causal-lm", ROWS, OFFLOAD | {"stream_blocks": 24}, 7.28, 429),
    Run("Llama-3-8B", "causal-lm", ROWS, {"stream_blocks": 28}, 11.16, None),
    Run(
        "Llama-3-8B",
        "causal-lm",
        ROWS,
        OFFLOAD | {"checkpoint_blocks": 20, "stream_blocks": 28, "base_precision": "nf4"},
        4.93,
        183,
    ),
    Run("Z-Image", "zimage", Z_IMAGE, OFFLOAD | {"stream_blocks": 21}, 6.81, 390),
    Run("Z-Image", "zimage", Z_IMAGE, FULL | {"stream_blocks": 12}, 10.52, 340),
    Run("Z-Image", "zimage", Z_IMAGE, SELECTIVE | {"stream_blocks": 8}, 22.33, 254),
]


def facts_of(folder: Path, model: str) -> tc.PartFacts:
    """Return the facts of the part that is trained: the denoiser or the language model."""
    parts = tc.inspect(write_model(folder, model)).parts
    # The only part of a language model has the name "".
    (trained,) = (parts[name] for name in ("unet", "transformer", "") if name in parts)
    return trained
