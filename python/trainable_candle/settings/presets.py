"""Presets: values for the settings that decide how long a run takes and what it can learn."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from trainable_candle.errors import ConfigError
from trainable_candle.settings.setting import nearest

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

PRESET: Final = "preset"
"""The name of the flag, or of the line in a YAML file, that selects a preset."""

IMAGES: Final[Mapping[str, Mapping[str, Any]]] = {
    "fast": {"rank": 8, "steps": 500, "batch_size": 1, "lr_scheduler": "constant"},
    "balanced": {
        "rank": 16,
        "steps": 1500,
        "batch_size": 2,
        "lr_scheduler": "cosine",
        "warmup_steps": 50,
    },
    "quality": {
        "rank": 32,
        "steps": 3000,
        "batch_size": 4,
        "lr_scheduler": "cosine",
        "warmup_steps": 100,
        "caption_dropout": 0.05,
        "ema_decay": 0.99,
    },
}
"""The presets of image models: settings by the name of the preset."""
TEXTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "fast": {"rank": 8, "epochs": 1, "batch_size": 1, "sequence_length": 1024},
    "balanced": {
        "rank": 16,
        "epochs": 2,
        "batch_size": 2,
        "lr_scheduler": "cosine",
    },
    "quality": {
        "rank": 64,
        "epochs": 3,
        "batch_size": 2,
        "gradient_accumulation": 4,
        "lr_scheduler": "cosine",
        "lora_dropout": 0.05,
    },
}
"""The presets of language models: settings by the name of the preset."""
NAMES: Final = tuple(IMAGES)
"""The names of the presets; `IMAGES` and `TEXTS` have the same."""
LENGTHS: Final = frozenset({"steps", "epochs"})
"""The settings that say how long a run takes; at most one of them may be given."""


def completed(
    values: Mapping[str, Any], name: str, presets: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the given settings, and the preset's values for the settings that are not given.

    Args:
        values: the given settings.
        name: the name of the preset.
        presets: settings by the name of the preset.

    Raises:
        ConfigError: there is no such preset, or `values` leave no setting of the preset open.
    """
    # From a YAML file, `name` may have any type.
    if str(name) not in presets:
        raise ConfigError(f"preset: `{name}` is not known{nearest(str(name), presets)}")
    # If `steps` or `epochs` is given, neither comes from the preset.
    decided = values.keys() | (LENGTHS if LENGTHS & values.keys() else set())
    missing = {key: value for key, value in presets[name].items() if key not in decided}
    if not missing:
        raise ConfigError(
            f"preset: `{name}` has no effect: all of its settings are given; leave it out"
        )
    return {**missing, **values}


def described(
    presets: Mapping[str, Mapping[str, Any]], names: Collection[str] = NAMES
) -> list[str]:
    """Return a line for each preset in `names`, for the help."""
    return [
        f"  {name:<9} " + ", ".join(f"{key} {value}" for key, value in presets[name].items())
        for name in names
    ]
