"""Parses and checks settings whose values are arguments `name=value` of a function.

kohya's `--optimizer_args` is such a setting.
"""

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
"""The white space between arguments in one text, such as "eps=1e-6 amsgrad=true": a shell passes
what is in quotes as one text."""
_WORDS: Final = {"true": True, "false": False, "none": None, "inf": math.inf}
"""Maps words, in lower case, to their values."""


def parsed(name: str, texts: Sequence[str]) -> dict[str, Any]:
    """Parse arguments such as `eps=1e-6`, and return their values by name.

    Args:
        name: the name of the setting.
        texts: each has one or more arguments, such as `eps=1e-6`, `amsgrad=true` or
            `betas=0.9,0.99`; a list of numbers may have brackets around it.

    Raises:
        ConfigError: an argument is not `name=value`, its value cannot be parsed, or a name occurs
            twice.
    """
    found: dict[str, Any] = {}
    for argument in [part for text in texts for part in _BETWEEN.split(text.strip())]:
        key, equals, value = argument.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key.isidentifier():
            raise ConfigError(f"{name}: found `{argument}`, expected name=value such as eps=1e-6")
        if key in found:
            raise ConfigError(f"{name}: `{key}` is given twice")
        found[key] = _value(name, argument, value.strip())
    return found


def _value(name: str, argument: str, value: str) -> Any:
    """Return what a value means; the setting `name` and the `argument` are for the message."""
    if value.lower() in _WORDS:
        return _WORDS[value.lower()]
    parts = value.strip("()[]").split(",")
    if len(parts) > 1:
        return tuple(_value(name, argument, part.strip()) for part in parts)
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, TypeError):
        raise ConfigError(
            f"{name}: found `{argument}`, expected a number, a comma-separated list of numbers, "
            "true, false or none"
        ) from None


def check_names(
    name: str,
    given: Collection[str],
    function_name: str,
    function: Callable[..., Any],
    flags: dict[str, str],
) -> None:
    """Check that a function takes these arguments.

    Args:
        name: the name of the setting.
        given: the names of the arguments.
        function_name: what the error message calls the function.
        function: the function.
        flags: maps each argument that has a setting of its own to the flag of that setting.

    Raises:
        ConfigError: the function has no argument of a given name (the message names those that it
            has, or the nearest), or the argument has a setting of its own (the message names the
            flag).
    """
    # `params` is the optimizer's list of variables, which the run passes.
    known = [key for key in signature(function).parameters if key not in {*flags, "params"}]
    for key in given:
        if key in flags:
            raise ConfigError(f"{name}: `{key}` has a setting of its own: give {flags[key]}")
        if key not in known:
            hint = nearest(key, known) if known else "; it takes no arguments"
            raise ConfigError(f"{name}: {function_name} has no `{key}`{hint}")
