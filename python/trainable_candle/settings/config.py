"""All settings of a training run in one flat configuration, which checks them and reads YAML."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args, get_type_hints

import yaml

from trainable_candle.errors import ConfigError
from trainable_candle.hub import is_name
from trainable_candle.settings.adapter import (
    Adapter,
    ClipSkip,
    LearnedScales,
    TextEncoders,
    TrainingAdapters,
)
from trainable_candle.settings.data import Captions, Data, DefaultCaption, Images, Parts, Unusable
from trainable_candle.settings.files import Files
from trainable_candle.settings.foreign import instead
from trainable_candle.settings.machine import Machine
from trainable_candle.settings.objective import (
    DistilledGuidance,
    Flow,
    Loss,
    NoiseLevels,
    NoisePrediction,
)
from trainable_candle.settings.paths import paths_for_file, paths_from_file
from trainable_candle.settings.presets import PRESET
from trainable_candle.settings.previews import Denoising, Drawing, Previews, Validation
from trainable_candle.settings.reading import read_yaml
from trainable_candle.settings.setting import Group, Setting, checked, flag, nearest
from trainable_candle.settings.several import Several
from trainable_candle.settings.texts import Texts, Writing
from trainable_candle.settings.training import Training

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUPS: Final[tuple[type[Group], ...]] = (
    Data, Parts, Unusable, Images, DefaultCaption, Captions, Texts, Adapter, LearnedScales,
    TrainingAdapters, TextEncoders, Training, NoisePrediction, Loss, NoiseLevels, Flow,
    DistilledGuidance, ClipSkip, Validation, Previews, Denoising, Drawing, Writing,
    Machine, Several, Files,
)  # fmt: skip
"""Every group of settings, in the order of the settings in `--help` and in YAML files."""
IMAGE_GROUPS: Final = tuple(
    group for group in GROUPS if group not in {Texts, LearnedScales, Writing}
)
"""The groups that are not for language models alone. Each family of image models takes some."""


# The bases are `GROUPS` in reverse: a dataclass has the fields of its last base first.
@dataclass(frozen=True)
class TrainConfig(
    Files, Several, Machine, Writing, Drawing, Denoising, Previews, Validation, ClipSkip,
    DistilledGuidance, Flow, NoiseLevels, Loss, NoisePrediction, Training, TextEncoders,
    TrainingAdapters, LearnedScales,
    Adapter, Texts, Captions, DefaultCaption, Images, Unusable, Parts, Data,
):  # fmt: skip
    """Every setting of a training run.

    ```python
    config = tc.train.TrainConfig(model="digits", dataset="images", output="run", steps=300)
    faster = config.with_(batch_size=8, learning_rate=2e-4)
    ```

    Raises:
        ConfigError: a value has the wrong type or is outside its range, or two settings contradict
            each other.
    """

    def __post_init__(self) -> None:
        """Convert and check every value, and check that no settings contradict each other."""
        for name, (hint, setting) in settings().items():
            object.__setattr__(self, name, checked(name, getattr(self, name), hint, setting))
        for group in GROUPS:
            # Each function returns the error message if settings contradict each other, else None.
            for contradiction in group.contradictions:
                complaint = contradiction(self)
                if complaint is not None:
                    raise ConfigError(complaint)

    def require(self, *names: str) -> None:
        """Check that the settings with these names are given: that no value is empty.

        Raises:
            ConfigError: settings are missing; the message says which, and how to give them.
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
        """Make a configuration from values by the names of settings.

        Args:
            values: the values; names that other tools use are accepted, too.
            source: where the values come from; messages begin with it.

        Raises:
            ConfigError: a name is unknown (the message suggests what to give), two names mean one
                setting, a value is wrong, or two settings contradict each other.
            TypeError: `values` is not a mapping.
        """
        if not isinstance(values, Mapping):
            raise TypeError(
                f"from_mapping: values is {type(values).__name__}, expected a mapping from names "
                "to values"
            )
        try:
            return cls(**canonical(values))
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from None

    @classmethod
    def from_yaml(cls, path: str | bytes | Path) -> TrainConfig:
        """Make a configuration from a YAML file of `name: value` lines.

        Paths in the file are relative to the file's folder.

        Raises:
            MissingFileError: there is no such file.
            ConfigError: the file cannot be read, is not YAML or has a line `preset`, which only the
                command line accepts; or one of the reasons of `from_mapping`.
        """
        return cls.from_mapping(read_settings(path), os.fsdecode(path))

    def to_yaml(self, folder: Path | None = None) -> str:
        """Return the settings as YAML that `from_yaml` reads back.

        Args:
            folder: the folder of the YAML file; paths become relative to it. None keeps the paths.
        """
        values = asdict(self) if folder is None else self.portable(folder)
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)

    def portable(self, folder: Path) -> dict[str, Any]:
        """Return the settings by name, with paths relative to a folder.

        The folder and the files that the paths name can then move together.
        """
        values = asdict(self)
        for name in _paths():
            values[name] = paths_for_file(name, values[name], folder)
        return values

    def located(self) -> TrainConfig:
        """Return a copy whose paths are absolute, for a process with another current folder.

        Names of models and data sets on the hub are kept.
        """
        here, values = Path.cwd(), asdict(self)
        absolute = {name: paths_from_file(name, values[name], here) for name in _paths()}
        may_be_on_hub = {"weights", "dataset"}
        return self.with_(
            **{
                name: value
                for name, value in absolute.items()
                if not (name in may_be_on_hub and values[name] and is_name(values[name]))
            }
        )

    def with_(self, **changes: Any) -> TrainConfig:
        """Return a copy with other values for some settings.

        Raises:
            ConfigError: a name is unknown, a value has the wrong type or is outside its range, or
                two settings contradict each other.
        """
        for name in changes:
            if name not in settings():
                raise ConfigError(f"unknown setting `{name}`{nearest(name, settings())}")
        return replace(self, **changes)

    def changed(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults, by name."""
        default = asdict(TrainConfig())
        return {name: value for name, value in asdict(self).items() if value != default[name]}


def read_settings(path: str | bytes | Path) -> dict[str, Any]:
    """Return the settings in a YAML file by name, unchecked.

    The file's relative paths become relative to the current folder, or absolute if `path` is. A
    line `preset` is returned as it is; `families.presets` has the values of presets.

    Raises:
        MissingFileError: there is no such file.
        ConfigError: the file cannot be read or is not YAML, a name is unknown, or two names mean
            one setting.
    """
    file = Path(os.fsdecode(path)).expanduser()
    lines = read_yaml(file)
    preset = {PRESET: lines.pop(PRESET)} if PRESET in lines else {}
    try:
        values = {**canonical(lines), **preset}
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    for name in _paths():
        if name in values:
            values[name] = paths_from_file(name, values[name], file.parent)
    return values


def canonical(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by the settings' own names, which replace synonyms and nested mappings.

    Raises:
        ConfigError: a name is unknown (if it is another tool's, the message says what to do), or
            two names mean one setting.
    """
    found: dict[str, Any] = {}
    keys: dict[str, str] = {}  # the settings' own names -> the names in `values`
    for key, value in _flat(values):
        text = key.replace("-", "_")
        name = _synonyms().get(text, text)
        if name not in settings():
            advice = instead(text)  # if it is another tool's name, what to do
            if advice is not None:
                raise ConfigError(f"`{key}` {advice}")
            raise ConfigError(f"unknown setting `{key}`{nearest(text, settings())}")
        if name in found:
            # Of the two keys for this setting, one that is not the setting's own name.
            synonym = keys[name] if key == name else key
            raise ConfigError(f"`{synonym}` is another name of `{name}`, which is given too")
        found[name], keys[name] = value, key
    return found


def _flat(values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names and values in nested mappings; names are joined by dots: `network.linear`."""
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{name}.")
        else:
            yield name, value


@cache
def _synonyms() -> dict[str, str]:
    """Return the settings' own names by their synonyms, which have underscores, not hyphens."""
    return {
        synonym.replace("-", "_"): name
        for name, (_, setting) in settings().items()
        for synonym in setting.synonyms
    }


@cache
def _paths() -> tuple[str, ...]:
    """Return the names of the settings that may have paths as values."""
    # `paths_from_file` and `paths_for_file` change only those sample prompts that name a file.
    return (*(name for name, (_, s) in settings().items() if s.path), "sample_prompts")


@cache
def settings() -> dict[str, tuple[Any, Setting]]:
    """Return the type and the `Setting` of every setting of `TrainConfig`, by name."""
    hints = get_type_hints(TrainConfig, include_extras=True)
    # The arguments of `Annotated[str, Setting(...)]` are the type and the `Setting`.
    return {item.name: get_args(hints[item.name]) for item in fields(TrainConfig)}


@cache
def group_of(name: str) -> type[Group]:
    """Return the group that a setting belongs to."""
    return next(group for group in GROUPS if name in group.__annotations__)
