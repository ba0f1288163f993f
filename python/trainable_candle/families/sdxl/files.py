"""What can be said of an SDXL checkpoint without reading its weights."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.errors import ConfigError, MissingFileError, WeightsFormatError
from trainable_candle.files import parse_json, sync_folder
from trainable_candle.models import load, save_checkpoint
from trainable_candle.train.headers import TensorFacts, read_folder, read_header, read_metadata
from trainable_candle.train.objective import NoiseSchedule

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainable_candle.models import Model

SUBFOLDERS: Final = ("unet", "vae", "text_encoder", "text_encoder_2")
_PREFIXES: Final = {
    "unet": "model.diffusion_model.",
    "vae": "first_stage_model.",
    "text_encoder": "conditioner.embedders.0.transformer.",
    "text_encoder_2": "conditioner.embedders.1.model.",
}
"""Where an original checkpoint has the parts."""
_OTHERS: Final = {
    "cond_stage_model.transformer.": "Stable Diffusion 1",
    "cond_stage_model.model.": "Stable Diffusion 2",
    "conditioner.embedders.0.model.": "SDXL's refiner",
    "double_blocks.": "Flux",
    "model.diffusion_model.double_blocks.": "Flux",
    "lora_": "an adapter, which goes with --adapter or --initial-adapter",
    "model.diffusion_model.": "a UNet alone; give a checkpoint with autoencoder and text encoders",
    "down_blocks.": "a UNet alone; give the folder of its pipeline",
    "encoder.down_blocks.": "an autoencoder alone; give the folder of its pipeline",
    "text_model.": "a text encoder alone; give the folder of its pipeline",
}
"""What other files' names start with, and what these are; of several, the first counts."""
_ADAPTER_MARKS: Final = {
    "text_encoder_2": ("lora_te2_", "text_encoder_2.", "text_encoders.clip_g."),
    "text_encoder": ("lora_te1_", "text_encoder.", "text_encoders.clip_l."),
}
_WRITTEN_CONFIG: Final = "trainable_candle.config.unet"
"""The entry of a file's header for what the shapes do not tell."""
_LABELS: Final = "label_emb.0.0.weight"
_PUBLISHED_POOLED: Final = 1280
PUBLISHED: Final[Mapping[str, Any]] = {
    "block_out_channels": [320, 640, 1280],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "transformer_layers_per_block": [1, 2, 10],
    "layers_per_block": 2,
    "cross_attention_dim": 2048,
    "projection_class_embeddings_input_dim": 2816,
    "addition_time_embed_dim": 256,
    "in_channels": 4,
    "out_channels": 4,
    "sample_size": 128,
    "use_linear_projection": True,
}


@dataclass(frozen=True)
class Facts:
    """An SDXL checkpoint."""

    config: Mapping[str, Any]
    """Of the UNet; of an original checkpoint, the published one unless it differs in width."""
    parts: Mapping[str, Mapping[str, TensorFacts]]
    """The tensors of each part by name."""
    vae_widths: tuple[int, ...]
    """Channels of the autoencoder's levels."""
    latent_channels: int

    @property
    def factor(self) -> int:
        """Pixels on a side of a latent."""
        return int(2 ** (len(self.vae_widths) - 1))

    @property
    def context(self) -> int:
        """Width of the text's tokens."""
        return int(self.config["cross_attention_dim"])

    @property
    def pooled(self) -> int:
        """Width of the pooled text."""
        sizes = 6 * int(self.config["addition_time_embed_dim"])
        return int(self.config["projection_class_embeddings_input_dim"]) - sizes

    def values(self, *parts: str) -> int:
        """Numbers that parts consist of."""
        return sum(facts.numel for part in parts for facts in self.parts[part].values())


def shipped() -> Path | None:
    """The small checkpoint in the package."""
    folder = Path(str(files("trainable_candle") / "assets" / "sdxl_tiny"))
    return folder if folder.is_dir() else None


