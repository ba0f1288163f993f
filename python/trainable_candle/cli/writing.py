"""The flags that say how a language model generates text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainable_candle.cli.options import non_negative, whole
from trainable_candle.errors import ConfigError
from trainable_candle.settings import flag

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

    from trainable_candle.tasks.text.writing import WritingOptions


def add_writing(group: argparse._ArgumentGroup) -> None:
    """Add the flags that say how text is generated."""
    group.add_argument(
        "--tokens", metavar="N", type=whole(1), help="most tokens of an answer (default: 512)"
    )
    group.add_argument(
        "--temperature",
        metavar="X",
        type=non_negative,
        help="0 (default): the likeliest token; 1: as predicted",
    )
    group.add_argument(
        "--top-k",
        metavar="N",
        type=whole(0),
        help="draw from the N likeliest tokens; 0 (default): all",
    )
    group.add_argument(
        "--top-p",
        metavar="X",
        type=non_negative,
        help="draw from the fewest tokens that sum to X; 1: all",
    )
    group.add_argument(
        "--min-p",
        metavar="X",
        type=non_negative,
        help="least probability relative to the likeliest's; 0: all",
    )
    group.add_argument(
        "--repetition-penalty",
        metavar="X",
        type=non_negative,
        help="above 1: fewer repetitions (default: 1)",
    )
    group.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        help="text that ends an answer; may be given again",
    )


def writing_options(given: Mapping[str, Any]) -> WritingOptions:
    """Return the options that the flags give.

    Args:
        given: the values of the flags on the command line, by name without dashes; flags that the
            user has not given are absent.

    Raises:
        ConfigError: a value is outside its range, or has no effect.
    """
    # An expensive import, after the flags are parsed.
    from trainable_candle.tasks.text.writing import WritingOptions  # noqa: PLC0415

    # The commands themselves add the flag `--seed`.
    names = ("tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    stop = tuple(given.get("stop", ()))
    options = WritingOptions(**{name: given[name] for name in names if name in given}, stop=stop)
    if not 0 < options.top_p <= 1:
        raise ConfigError(f"--top-p is {options.top_p}, expected above 0 and at most 1")
    if not 0 <= options.min_p <= 1:
        raise ConfigError(f"--min-p is {options.min_p}, expected 0 to 1")
    if not options.repetition_penalty > 0:  # it is 0: the flag takes no negative number
        raise ConfigError("--repetition-penalty is 0, expected above 0")
    if "" in options.stop:
        raise ConfigError("--stop is empty; give a text")
    # With temperature 0, the likeliest token is taken, so these flags have no effect.
    idle = [flag(name) for name in ("top_k", "top_p", "min_p", "seed") if name in given]
    if idle and not options.temperature:
        verb, them = ("has", "it") if len(idle) == 1 else ("have", "them")
        raise ConfigError(
            f"{', '.join(idle)} {verb} no effect without --temperature; give --temperature, or "
            f"leave {them} out"
        )
    return options
