"""`trainable-candle demo`: teach a built-in model what it has never seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainable_candle.cli.options import Parser, add_help, whole

if TYPE_CHECKING:
    from collections.abc import Sequence

DIGITS: Final = "digits"
SDXL: Final = "sdxl"
MODELS: Final = (DIGITS, SDXL, "causal-lm")


def run(arguments: Sequence[str], program: str) -> int:
    """Run the demo, and return the exit status: 0 if the model has learnt its task, else 1."""
    given = make_parser(program).parse(arguments)
    options = {"seed": given.get("seed", 0), "threads": given.get("threads")}
    output = Path(given.get("output", "demo-output")).expanduser()
    if given.get("model", DIGITS) == DIGITS:
        from trainable_candle.demo.run import run_demo  # noqa: PLC0415 - after the flags are parsed

        # This function prints its own verdict, and returns the exit status.
        return run_demo(output, **options)

    from trainable_candle.demo import hearts, language  # noqa: PLC0415

    module = hearts if given["model"] == SDXL else language
    verdict = module.run_demo(output, **options)
    if verdict is None:  # The training was interrupted.
        return 1
    print(f"\n{verdict}\n\nEverything is in {output}")
    return 0 if verdict.passed else 1


def make_parser(program: str) -> Parser:
    """Make the parser of the flags."""
    parser = Parser(
        program,
        "Fine-tune a built-in model as train-lora does, and report whether it has learnt its task. "
        "The generator of handwritten digits learns a new digit, SDXL learns hearts, and the "
        "language model learns a new task.",
        "[options]",
    )
    group = parser.add_argument_group("options")
    group.add_argument(
        "--model", metavar="NAME", choices=MODELS, help=f"{', '.join(MODELS)} (default: {DIGITS})"
    )
    group.add_argument(
        "--output", metavar="DIR", help="folder for the results (default: demo-output)"
    )
    group.add_argument(
        "--seed", metavar="N", type=whole(0), help="seed of all random numbers (default: 0)"
    )
    group.add_argument("--threads", metavar="N", type=whole(1), help="CPU threads (default: all)")
    add_help(group)
    return parser
