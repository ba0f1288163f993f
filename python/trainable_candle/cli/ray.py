"""`trainable-candle ray`: fine-tune a model on a Ray cluster."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING, Final

from trainable_candle.cli.options import Parser, add_help, whole
from trainable_candle.cli.train import make_parser as make_train_parser
from trainable_candle.cli.train import read_config
from trainable_candle.settings.paths import LATEST

if TYPE_CHECKING:
    from collections.abc import Sequence

_RESUME: Final = "--resume"


def run(arguments: Sequence[str], program: str) -> int:
    """Train as the arguments say; returns the exit status."""
    ray_options, train_arguments = make_parser(program).parse_own(arguments)
    # With `rare`, the parser's help also shows rarely needed flags; `--help-all` prints that help.
    given = make_train_parser(program, rare=False).parse(train_arguments)
    if given.pop("help_all", False):
        make_parser(program).print_help()
        print()
        make_train_parser(program, rare=True).print_help()
        return 0
    config = read_config(given)

    # Imported after the arguments are checked.
    from trainable_candle.distributed.ray import train  # noqa: PLC0415

    result = train(config, **ray_options, report=lambda line: print(line, flush=True))
    if result.completed:
        return 0
    command = continuation(program, arguments)
    print(
        f"stopped after step {result.step} of {config.steps}; continue with:\n  {command}",
        file=sys.stderr,
    )
    # As in a shell: 128 plus the number of the signal.
    return 128 + result.stopped_by if result.stopped_by else 0


def continuation(program: str, arguments: Sequence[str]) -> str:
    """Return the command that continues, from its last checkpoint, a run with these arguments."""
    remaining = list(arguments)
    # From the end, so that a deletion moves no argument that is still to be examined.
    for index, argument in reversed(list(enumerate(arguments))):
        if argument.partition("=")[0] == _RESUME:
            # The value is in the same argument, `--resume=PATH`, or in the next one.
            del remaining[index : index + (1 if "=" in argument else 2)]
    return shlex.join([*program.split(), *remaining, _RESUME, LATEST])


def make_parser(program: str) -> Parser:
    """Make the parser of the flags that `train` lacks."""
    parser = Parser(
        program,
        "Fine-tune a model in several processes of a Ray cluster. The options of "
        "`trainable-candle train`, except --gpus, can be given, too.",
        "--model NAME --dataset DIR --output DIR [options]",
    )
    group = parser.add_argument_group("options")
    group.add_argument(
        "--workers", metavar="N", type=whole(1), help="number of processes (default: one per GPU)"
    )
    group.add_argument(
        "--cpus-per-worker",
        metavar="N",
        type=whole(1),
        help="CPUs reserved per process (default: 1)",
    )
    group.add_argument(
        "--strategy",
        metavar="NAME",
        help="Ray's placement strategy: PACK (default), SPREAD, STRICT_PACK, STRICT_SPREAD",
    )
    group.add_argument(
        "--max-failures",
        metavar="N",
        type=whole(-1),
        help="most restarts from the last checkpoint (default: 0; -1: any number)",
    )
    group.add_argument(
        "--wait-seconds",
        metavar="N",
        type=whole(1),
        help="longest wait for free CPUs and GPUs (default: 300)",
    )
    group.add_argument(
        "--address", metavar="ADDRESS", help="the cluster's address, as ray.init takes it"
    )
    add_help(group)
    return parser
