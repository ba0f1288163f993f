"""Checks of a run's settings before any file is read, such as that each setting has an effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainable_candle.errors import ConfigError, MissingFileError
from trainable_candle.outputs import adapter_in
from trainable_candle.settings.config import GROUPS, group_of, settings
from trainable_candle.settings.setting import flag

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from trainable_candle.settings.config import TrainConfig
    from trainable_candle.settings.setting import Condition, Group


def check_settings(config: TrainConfig) -> None:
    """Check everything that depends on the settings alone.

    Raises:
        ConfigError: a setting has no effect without another one, or a text is not UTF-8.
    """
    _check_effects(config)
    for name, (_, setting) in settings().items():
        if setting.tokenized:
            value: Any = getattr(config, name)
            for text in value if isinstance(value, list) else [value or ""]:
                require_text(flag(name), text)


def check_groups(config: TrainConfig, groups: Collection[type[Group]]) -> None:
    """Check that all given settings belong to groups that the model takes.

    Raises:
        ConfigError: a setting belongs to another group; the message names all of these settings.
    """
    given = [flag(name) for name in config.changed() if group_of(name) not in groups]
    if given:
        verb, them = ("has", "it") if len(given) == 1 else ("have", "them")
        raise ConfigError(
            f"{', '.join(given)}: {verb} no effect on the model `{config.model}`; leave {them} out"
        )


def settings_without_effect(config: TrainConfig) -> list[tuple[Condition, list[str]]]:
    """Return the conditions that do not hold, each with the settings that it makes idle.

    Only settings that differ from their defaults count.
    """
    # Leave out false values of settings whose default is None (undecided): such a value turns
    # something off, which always has an effect.
    changed = {
        name: value
        for name, value in config.changed().items()
        if value or getattr(type(config), name, None) is not None
    }
    found = []
    for condition in (condition for group in GROUPS for condition in group.conditions):
        names = [name for name in condition.settings if name in changed]
        if names and not condition.holds(config):
            found.append((condition, names))
    return found


def _check_effects(config: TrainConfig) -> None:
    idle: dict[str, list[str]] = {}
    for condition, names in settings_without_effect(config):
        if condition.complaint is not None:
            raise ConfigError(condition.complaint)
        idle.setdefault(condition.needed, []).extend(flag(name) for name in names)
    for needed, flags in idle.items():
        verb, them = ("has", "it") if len(flags) == 1 else ("have", "them")
        raise ConfigError(
            f"{', '.join(flags)} {verb} no effect without {needed}; give that, or leave {them} out"
        )


def require_text(name: str, text: str) -> None:
    """Check that a text, perhaps from a command line, is valid UTF-8.

    Raises:
        ConfigError: the text is not UTF-8; the message names the flag.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} is {text!r}, expected text in UTF-8") from None


def existing(setting: str, path: Path) -> Path:
    """Return the path itself, if it exists.

    Raises:
        MissingFileError: the path does not exist; the message names the flag of the setting.
    """
    if not path.exists():
        raise MissingFileError(f"{flag(setting)}: there is no file or folder {path}")
    return path


def existing_adapter(setting: str, path: Path) -> Path:
    """Return the adapter that a path names; for a run's output folder, the finished one.

    Raises:
        MissingFileError: the path does not exist, or is a folder without a finished adapter.
    """
    try:
        return adapter_in(existing(setting, path))
    except MissingFileError as error:
        text = str(error)
        raise MissingFileError(
            text if text.startswith(flag(setting)) else f"{flag(setting)}: {text}"
        ) from None


def differences(earlier: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return the differences between a resumed run and the run that it continues, a line each.

    Settings and facts that do not change the results are not compared.

    Args:
        earlier: settings and facts of the run that wrote the checkpoint, by name.
        now: settings and facts of the resumed run.
    """
    return [
        f"{name} is {value!r}, was {earlier[name]!r}: the run will not repeat the earlier one"
        for name, value in now.items()
        if name in earlier and earlier[name] != value and not _is_free(name, now)
    ]


def _is_free(name: str, values: Mapping[str, object]) -> bool:
    if name not in settings():
        return False
    free = settings()[name][1].free
    return free(values) if callable(free) else free
