"""Code for flags of several commands: `--output`, its dtype, `--scale`, and fractions up to 1."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainable_candle.errors import ConfigError
from trainable_candle.settings.machine import PRECISION_SPELLINGS, PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Mapping


def new_file(text: str, *, overwrite: bool, suffix: str = ".safetensors") -> Path:
    """Check the value `text` of `--output`, and return it as a path.

    Raises:
        ConfigError: the path has another suffix than `suffix`, the file exists and `overwrite` is
            False, or a parent of the path is a file.
    """
    path = Path(text).expanduser()
    if path.suffix.lower() != suffix:
        raise ConfigError(f"--output is {path}, expected the name of a {suffix} file")
    if path.exists() and not overwrite:
        raise ConfigError(f"--output is {path}, which exists; give another name, or --overwrite")
    above = next(parent for parent in path.parents if parent.exists())
    if not above.is_dir():
        raise ConfigError(f"--output is {path}, and {above} is a file, expected a folder")
    return path


def share(text: str) -> float:
    """Convert a flag's text to a fraction above 0 and at most 1.

    Raises:
        ValueError, ArgumentTypeError: the text is not such a number; argparse reports it.
    """
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and at most 1, found {text}")
    return value


def add_output(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the output file: `--output`, `--overwrite` and `--precision`."""
    group.add_argument("--output", metavar="FILE", help="the .safetensors file to write")
    group.add_argument("--overwrite", action="store_true", help="replace an existing file")
    group.add_argument(
        "--precision",
        metavar="NAME",
        type=precision,
        help=f"dtype of the file: {', '.join(PRECISIONS)} (default: f32)",
    )
    group.add_argument("--dtype", dest="precision", type=precision, help=argparse.SUPPRESS)


def precision(text: str) -> str:
    """Return the precision that a flag's text names, also if it is another tool's name.

    Raises:
        ArgumentTypeError: there is no such precision; argparse reports it.
    """
    name = PRECISION_SPELLINGS.get(text.lower(), text.lower())
    if name not in PRECISIONS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(PRECISIONS)}, found {text}")
    return name


def scales_of(given: Mapping[str, Any], count: int) -> list[float]:
    """Return the values of `--scale`, one for each of `count` adapters; 1.0 without `--scale`.

    The effect of an adapter is multiplied by its scale. A single `--scale` is for all adapters.
    `given` has the values of the given flags by name.

    Raises:
        ConfigError: the number of scales is neither 1 nor `count`.
    """
    scales = given.get("scale", [1.0])
    if len(scales) == 1:
        return list(scales) * count
    if len(scales) != count:
        raise ConfigError(
            f"--scale is given {len(scales)} times and --adapter {count} times; "
            "give --scale once for all, or once for each --adapter"
        )
    return list(scales)
