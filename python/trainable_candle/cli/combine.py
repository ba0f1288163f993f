"""`trainable-candle combine`: write the sum of several LoRAs as one file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainable_candle.cli.adapter_files import add_output, new_file, scales_of
from trainable_candle.cli.options import Parser, add_help, factor, whole
from trainable_candle.errors import ConfigError
from trainable_candle.settings.checks import existing_adapter

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(arguments: Sequence[str], program: str) -> int:
    """Combine as the arguments say, and return the exit status."""
    parser = make_parser(program)
    given = parser.parse(arguments)
    parser.require(given, "adapter", "output")
    paths = [existing_adapter("adapter", Path(text).expanduser()) for text in given["adapter"]]
    if len(paths) < 2:
        raise ConfigError("give --adapter at least twice")
    scales = scales_of(given, len(paths))
    output = new_file(given["output"], overwrite="overwrite" in given)

    from trainable_candle.lora import LoraFile, combine, resize  # noqa: PLC0415 - after the checks

    combined = combine([LoraFile.read(path) for path in paths], scales)
    if "rank" in given:
        combined = resize(combined, given["rank"])
    combined.write(output, given.get("precision", "f32"))
    ranks = [module.factors.rank for module in combined.modules.values()]
    print(f"{len(ranks)} modules, ranks up to {max(ranks)}")
    print(f"adapter: {output}")
    return 0


def make_parser(program: str) -> Parser:
    """Make the parser of the flags. Its result has only the flags that the user has given."""
    parser = Parser(
        program,
        "Write the sum of LoRAs as one LoRA; without --rank, its rank is the sum of theirs.",
        "--adapter FILE --adapter FILE --output FILE",
    )
    group = parser.add_argument_group("options")
    group.add_argument(
        "--adapter", metavar="FILE", action="append", help="a LoRA; give it at least twice"
    )
    group.add_argument(
        "--scale",
        metavar="X",
        type=factor,
        action="append",
        help="factor on a LoRA's effect: once for all, or once per --adapter (default: 1)",
    )
    group.add_argument("--rank", metavar="N", type=whole(1), help="reduce the sum to this rank")
    add_output(group)  # --output, --overwrite and --precision
    add_help(group)
    return parser
