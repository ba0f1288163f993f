"""All settings of a training run together: a flat configuration, checked, read from YAML."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final, get_args, get_type_hints

import yaml

from trainable_candle.errors import ConfigError
from trainable_candle.settings.adapter import Adapter, ClipSkip, TextEncoders, TrainingAdapters
from trainable_candle.settings.data import Captions, Data, DefaultCaption, Images, Parts, Unusable
from trainable_candle.settings.files import Files
from trainable_candle.settings.machine import Machine
from trainable_candle.settings.objective import (
    DistilledGuidance,
    Loss,
    NoiseLevels,
    NoisePrediction,
    ResolutionShift,
)
from trainable_candle.settings.previews import Denoising, Drawing, Previews, Validation
from trainable_candle.settings.reading import read_yaml
from trainable_candle.settings.setting import Group, Setting, checked, flag, nearest
from trainable_candle.settings.texts import Texts, Writing
from trainable_candle.settings.training import Training

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

GROUPS: Final[tuple[type[Group], ...]] = (
    Data, Parts, Unusable, Images, DefaultCaption, Captions, Texts, Adapter, TrainingAdapters,
    TextEncoders, Training, NoisePrediction, Loss, NoiseLevels, ResolutionShift,
    DistilledGuidance, ClipSkip, Validation, Previews, Denoising, Drawing, Writing, Machine, Files,
)  # fmt: skip
"""Every group of settings, in the order of the help and of files."""
IMAGE_GROUPS: Final = tuple(group for group in GROUPS if group not in {Texts, Writing})
"""Those that mean something to models of images."""


# Python orders the fields of bases from the last one to the first.
@dataclass(frozen=True)
class TrainConfig(
    Files, Machine, Writing, Drawing, Denoising, Previews, Validation, ClipSkip, DistilledGuidance,
    ResolutionShift, NoiseLevels, Loss, NoisePrediction, Training, TextEncoders, TrainingAdapters,
    Adapter, Texts, Captions, DefaultCaption, Images, Unusable, Parts, Data,
):  # fmt: skip
    """Every setting of a training run.

    Raises:
        ConfigError: a value has the wrong type or lies outside its range.
    """

    def __post_init__(self) -> None:
        """Check every value."""
        for name, (hint, setting) in settings().items():
            object.__setattr__(self, name, checked(name, getattr(self, name), hint, setting))
        for group in GROUPS:
            for contradiction in group.contradictions:
                complaint = contradiction(self)
                if complaint is not None:
                    raise ConfigError(complaint)

    def require(self, *names: str) -> None:
        """Check that settings without a default were given.

        Raises:
            ConfigError: naming what is missing and how to give it.
        """
        missing = [name for name in names if not getattr(self, name)]
        if missing:
            flags = " ".join(flag(name) for name in missing)
            raise ConfigError(
                f"missing settings: {', '.join(missing)}; "
                f"give {flags}, or set them in the file of --config"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "configuration") -> TrainConfig:
        """Settings by name.

        Raises:
            ConfigError: a name is unknown (the nearest one is suggested), or a value is wrong.
        """
        for key in values:
            if key not in settings():
                hint = nearest(str(key).replace("-", "_"), settings())
                raise ConfigError(f"{source}: unknown setting `{key}`{hint}")
        try:
            return cls(**values)
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @classmethod
    def from_yaml(cls, path: str | bytes | Path) -> TrainConfig:
        """Settings from a YAML file of `name: value` lines.

        Raises:
            MissingFileError: there is no such file.
            ConfigError: the file cannot be read or is no YAML, a name is unknown, a value is wrong.
        """
        return cls.from_mapping(read_yaml(path), os.fsdecode(path))

    def to_yaml(self) -> str:
        """The settings as YAML that `from_yaml` reads back to an equal configuration."""
        return yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True)

    def with_(self, **changes: Any) -> TrainConfig:
        """A copy with other values.

        Raises:
            ConfigError: as for the class.
        """
        return replace(self, **changes)

    def changed(self) -> dict[str, Any]:
        """The settings that differ from their defaults, by name."""
        default = asdict(TrainConfig())
        return {name: value for name, value in asdict(self).items() if value != default[name]}


@cache
def settings() -> dict[str, tuple[Any, Setting]]:
    """The type and the facts of every setting of `TrainConfig`, by name."""
    hints = get_type_hints(TrainConfig, include_extras=True)
    return {item.name: get_args(hints[item.name]) for item in fields(TrainConfig)}


@cache
def group_of(name: str) -> type[Group]:
    """The group that a setting belongs to."""
    return next(group for group in GROUPS if name in group.__annotations__)
