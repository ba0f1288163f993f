"""`trainable-candle doctor`: check this machine for training, and say how to fix its faults."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainable_candle.cli.options import Parser, add_help

if TYPE_CHECKING:
    from collections.abc import Sequence

FAULTY: Final = 1
"""Exit status if something is wrong."""


def run(arguments: Sequence[str], program: str) -> int:
    """Print the report, and return the exit status: 0 if nothing is wrong, else `FAULTY`."""
    given = make_parser(program).parse(arguments)

    # Imported after the flags are parsed, so that --help does not wait for the import.
    from trainable_candle.doctor import main  # noqa: PLC0415

    return 0 if main(Path(given.get("output", ".")).expanduser()) else FAULTY


def make_parser(program: str) -> Parser:
    """Make the parser of the flags."""
    parser = Parser(
        program,
        "Check the driver, the libraries, GPUs, memory and disk, and train a small layer on each\n"
        "device. The report says how to fix each fault. The exit status is 0 if there is none.",
        "[options]",
    )
    group = parser.add_argument_group("options")
    group.add_argument(
        "--output", metavar="DIR", help="the folder for runs, whose disk is checked (default: .)"
    )
    add_help(group)
    return parser
