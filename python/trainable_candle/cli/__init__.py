"""The command line: `trainable-candle COMMAND` and `train-lora`."""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from trainable_candle import __version__
from trainable_candle.errors import ConfigError, Error, InternalError
from trainable_candle.settings import nearest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

FAILED: Final = 1
"""Exit status after an unexpected error, or after the program that reads stdout closed the pipe."""
REFUSED: Final = 2
"""Exit status after an error whose message says how to fix it, or without a command."""
INTERRUPTED: Final = 130
"""Exit status after Ctrl-C: 128 + SIGINT, as in shells."""

TRACEBACK: Final = "TRAINABLE_CANDLE_TRACEBACK"
"""The environment variable that makes errors show their traceback."""


@dataclass(frozen=True)
class Command:
    """A command of `trainable-candle`."""

    module: str
    """The module that has `run(arguments, program)`, which returns the exit status. `program` is
    the command as the user types it."""
    summary: str
    """The command's line in `trainable-candle --help`."""


COMMANDS: Final = {
    "train": Command("trainable_candle.cli.train", "fine-tune a model on images or texts"),
    "ray": Command("trainable_candle.cli.ray", "fine-tune a model on a Ray cluster"),
    "preview-data": Command(
        "trainable_candle.cli.preview_data", "show the tokens of a data set, and which are learnt"
    ),
    "demo": Command("trainable_candle.cli.demo", "teach a built-in model what it has never seen"),
    "sample": Command(
        "trainable_candle.cli.sample", "draw images or write texts, with an adapter or without"
    ),
    "chat": Command("trainable_candle.cli.chat", "talk to a language model"),
    "merge": Command("trainable_candle.cli.merge", "write a model with an adapter merged into it"),
    "export": Command(
        "trainable_candle.cli.export", "write a language model's adapter for other programs"
    ),
    "extract": Command(
        "trainable_candle.cli.extract", "write the difference of two checkpoints as a LoRA"
    ),
    "resize": Command("trainable_candle.cli.resize", "reduce a LoRA to a lower rank"),
    "combine": Command("trainable_candle.cli.combine", "write several LoRAs as one file"),
    "verify": Command("trainable_candle.cli.verify", "show which tools apply an adapter"),
    "doctor": Command(
        "trainable_candle.cli.doctor", "find faults of this machine and say how to fix them"
    ),
    "info": Command("trainable_candle.cli.info", "show versions, devices and models"),
}

_HELP: Final = """\
usage: trainable-candle COMMAND [options]

Fine-tune large models with LoRA and DoRA.

commands:
{commands}

`trainable-candle COMMAND --help` shows the options of a command;
`train-lora` is short for `trainable-candle train`.

options:
  -h, --help  show this
  --version   show the version"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command of `trainable-candle`, and return the exit status."""
    given = _given(arguments)
    return guarded(lambda: _dispatch(given))


def train_lora(arguments: Sequence[str] | None = None) -> int:
    """Run `train-lora`, which is `trainable-candle train`, and return the exit status."""
    given = _given(arguments)
    return guarded(lambda: _run("train", given, "train-lora"))


def _given(arguments: Sequence[str] | None) -> list[str]:
    """Return the arguments, by default those of the process; make stdout print any file name."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file name may have bytes that are not text; printing it must not fail.
        sys.stdout.reconfigure(errors="backslashreplace")
    return list(sys.argv[1:] if arguments is None else arguments)


def _dispatch(given: list[str]) -> int:
    if not given or given[0] in {"-h", "--help", "help"}:
        lines = (f"  {name:<12}  {command.summary}" for name, command in COMMANDS.items())
        print(_HELP.format(commands="\n".join(lines)))
        return 0 if given else REFUSED
    if given[0] == "--version":
        print(f"trainable-candle {__version__}")
        return 0
    name = given[0]
    if name not in COMMANDS:
        raise ConfigError(f"unknown command `{name}`{nearest(name, COMMANDS)}")
    return _run(name, given[1:], f"trainable-candle {name}")


def _run(name: str, arguments: list[str], program: str) -> int:
    # Import the module here, so that no command waits for the imports of other commands.
    module = importlib.import_module(COMMANDS[name].module)
    status: int = module.run(arguments, program)
    return status


def guarded(action: Callable[[], int]) -> int:
    """Run `action` and return its exit status; if it fails, print the error without a traceback.

    If the environment variable that `TRACEBACK` names is set, print the traceback, too.
    """
    try:
        status = action()
        # If the pipe is closed, this flush raises BrokenPipeError, which is handled below. Without
        # this flush, the interpreter would flush at exit and report the error on stderr.
        sys.stdout.flush()
        return status  # noqa: TRY300 - simpler than an else after the handlers
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The program that reads stdout, such as `head`, has closed the pipe. The interpreter
        # flushes stdout again when it exits, so put /dev/null in place of the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:  # noqa: BLE001 - the outermost frame
        if os.environ.get(TRACEBACK):
            traceback.print_exc()
        # `InternalError` is a subclass of `Error`, but reports a bug.
        may_be_expected = isinstance(error, (Error, OSError, ModuleNotFoundError))
        if may_be_expected and not isinstance(error, InternalError):
            print(f"error: {_message(error)}", file=sys.stderr)
            return REFUSED
        print(
            f"error: {type(error).__name__}: {error}\n"
            f"this should not happen; {TRACEBACK}=1 in the environment shows where it happened",
            file=sys.stderr,
        )
        return FAILED


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
