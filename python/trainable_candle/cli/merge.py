"""`trainable-candle merge`: write a model with an adapter merged into its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainable_candle.cli.options import Parser, add_help, factor

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(arguments: Sequence[str], program: str) -> int:
    """Merge as the arguments say; returns the exit status."""
    parser = make_parser(program)
    given = parser.parse(arguments)
    parser.require(given, "model", "adapter", "output")

    from trainable_candle import recipes  # noqa: PLC0415 - after the arguments proved right

    output = Path(given["output"]).expanduser()
    recipe = recipes.load(given["model"], given.get("weights"), given.get("dtype"), "cpu")
    recipe.load_adapter(Path(given["adapter"]).expanduser(), given.get("scale", 1.0))
    recipe.save_merged(output)
    print(f"merged model: {output}")
    return 0


def make_parser(program: str) -> Parser:
    """The parser of the flags."""
    parser = Parser(
        program,
        "Write a model with an adapter merged into its weights.",
        "--model NAME --adapter FILE --output DIR [options]",
    )
    group = parser.add_argument_group("options")
    group.add_argument(
        "--model", metavar="NAME", help="which model; `trainable-candle info` lists them"
    )
    group.add_argument(
        "--weights", metavar="PATH", help="its checkpoint (default: the built-in one)"
    )
    group.add_argument("--adapter", metavar="FILE", help="an adapter that train-lora wrote")
    group.add_argument(
        "--scale", metavar="X", type=factor, help="factor on the adapter's effect (default: 1)"
    )
    group.add_argument(
        "--dtype", metavar="f32|bf16|f16", help="dtype of the written weights (default: as stored)"
    )
    group.add_argument("--output", metavar="DIR", help="new folder, or .safetensors file")
    add_help(group)
    return parser
