"""Settings that pass `name=value` on to a function, as kohya's `--optimizer_args` does."""

from __future__ import annotations

import ast
import math
import re
from inspect import signature
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.errors import ConfigError
from trainable_candle.settings.setting import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

_BETWEEN: Final = re.compile(r"\s+(?=[A-Za-z_][\w-]*\s*=)")
"""What separates the arguments of one text, such as "eps=1e-6 amsgrad=true" quoted in a shell."""
_WORDS: Final = {"true": True, "false": False, "none": None, "inf": math.inf}


def parsed(name: str, texts: Sequence[str]) -> dict[str, Any]:
    """Parse arguments such as `eps=1e-6`, and return their values by name.

    Args:
        name: the name of the setting.
        texts: the arguments, such as `eps=1e-6`, `betas=0.9,0.99`, `amsgrad=true`; several numbers
            may have brackets around them.

    Raises:
        ConfigError: a text is not `name=value`, its value cannot be parsed, or a name occurs twice.
    """
    found: dict[str, Any] = {}
    for text in [part for given in texts for part in _BETWEEN.split(given.strip())]:
        key, equals, value = text.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key.isidentifier():
            raise ConfigError(f"{name}: found `{text}`, expected name=value such as eps=1e-6")
        if key in found:
            raise ConfigError(f"{name}: `{key}` is given twice")
        found[key] = _value(name, text, value.strip())
    return found


def _value(name: str, text: str, value: str) -> Any:
    if value.lower() in _WORDS:
        return _WORDS[value.lower()]
    parts = value.strip("()[]").split(",")
    if len(parts) > 1:
        return tuple(_value(name, text, part.strip()) for part in parts)
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        raise ConfigError(
            f"{name}: found `{text}`, expected a number, a comma-separated list of numbers, true, "
            "false or none"
        ) from None


def check_names(
    name: str, given: Collection[str], of: str, function: Callable[..., Any], own: dict[str, str]
) -> None:
    """Check that a function takes these arguments.

    Args:
        name: the name of the setting.
        given: the names of the arguments.
        of: what the error message calls the function.
        function: the function.
        own: maps each argument that has a setting of its own to the flag of the setting.

    Raises:
        ConfigError: the function has no argument of a given name (the message suggests one that it
            has), or the argument has a setting of its own (the message names its flag).
    """
    known = [key for key in signature(function).parameters if key not in {*own, "params"}]
    for key in given:
        if key in own:
            raise ConfigError(f"{name}: `{key}` has a setting of its own: give {own[key]}")
        if key not in known:
            hint = nearest(key, known) if known else "; it takes no arguments"
            raise ConfigError(f"{name}: {of} has no `{key}`{hint}")
