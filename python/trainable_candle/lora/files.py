"""LoRA files in any naming style: reading, combining, reducing ranks, writing."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import trainable_candle as tc
from trainable_candle.errors import ArgumentError, WeightsFormatError
from trainable_candle.files import safetensors_metadata
from trainable_candle.lora.factors import Factors, joined, truncate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_PAIRS: Final = (
    (".lora_down.weight", ".lora_up.weight"),
    (".lora_A.weight", ".lora_B.weight"),
    (".lora_A.default.weight", ".lora_B.default.weight"),
    (".lora.down.weight", ".lora.up.weight"),
    ("_lora.down.weight", "_lora.up.weight"),
)
"""The endings of the names of the factors `down` and `up` of the same layer (the change of the
weight is up · down), in files of kohya, peft and old diffusers."""
_STARTS: Final = (
    "transformer.", "unet.", "diffusion_model.", "base_model.model.", "lora_unet_",
    "lora_transformer_", "lycoris_",
)  # fmt: skip
"""The starts of the names of a denoiser's layers in the styles of different tools."""
_OF_TEXTS: Final = ("text_encoder", "lora_te")
"""The starts of the names of text encoders' layers."""
_QUERIES: Final = re.compile(r"(?:attn|attention)\d?([._]qkv|[._]to_q)$")
"""Finds the names of query projections: fused with those of keys and values, or separate."""
_ALPHA: Final = ".alpha"
"""The ending of the name of a layer's alpha."""
_CONFIGURATION: Final = "lora_adapter_metadata"
"""The entry of the metadata in which diffusers stores the settings of LoRAs, as JSON."""
_HASHES: Final = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256")
"""The entries of the metadata with hashes of the file's tensors."""


@dataclass(frozen=True)
class _Module:
    """The LoRA of one adapted layer in a file."""

    factors: Factors
    """The factors as matrices; `up` includes the scale."""
    ends: tuple[str, str]
    """The endings of the names of `down` and `up`, one of `_PAIRS`."""
    down_shape: tuple[int, ...]
    """The shape of `down` in the file that was read."""
    up_shape: tuple[int, ...]
    """The shape of `up` in the file that was read."""
    has_alpha: bool
    """Whether the file has a tensor `.alpha` other than 0 for the layer. If so, `write` writes one,
    too."""


@dataclass(frozen=True)
class LoraFile:
    """The LoRAs of a file by the names of their layers, and the file's metadata."""

    modules: Mapping[str, _Module]
    metadata: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> LoraFile:
        """Read a file with kohya's, ComfyUI's, peft's or diffusers' names of tensors.

        Raises:
            MissingFileError: there is no such file.
            WeightsFormatError: the path is a folder; or the file is damaged, has no LoRA, has
                factors whose ranks differ, or has tensors that are not factors of a LoRA.
        """
        if path.is_dir():
            raise WeightsFormatError(
                f"{path}: is a folder, expected the .safetensors file of a LoRA"
            )
        tensors = tc.load_file(path)
        metadata = safetensors_metadata(path)
        config = _configuration(metadata)
        modules: dict[str, _Module] = {}
        used: set[str] = set()
        for key in tensors:
            for down_end, up_end in _PAIRS:
                name = key.removesuffix(down_end)
                if name == key or name + up_end not in tensors:
                    continue
                names = (key, name + up_end, name + _ALPHA)
                used |= {*names} & tensors.keys()
                down, up = (tensors[factor].to("f32").numpy() for factor in names[:2])
                alpha = tensors[names[2]].item() if names[2] in tensors else None
                if down.ndim < 2 or up.shape[1:2] != down.shape[:1]:
                    raise WeightsFormatError(
                        f"{path}: {name} has factors of shapes {up.shape} and {down.shape}, "
                        "which have no rank in common"
                    )
                rank = down.shape[0]
                scale = _scale(alpha, rank, name, config)
                factors = Factors(up.reshape(up.shape[0], rank), down.reshape(rank, -1))
                modules[name] = _Module(
                    factors.scaled(scale), (down_end, up_end), down.shape, up.shape, bool(alpha)
                )
        others = sorted(tensors.keys() - used)
        if others:
            raise WeightsFormatError(
                f"{path}: {others[0]} is not a factor of a LoRA ({len(others)} such tensors); "
                "DoRA, LoHa, LoKr and OFT cannot be combined or resized: give a file with them to "
                "`trainable-candle merge`, which adds them to a model"
            )
        if not modules:
            raise WeightsFormatError(f"{path}: the file has no tensors, expected those of a LoRA")
        return cls(modules, metadata)

    def changed(self, change: Callable[[Factors], Factors]) -> LoraFile:
        """Return the file with `change` applied to the factors of every module."""
        modules = {
            name: replace(module, factors=change(module.factors))
            for name, module in self.modules.items()
        }
        return LoraFile(modules, self.metadata)

    def write(self, path: Path, dtype: str = "f32", **facts: str) -> None:
        """Write the file atomically.

        Each alpha in the file equals the rank of its factors, because `up` includes the scale.

        Args:
            path: the file to write.
            dtype: the dtype of the factors in the file.
            **facts: entries that are added to the metadata, or replace entries that were read.

        Raises:
            FileError: the file cannot be written.
        """
        tensors = {}
        ranks = {module.factors.rank for module in self.modules.values()}
        for name, module in self.modules.items():
            factors, (down_end, up_end) = module.factors, module.ends
            rank = factors.rank
            down = factors.down.reshape(rank, *module.down_shape[1:])
            up = factors.up.reshape(module.up_shape[0], rank, *module.up_shape[2:])
            tensors[name + down_end] = tc.tensor(down).to(dtype)
            tensors[name + up_end] = tc.tensor(up).to(dtype)
            if module.has_alpha:
                tensors[name + _ALPHA] = tc.tensor(float(rank))
        # The configuration (with its alphas) and the hashes describe the tensors that were read,
        # not the tensors to write.
        outdated = {_CONFIGURATION, *_HASHES}
        metadata = {name: text for name, text in self.metadata.items() if name not in outdated}
        if "ss_network_dim" in metadata:
            # "Dynamic" is what kohya's script for resizing writes for ranks that differ.
            rank_text = str(max(ranks)) if len(ranks) == 1 else "Dynamic"
            metadata |= {"ss_network_dim": rank_text, "ss_network_alpha": rank_text}
        tc.save_file(tensors, path, metadata={**metadata, **facts})