def facts(weights: Path) -> Facts:
    """What there is at `weights`, a pipeline's folder or an original checkpoint.

    Raises:
        MissingFileError: there is nothing, or a part is missing.
        WeightsFormatError: it is damaged, or another model.
    """
    weights = weights.resolve()
    if not weights.exists():
        raise MissingFileError(f"weights: there is no file or folder {weights}")
    return _in_folder(weights) if weights.is_dir() else _in_file(weights)


@lru_cache(maxsize=1)
def _in_folder(folder: Path) -> Facts:
    missing = [name for name in SUBFOLDERS if not (folder / name).is_dir()]
    if missing:
        part = _read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
        alone = f" (it holds a {part['_class_name']} alone)" if "_class_name" in part else ""
        raise MissingFileError(
            f"weights: {folder} is no SDXL model{alone}: it has no folder {', '.join(missing)}; "
            "expected the folder of a diffusers pipeline, or a single .safetensors file"
        )
    config = _read_json(folder / "unet" / "config.json")
    if config.get("addition_embed_type") != "text_time":
        found = config.get("_class_name", "another model")
        raise WeightsFormatError(
            f"weights: {folder / 'unet'} is no SDXL UNet ({found} without sizes and pooled text)"
        )
    vae = _read_json(folder / "vae" / "config.json")
    parts = {name: read_folder(folder / name) for name in SUBFOLDERS}
    widths = tuple(map(int, vae.get("block_out_channels", (128, 256, 512, 512))))
    return Facts({**PUBLISHED, **config}, parts, widths, int(vae.get("latent_channels", 4)))


@lru_cache(maxsize=1)
def _in_file(path: Path) -> Facts:
    tensors = read_header(path)
    parts = {
        part: {
            name.removeprefix(prefix): facts
            for name, facts in tensors.items()
            if name.startswith(prefix)
        }
        for part, prefix in _PREFIXES.items()
    }
    missing = [part for part, found in parts.items() if not found]
    if missing or _LABELS not in parts["unet"]:
        lacking = " and no ".join(missing) or _LABELS
        known = (
            what for start, what in _OTHERS.items() if any(n.startswith(start) for n in tensors)
        )
        found = next(known, None)
        raise WeightsFormatError(
            f"weights: {path} is no SDXL checkpoint: it has no {lacking}"
            + (f"; it looks like {found}" if found else "")
        )
    pooled = parts["text_encoder_2"].get("text_projection")
    try:
        written = read_metadata(path).get(_WRITTEN_CONFIG)
        if written is not None:
            return Facts({**PUBLISHED, **parse_json(written)}, parts, *_vae_of(parts["vae"]))
        config = _deduced(parts["unet"], pooled.shape[1] if pooled else _PUBLISHED_POOLED)
        return Facts(config, parts, *_vae_of(parts["vae"]))
    except (LookupError, ValueError, TypeError, ArithmeticError):
        raise WeightsFormatError(
            f"weights: {path} has SDXL's names, but not its blocks, so that one file does not tell "
            "its configuration; give the folder of its pipeline (`merge` writes one unless "
            "--output ends in .safetensors)"
        ) from None


def _deduced(unet: Mapping[str, TensorFacts], pooled: int) -> Mapping[str, Any]:
    """The published configuration, with the sizes of an original checkpoint where they differ."""
    first = unet["input_blocks.0.0.weight"].shape[0]
    widths, depths = [first], [_depth(unet, "input_blocks.1.1")]
    for number in (4, 7):
        widths.append(unet[f"input_blocks.{number}.0.out_layers.3.weight"].shape[0])
        depths.append(_depth(unet, f"input_blocks.{number}.1"))
    keys = [name for name in unet if name.endswith("attn2.to_k.weight")]
    return {
        **PUBLISHED,
        "block_out_channels": widths,
        "transformer_layers_per_block": [max(1, depth) for depth in depths],
        "cross_attention_dim": unet[keys[0]].shape[1],
        "projection_class_embeddings_input_dim": unet[_LABELS].shape[1],
        "addition_time_embed_dim": (unet[_LABELS].shape[1] - pooled) // 6,
    }


def _depth(unet: Mapping[str, TensorFacts], name: str) -> int:
    end = "attn1.to_q.weight"
    return sum(key.startswith(f"{name}.transformer_blocks.") and key.endswith(end) for key in unet)


