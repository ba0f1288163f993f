"""Descriptions of settings and groups, the check of a value, and texts for messages."""

from __future__ import annotations

import contextlib
import difflib
import math
from collections.abc import Callable, Mapping  # noqa: TC003 - get_type_hints reads them
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple, get_args, get_origin

import numpy as np

from trainable_candle._core import DType
from trainable_candle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class Setting:
    """The description of a setting, besides its name, type and default."""

    help: str
    choices: tuple[str, ...] = ()
    low: float | None = None
    """The least value."""
    above: bool = False
    """Whether `low` itself is excluded."""
    high: float | None = None
    """The greatest value."""
    below: float | None = None
    """The value must be less than this bound. For a whole number without `below` and `high`, the
    bound is 2**63."""
    rare: bool = False
    """Whether the short help omits the setting."""
    texts: bool = False
    """Whether the items of a list are texts, which may contain commas; the flag then takes one item
    and may be repeated."""
    several: bool = False
    """Whether the flag of a list of texts (see `texts`) takes several items at once."""
    tokenized: bool = False
    """Whether a tokenizer reads the value, which must then be valid UTF-8."""
    free: bool | Callable[[Mapping[str, Any]], bool] = False
    """Whether a resumed run may change the value and still compute what the earlier run would have
    computed; or a function that decides this from the values of all the run's settings, by name."""
    section: str | None = None
    """The section of the help; None: that of the group."""
    synonyms: tuple[str, ...] = ()
    """Names of the same setting in other tools, spelled like flags. The command line and YAML files
    accept them, too. A name with dots stands for nested lines in YAML files, and is not a flag."""
    spellings: Mapping[str, str] = field(default_factory=dict)
    """Maps other tools' names of choices, in lower case, to the choices."""
    words: Mapping[str, int] = field(default_factory=dict)
    """Maps words, in lower case, to the numbers that they stand for."""
    read: Callable[[Any], Any] | None = None
    """Converts other tools' spellings of the value; returns any other value unchanged, or raises
    `ConfigError` if the value cannot be used."""
    bare: str | None = None
    """The setting's value if its flag is given without one."""
    path: bool = False
    """Whether the value is a path, or a list of paths; in a YAML file, paths are relative to the
    folder of the file."""


class Condition(NamedTuple):
    """A condition without which settings have no effect."""

    settings: tuple[str, ...]
    """The names of the settings."""
    holds: Callable[[Any], bool]
    """Takes the whole configuration; returns whether the condition holds."""
    needed: str = ""
    """The flags that make the condition hold, for the message "... has no effect without ..."; not
    used if there is a `complaint`."""
    complaint: str | None = None
    """A whole message for conditions that this wording does not fit."""


class Group:
    """The base of groups of settings, which are frozen dataclasses.

    Each family of models lists the groups that it takes.
    """

    section: ClassVar[str]
    """The section of the help that shows the group's settings."""
    conditions: ClassVar[tuple[Condition, ...]] = ()
    """When settings have an effect. A run checks at its start that its settings have an effect."""
    contradictions: ClassVar[tuple[Callable[[Any], str | None], ...]] = ()
    """Functions from a configuration to a message about a contradiction in it, or None. They are
    called whenever a configuration is made."""


_PAST_INT64: Final = 2**63
"""The least whole number that does not fit in a signed 64-bit integer."""


def checked(name: str, value: Any, hint: Any, setting: Setting) -> Any:
    """Convert a value to the type of its setting, `hint`, and check the value.

    A float may be given as a whole number or as a text. A list of names may be given as a text with
    commas, and a list with a single text as that text.

    Raises:
        ConfigError: the type is wrong, the value is none of the choices or is outside its range, or
            `setting.read` rejects it.
    """
    if isinstance(value, str):
        value = setting.words.get(value.lower(), value)
    if setting.read is not None:
        value = setting.read(value)
    if isinstance(value, bool) and setting.choices:
        # YAML 1.1 reads on, off, yes and no as true and false.
        written = ("on", "yes") if value else ("off", "no")
        known = {*setting.choices, *setting.spellings}
        value = next((word for word in written if word in known), value)
    value = _typed(name, value, hint, setting)
    if setting.choices and isinstance(value, str) and value not in setting.choices:
        value = setting.spellings.get(value.lower(), value)
        value = value.lower() if value.lower() in setting.choices else value
    _check_value(name, value, setting)
    return value


def flag(name: str) -> str:
    """Return the flag of a setting on the command line."""
    return f"--{name.replace('_', '-')}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known name, or all names."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean `{near[0]}`?" if near else f"; expected one of {', '.join(known)}"


def described(value: Any) -> str:
    """Return a value with its type, for a message."""
    return f"{value!r} ({type(value).__name__})"


_EXPECTED: Final = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
}


def _typed(name: str, value: Any, hint: Any, setting: Setting) -> Any:
    """Convert a value to the type `hint`, such as `int`, `list[str]` or `float | None`."""
    # The arguments of a union are its options; the argument of a list is the type of its items.
    options = get_args(hint) if get_origin(hint) is not list else ()
    if value is None and type(None) in options:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    target = next((option for option in options if option is not type(None)), hint)
    if get_origin(target) is list:
        return _list(name, value, split=not setting.texts)
    if type(value) is int and value.bit_length() > 1023:  # too large for a float
        bits = value.bit_length()
        raise ConfigError(f"{name} is a number of {bits} bits, too large to compute with")
    if target is float and type(value) in {int, str}:
        # YAML 1.1 reads 1e-4 as text.
        with contextlib.suppress(ValueError):
            return float(value)
    # A `tc.device` is a `str`, and `str` of a `DType` is its name.
    if target is str and isinstance(value, (str, Path, DType)):
        return str(value)
    if type(value) is not target:
        expected = f"one of {', '.join(setting.choices)}" if setting.choices else _EXPECTED[target]
        if target is str and isinstance(value, (bool, int, float, date)) and not setting.choices:
            expected += "; put it in quotes"
        raise ConfigError(f"{name} is {described(value)}, expected {expected}")
    return value


def _list(name: str, value: Any, *, split: bool) -> list[str]:
    """Convert a value to a list of texts; if `split`, split one text at its commas."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()] if split else [value]
    if isinstance(value, (list, tuple)) and all(isinstance(part, str) for part in value):
        return list(value)
    expected = "a list of names" if split else "a list of texts"
    raise ConfigError(f"{name} is {described(value)}, expected {expected}")


def _check_value(name: str, value: Any, setting: Setting) -> None:
    """Check that a value of the right type is one of the choices, or in the range."""
    if value is None:
        return
    if setting.choices and value not in setting.choices:
        near = difflib.get_close_matches(value.lower(), setting.choices, n=1)
        suggestion = f"; did you mean `{near[0]}`?" if near else ""
        raise ConfigError(
            f"{name} is `{value}`, expected one of {', '.join(setting.choices)}{suggestion}"
        )
    if not isinstance(value, (int, float)):
        return
    if not math.isfinite(value):
        raise ConfigError(f"{name} is {value}, expected a finite number")
    if setting.low is not None and (
        value < setting.low or (setting.above and value == setting.low)
    ):
        bound = "above" if setting.above else "at least"
        raise ConfigError(f"{name} is {value}, expected {bound} {setting.low:g}")
    if setting.high is not None and value > setting.high:
        raise ConfigError(f"{name} is {value}, expected at most {setting.high:g}")
    below = setting.below
    if below is None and setting.high is None and isinstance(value, int):
        below = _PAST_INT64
    if below is not None and value >= below:
        raise ConfigError(f"{name} is {value}, expected below {below}")