def resize(file: LoraFile, rank: int, keep: float = 1.0) -> LoraFile:
    """Return the file with each LoRA replaced by the nearest LoRA of at most rank `rank`.

    Args:
        file: the file.
        rank: the highest rank, at least 1.
        keep: see `truncate`.

    Raises:
        NonFiniteError: a value is not a finite number.
    """
    return file.changed(lambda factors: truncate(factors, min(rank, factors.rank), keep))


def combine(files: Sequence[LoraFile], scales: Sequence[float]) -> LoraFile:
    """Return one file that has exactly the summed effect of several.

    The rank of a layer's LoRA is the sum of its ranks in all files. The metadata is that of the
    first file.

    Args:
        files: at least one file, all in the same naming style.
        scales: for each file, a number that multiplies its effect.

    Raises:
        ArgumentError: the files have names of different styles, or a layer has different sizes.
    """
    modules: dict[str, _Module] = {}
    endings = {next(iter(file.modules.values())).ends[0] for file in files}
    # A layer that has different names in two files would be in the result twice. So the files must
    # agree in the endings, in the starts and in how they name the query projections.
    names = [name for file in files for name in file.modules]
    starts = {start for name in names if (start := _start(name))}
    queries = {kind.strip("._") for name in names for kind in _QUERIES.findall(name)}
    for styles in (endings, starts, queries):
        if len(styles) > 1:
            raise ArgumentError(
                f"combine: the files have names of different styles ({', '.join(sorted(styles))}); "
                "give them to `trainable-candle sample` or `merge`, each with its own --adapter"
            )
    for file, scale in zip(files, scales, strict=True):
        for name, module in file.modules.items():
            scaled = replace(module, factors=module.factors.scaled(scale))
            known = modules.get(name)
            if known is None:
                modules[name] = scaled
                continue
            sizes = [(m.up_shape[0], m.down_shape[1:]) for m in (known, scaled)]
            if sizes[0] != sizes[1]:
                raise ArgumentError(
                    f"combine: {name} has sizes {sizes[0]} and {sizes[1]}; the files are for "
                    "different models"
                )
            modules[name] = replace(known, factors=joined([known.factors, scaled.factors]))
    return LoraFile(modules, files[0].metadata)


def _start(name: str) -> str | None:
    """Return the start of a layer's name that shows its style, or "no prefix".

    None for a layer of a text encoder: its name does not show how the denoiser's layers are named.
    """
    if name.startswith(_OF_TEXTS):
        return None
    return next((start for start in _STARTS if name.startswith(start)), "no prefix")


def _configuration(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return diffusers' settings of LoRAs; empty if the metadata has none that can be read."""
    try:
        config = json.loads(metadata.get(_CONFIGURATION, "{}"))
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def _scale(alpha: float | None, rank: int, name: str, config: Mapping[str, Any]) -> float:
    """Return the scale of a layer's LoRA: from `alpha`, or else from `config`, or else 1.

    Args:
        alpha: the tensor `.alpha` of the layer; None if the file has none.
        rank: the rank of the LoRA.
        name: the layer's name in the file.
        config: diffusers' settings. Their names start with the part of the pipeline, such as
            `unet.r` (the rank, which every part with settings has), or have no prefix.
    """
    if alpha is not None:
        return float(alpha) / rank
    part, _, layer = name.partition(".")
    prefix = f"{part}." if f"{part}.r" in config else ""
    layer = layer if prefix else name
    patterns = config.get(f"{prefix}alpha_pattern") or {}
    fitting = [value for key, value in patterns.items() if f".{layer}".endswith(f".{key}")]
    alpha = fitting[0] if fitting else config.get(f"{prefix}lora_alpha")
    if alpha is None:
        return 1.0
    rslora = config.get(f"{prefix}use_rslora", False)
    return float(alpha) / (rank**0.5 if rslora else rank)
