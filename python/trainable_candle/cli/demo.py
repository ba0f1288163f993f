"""`trainable-candle demo`: teach the built-in generator an unseen digit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainable_candle.cli.options import Parser, add_help, whole

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(arguments: Sequence[str], program: str) -> int:
    """Run the demo; returns the exit status."""
    given = make_parser(program).parse(arguments)

    from trainable_candle.demo.run import run_demo  # noqa: PLC0415 - after the arguments proved right

    return run_demo(
        Path(given.get("output", "demo-output")).expanduser(),
        seed=given.get("seed", 0),
        threads=given.get("threads"),
    )


def make_parser(program: str) -> Parser:
    """Make the parser of the flags."""
    parser = Parser(
        program,
        "Fine-tune the built-in generator of handwritten digits on the one digit it has never "
        "seen, through the path that train-lora takes, and let a classifier judge.",
        "[options]",
    )
    group = parser.add_argument_group("options")
    group.add_argument(
        "--output", metavar="DIR", help="folder for the results (default: demo-output)"
    )
    group.add_argument(
        "--seed", metavar="N", type=whole(0), help="seed of everything random (default: 0)"
    )
    group.add_argument("--threads", metavar="N", type=whole(1), help="CPU threads (default: all)")
    add_help(group)
    return parser
