"""`trainable-candle merge`: write a model with an adapter merged into its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainable_candle.cli.loading import add_model, load_model
from trainable_candle.cli.options import Parser, add_help

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(arguments: Sequence[str], program: str) -> int:
    """Merge as the arguments say; returns the exit status."""
    parser = make_parser(program)
    given = parser.parse(arguments)
    parser.require(given, "model", "adapter", "output")

    output = Path(given["output"]).expanduser()
    task = load_model(given, "cpu", given.get("precision"))
    task.save_merged(output)
    print(f"merged model: {output}")
    return 0


def make_parser(program: str) -> Parser:
    """Make the parser of the flags."""
    parser = Parser(
        program,
        "Write a model with an adapter merged into its weights.",
        "--model NAME --adapter FILE --output DIR [options]",
    )
    group = parser.add_argument_group("options")
    add_model(group, "dtype of the written weights (default: as stored)")
    group.add_argument("--output", metavar="DIR", help="new folder, or .safetensors file")
    add_help(group)
    return parser
