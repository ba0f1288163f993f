"""A parser of flags that raises its errors, the flags of `TrainConfig`, and types of flags."""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, NoReturn, get_args, get_origin

from trainable_candle.errors import ConfigError
from trainable_candle.settings import TrainConfig, flag, group_of, nearest, settings
from trainable_candle.settings.foreign import instead
from trainable_candle.settings.presets import NAMES as PRESETS
from trainable_candle.settings.presets import PRESET
from trainable_candle.settings.sections import FILES, SECTIONS, TRAINING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainable_candle.settings import Setting

_WIDTH: Final = 80
_HELP_COLUMN: Final = 33


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` with compact help, without abbreviations.

    A flag that takes one value may be given once. Errors about unknown flags name the nearest flag.

    Args:
        program: the command as the user types it.
        description: what the command does.
        usage: the arguments that the usage line shows; argparse would list every flag.
    """

    def __init__(self, program: str, description: str, usage: str) -> None:
        super().__init__(
            prog=program,
            usage=f"{program} {usage}",
            description=description,
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
            formatter_class=_CompactHelp,
        )
        for action in (None, "store"):  # None is the default `action=` of a flag.
            self.register("action", action, _Once)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(f"{message} (see {self.prog} --help)")

    def parse(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Return the given arguments by name; flags that were not given are absent.

        Raises:
            ConfigError: a flag is unknown (the message names the nearest one) or given twice, a
                value is wrong or missing, or an argument belongs to no flag.
        """
        known, unknown = self.parse_own(arguments)
        if unknown:
            name = unknown[0].partition("=")[0]
            if not name.startswith("-"):
                raise ConfigError(f"unexpected argument `{name}` (see {self.prog} --help)")
            advice = instead(name.lstrip("-"))  # about flags of other trainers
            if advice is not None:
                raise ConfigError(f"{name} {advice}")
            # Do not suggest synonyms. Like hidden rare flags, they have no help; but a rare flag is
            # the name of its setting.
            flags = [
                option
                for action in self._actions
                for option in action.option_strings
                if action.help != argparse.SUPPRESS or flag(action.dest) == option
            ]
            suggestion = nearest(name, [option for option in flags if option.startswith("--")])
            if "did you mean" not in suggestion:  # No flag is near, so it lists all: too long.
                suggestion = f" (see {self.prog} --help)"
            raise ConfigError(f"unknown flag `{name}`{suggestion}")
        return known

    def parse_own(self, arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the given arguments by name, and the arguments that this parser does not know.

        Raises:
            ConfigError: a flag is given twice, or a value is wrong or missing.
        """
        known, unknown = self.parse_known_args([_hyphenated(text) for text in arguments])
        return vars(known), unknown

    def require(self, given: Mapping[str, Any], *names: str) -> None:
        """Check that certain flags or positional arguments were given.

        Raises:
            ConfigError: some are missing; the message names all of them.
        """
        actions = [action for action in self._actions if not action.option_strings]
        positional = {action.dest: action.metavar for action in actions}
        missing = [str(positional.get(name) or flag(name)) for name in names if name not in given]
        if missing:
            raise ConfigError(f"missing {', '.join(missing)} (see {self.prog} --help)")


class _CompactHelp(argparse.HelpFormatter):
    """Shows the value of a flag once, after all names of the flag, so that lines are short."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=_HELP_COLUMN, width=_WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return ", ".join(action.option_strings) or super()._format_action_invocation(action)
        # For "?", `_format_args` would put the value in brackets.
        shown = action.metavar if action.nargs == "?" else self._format_args(action, action.dest)
        return f"{', '.join(action.option_strings)} {shown}"


class _Once(argparse.Action):
    """Stores the value of a flag; to give it twice is an error, also under two of its names."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, name: str | None = None
    ) -> None:
        # `name` is the flag as the user gave it, or None for a positional argument.
        if name is not None and hasattr(namespace, self.dest):
            earlier = getattr(namespace, self.dest)
            main_name = flag(self.dest)
            if name == main_name:
                parser.error(f"{name} is given twice, as {earlier} and as {values}; give it once")
            parser.error(
                f"{name} {values}: {main_name} is already given, as {earlier}; give one value"
            )
        setattr(namespace, self.dest, values)


class _OnOrOff(argparse.BooleanOptionalAction):
    """Stores whether a flag or its `--no-` form is given; both together are an error."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, _: Any, name: str | None = None
    ) -> None:
        on = not str(name).startswith("--no-")
        if getattr(namespace, self.dest, on) != on:
            main_name = flag(self.dest)
            parser.error(f"{main_name} and --no-{main_name[2:]} are both given; give one of them")
        setattr(namespace, self.dest, on)


class _AddToList(argparse.Action):
    """Stores comma-separated names; joins those of a flag that is given several times."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: Any, name: str | None = None
    ) -> None:
        if not values.strip(" ,"):
            parser.error(f"{name} is empty; give names, or leave it out")
        earlier = getattr(namespace, self.dest, None)
        setattr(namespace, self.dest, values if earlier is None else f"{earlier},{values}")


def add_settings(parser: Parser, *, rare: bool) -> None:
    """Add a flag for every setting of `TrainConfig`, and the flags of presets, files and help.

    Args:
        parser: gets the flags, in groups.
        rare: whether the help shows rarely needed flags.
    """
    defaults = asdict(TrainConfig())
    groups = {section: parser.add_argument_group(section) for section in SECTIONS}
    for name, (hint, setting) in settings().items():
        group = groups[setting.section or group_of(name).section]
        shown = rare or not setting.rare
        help_text = _help(setting, defaults[name]) if shown else argparse.SUPPRESS
        keywords: dict[str, Any] = {"dest": name, "help": help_text}
        if _kind(hint) is bool:
            keywords["action"] = _OnOrOff
        else:
            if setting.several:  # one or more values after the flag
                keywords |= {"action": "extend", "nargs": "+"}
            elif setting.texts:  # one value after each of several flags
                keywords["action"] = "append"
            elif get_origin(hint) is list:  # names with commas between them
                keywords["action"] = _AddToList
            keywords["type"] = _reader(setting, _kind(hint))
            keywords["metavar"] = _metavar(setting, _kind(hint))
            if setting.bare is not None:  # the value if the flag is given without one
                keywords |= {"nargs": "?", "const": setting.bare}
        group.add_argument(flag(name), **keywords)
        # Names with dots are for YAML files only.
        for synonym in (text for text in setting.synonyms if "." not in text):
            parser.add_argument(flag(synonym), **{**keywords, "help": argparse.SUPPRESS})
    groups[TRAINING].add_argument(
        flag(PRESET), metavar="NAME", help=f"default values: {', '.join(PRESETS)}"
    )
    files = groups[FILES]
    files.add_argument(
        "--config", metavar="FILE", help="YAML file with a `setting: value` on each line"
    )
    add_help(files)
    files.add_argument("--help-all", action="store_true", help="show all options")


def _hyphenated(text: str) -> str:
    """Return an argument; if it is a flag, hyphens replace the underscores in the flag's name."""
    if not text.startswith("--"):
        return text
    name, equals, value = text.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}"


def add_help(group: argparse._ArgumentGroup) -> None:
    """Add `-h` and `--help`."""
    group.add_argument("-h", "--help", action="help", help="show this")


def whole(least: int) -> Callable[[str], int]:
    """Return the `type=` of a flag for whole numbers from `least` to 2**64 - 1."""

    def convert(text: str) -> int:
        # `int` also accepts other scripts' digits.
        value = int(text) if text.lstrip("+-").isascii() else None
        if value is None or value < least:
            raise argparse.ArgumentTypeError(f"expected a whole number from {least}, found {text}")
        if value >= 2**64:
            raise argparse.ArgumentTypeError(f"expected a whole number below 2**64, found {text}")
        return value

    convert.__name__ = "whole number"  # for argparse's error if `int` fails
    return convert


def factor(text: str) -> float:
    """Convert a flag's text to a factor on an adapter's effect, a finite number other than 0.

    Raises:
        ValueError, ArgumentTypeError: the text is not such a number; argparse reports it.
    """
    value = float(text)
    if value == 0 or not math.isfinite(value):
        raise argparse.ArgumentTypeError(
            f"expected a finite number other than 0, found {text}; to apply no adapter, leave "
            "--adapter out"
        )
    return value


def non_negative(text: str) -> float:
    """Convert a flag's text to a finite number of at least 0.

    Raises:
        ValueError, ArgumentTypeError: the text is not such a number; argparse reports it.
    """
    value = float(text)
    if value < 0 or not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a finite number from 0, found {text}")
    return value


non_negative.__name__ = "number"  # for argparse's error if `float` fails


def _kind(hint: Any) -> type:
    """Return the type that a flag's text is converted to: str for lists; T for `T | None`."""
    if get_origin(hint) is list:
        return str  # `TrainConfig` splits the text.
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
    kind: type = kinds[0]
    return kind


def _reader(setting: Setting, kind: type) -> Callable[[str], Any]:
    """Return the function that converts a flag's text to its value."""
    if setting.read is not None:
        return str  # `TrainConfig` converts the text.
    if not setting.words:
        return kind

    # `words` maps words such as `auto` to the numbers that they stand for.
    def read(text: str) -> Any:
        return setting.words.get(text.lower()) if text.lower() in setting.words else kind(text)

    read.__name__ = kind.__name__
    return read


def _metavar(setting: Setting, kind: type) -> str:
    if setting.choices:
        return "NAME"
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _help(setting: Setting, default: Any) -> str:
    if setting.choices:
        return ", ".join(
            f"{choice} (default)" if choice == default else choice for choice in setting.choices
        )
    shown = default is not False and default not in (None, "", [])
    return f"{setting.help} (default: {default})" if shown else setting.help
