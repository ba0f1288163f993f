"""Checks of a run's settings: their effects, their paths, and differences from an earlier run."""

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
    """Check that each setting has an effect, and that texts for a tokenizer are UTF-8.

    Raises:
        ConfigError: a setting has no effect with the other settings, or a text is not UTF-8.
    """
    _check_effects(config)
    for name, (_, setting) in settings().items():
        if setting.tokenized:
            value: Any = getattr(config, name)
            for text in value if isinstance(value, list) else [value or ""]:
                require_text(flag(name), text)


def check_groups(config: TrainConfig, groups: Collection[type[Group]]) -> None:
    """Check that the settings that differ from their defaults belong to groups of the model.

    Args:
        config: the settings.
        groups: the groups that the model takes.

    Raises:
        ConfigError: settings belong to other groups; the message names all of these settings.
    """
    flags = [flag(name) for name in config.changed() if group_of(name) not in groups]
    if flags:
        verb, them = ("has", "it") if len(flags) == 1 else ("have", "them")
        raise ConfigError(
            f"{', '.join(flags)}: {verb} no effect on the model `{config.model}`; leave {them} out"
        )


def settings_without_effect(config: TrainConfig) -> list[tuple[Condition, list[str]]]:
    """Return the conditions that do not hold, with the settings that therefore have no effect.

    Settings that have their default values do not count. A condition that is only about such
    settings is left out.
    """
    # Leave out False, 0 and empty values of settings whose default is None (undecided): such a
    # value turns something off, which always has an effect.
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
    """Raise the error for the settings without effect, if there are any."""
    flags_by_needed: dict[str, list[str]] = {}
    for condition, names in settings_without_effect(config):
        # The condition's own message, if "... has no effect without ..." does not fit.
        if condition.complaint is not None:
            raise ConfigError(condition.complaint)
        flags_by_needed.setdefault(condition.needed, []).extend(flag(name) for name in names)
    for needed, flags in flags_by_needed.items():
        verb, them = ("has", "it") if len(flags) == 1 else ("have", "them")
        raise ConfigError(
            f"{', '.join(flags)} {verb} no effect without {needed}; give that, or leave {them} out"
        )


def require_text(name: str, text: str) -> None:
    """Check that a text is valid UTF-8, which a text from a command line may not be.

    Raises:
        ConfigError: the text is not UTF-8; the message begins with `name`, such as a flag.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} is {text!r}, expected text in UTF-8") from None


def existing(setting: str, path: Path) -> Path:
    """Return the path itself if it exists.

    Raises:
        MissingFileError: the path does not exist; the message names the flag of the setting.
    """
    if not path.exists():
        raise MissingFileError(f"{flag(setting)}: there is no file or folder {path}")
    return path


def existing_adapter(setting: str, path: Path) -> Path:
    """Return the path of an adapter; for a run's output folder, that of its finished adapter.

    Raises:
        MissingFileError: the path does not exist, or is a folder without a finished adapter; the
            message names the flag of the setting.
    """
    path = existing(setting, path)
    try:
        return adapter_in(path)
    except MissingFileError as error:
        raise MissingFileError(f"{flag(setting)}: {error}") from None


def differences(earlier: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    """Return the differences between a resumed run and the run that it continues, a line each.

    Settings that do not change the results are not compared, nor are names that only one run has.

    Args:
        earlier: settings of the run that wrote the checkpoint and facts about its data, by name.
        now: settings and facts of the resumed run.
    """
    return [
        f"{name} is {value!r}, was {earlier[name]!r}: the run will not repeat the earlier one"
        for name, value in now.items()
        if name in earlier and earlier[name] != value and not _is_free(name, now)
    ]


def _is_free(name: str, values: Mapping[str, object]) -> bool:
    """Return whether a name is that of a setting that does not change the results."""
    if name not in settings():
        return False
    _, setting = settings()[name]
    return setting.free(values) if callable(setting.free) else setting.free
