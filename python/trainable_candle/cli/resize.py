"""`trainable-candle resize`: reduce a LoRA to a lower rank."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainable_candle.cli.adapter_files import add_output, new_file, share
from trainable_candle.cli.options import Parser, add_help, whole
from trainable_candle.errors import ConfigError
from trainable_candle.outputs import adapter_in

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(arguments: Sequence[str], program: str) -> int:
    """Resize the LoRA as the arguments say; returns the exit status."""
    parser = make_parser(program)
    given = parser.parse(arguments)
    parser.require(given, "file", "output")
    if not {"rank", "keep"} & given.keys():
        raise ConfigError("missing --rank or --keep; give one of them, or both")
    output = new_file(given["output"], overwrite="overwrite" in given)

    from trainable_candle.lora import LoraFile, resize  # noqa: PLC0415 - after the checks

    file = LoraFile.read(adapter_in(Path(given["file"]).expanduser()))
    ranks_before = [module.factors.rank for module in file.modules.values()]
    rank = given.get("rank", max(ranks_before))  # the default limits no module
    resized = resize(file, rank, given.get("keep", 1.0))
    resized.write(output, given.get("precision", "f32"))
    ranks_after = [module.factors.rank for module in resized.modules.values()]
    count = len(ranks_after)
    print(f"{count} modules: ranks {_range(ranks_before)} became {_range(ranks_after)}")
    print(f"adapter: {output}")
    return 0


def _range(ranks: Sequence[int]) -> str:
    """Return the one rank of all modules, or the lowest and the highest rank."""
    return str(ranks[0]) if min(ranks) == max(ranks) else f"{min(ranks)} to {max(ranks)}"


def make_parser(program: str) -> Parser:
    """Make the parser of the flags."""
    parser = Parser(
        program,
        "Write the nearest LoRA of a lower rank, found by a singular value decomposition.",
        "FILE --output FILE [options]",
    )
    group = parser.add_argument_group("options")
    group.add_argument(
        "file",
        metavar="FILE",
        nargs="?",  # `require` reports a missing file
        help="the LoRA: a safetensors file, or the output folder of a run",
    )
    group.add_argument(
        "--rank",
        metavar="N",
        type=whole(1),
        help="the highest rank that a module may have (default: no limit)",
    )
    group.add_argument(
        "--keep",
        metavar="X",
        type=share,  # above 0 and at most 1
        help="fraction of each module's squared norm to keep, e.g. 0.95 (default: 1)",
    )
    add_output(group)  # `--output`, `--overwrite` and `--precision`
    add_help(group)
    return parser