def _vae_of(vae: Mapping[str, TensorFacts]) -> tuple[tuple[int, ...], int]:
    levels = {int(name.split(".")[2]) for name in vae if name.startswith("encoder.down.")}
    widths = tuple(
        vae[f"encoder.down.{level}.block.0.conv2.weight"].shape[0] for level in sorted(levels)
    )
    return widths, vae["decoder.conv_in.weight"].shape[1]


def resolution(weights: Path) -> int:
    """The side of the pictures that the model was made for, px.

    Raises:
        MissingFileError, WeightsFormatError: as `facts`.
    """
    found = facts(weights)
    return int(found.config["sample_size"]) * found.factor


def schedule(weights: Path, prediction_type: str | None) -> NoiseSchedule:
    """The noise that the model was trained with, and what it predicts.

    Args:
        weights: a pipeline's folder, whose scheduler says it; an original checkpoint says that it
            predicts velocities by a tensor `v_pred`, and that its last timestep is noise alone by
            `ztsnr`, as ComfyUI reads them.
        prediction_type: overrules it.

    Raises:
        ConfigError: the scheduler's configuration is wrong.
    """
    if weights.is_dir():
        has_scheduler = (weights / "scheduler" / "scheduler_config.json").is_file()
        found = NoiseSchedule.from_pretrained(weights) if has_scheduler else NoiseSchedule()
        if prediction_type in {None, found.prediction_type}:
            return found
        return NoiseSchedule(
            prediction_type=prediction_type or found.prediction_type,
            rescale_betas_zero_snr=found.rescale_betas_zero_snr,
            timestep_spacing=found.timestep_spacing,
        )
    names = read_header(weights).keys()
    velocity = "v_prediction" if "v_pred" in names else "epsilon"
    return NoiseSchedule(
        prediction_type=prediction_type or velocity, rescale_betas_zero_snr="ztsnr" in names
    )


def adapted_parts(path: Path) -> list[str]:
    """The parts of the model that an adapter file is for, whatever its names' style.

    Raises:
        MissingFileError, WeightsFormatError: it is missing or damaged.
    """
    found = set()
    for name in read_header(path):
        marks = [part for part, starts in _ADAPTER_MARKS.items() if name.startswith(starts)]
        found.add(marks[0] if marks else "unet")
    return [part for part in SUBFOLDERS if part in found]


def save_merged_file(weights: Path, models: Mapping[str, Model], output: Path) -> None:
    """Write one file under the original names, all but `models` as it is in `weights`.

    Raises:
        ConfigError: the file exists.
        OSError: it cannot be written.
    """
    if output.exists():
        raise ConfigError(f"--output is {output}, which exists; expected a new file")
    if weights.is_dir():
        others = {name: load(weights, subfolder=name) for name in SUBFOLDERS if name not in models}
        save_checkpoint(output, {**models, **others})
    else:
        save_checkpoint(output, dict(models), base=weights)


def save_merged_folder(weights: Path, models: Mapping[str, Model], output: Path) -> None:
    """Write a pipeline's folder, all but `models` as it is in `weights`.

    Raises:
        ConfigError: the folder exists and holds something.
        OSError: it cannot be written.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output is {output}, which exists; expected a new or an empty folder")
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    names = {path.name for path in weights.iterdir()} & {
        *SUBFOLDERS, "tokenizer", "tokenizer_2", "scheduler", "model_index.json"
    }  # fmt: skip
    partial.mkdir(parents=True)
    for name in sorted(names - models.keys()):
        if (weights / name).is_dir():
            shutil.copytree(weights / name, partial / name)
        else:
            shutil.copy2(weights / name, partial / name)
    for name, model in models.items():
        model.save_pretrained(partial / name)
    if output.exists():
        output.rmdir()
    partial.rename(output)
    sync_folder(output.parent)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MissingFileError(f"weights: there is no file {path}") from None
    except (OSError, ValueError) as error:
        raise WeightsFormatError(f"weights: {path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise WeightsFormatError(f"weights: {path} holds no JSON object")
    return values
