"""`trainable-candle chat`: talk to a language model, with an adapter or without."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from trainable_candle.cli.loading import add_model, load_model
from trainable_candle.cli.options import Parser, add_help, whole
from trainable_candle.cli.writing import add_writing, writing_options
from trainable_candle.errors import ConfigError
from trainable_candle.placement import AUTO, choose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainable_candle.tasks.text import TextTask
    from trainable_candle.tasks.text.writing import WritingOptions


def run(arguments: Sequence[str], program: str) -> int:
    """Talk as the arguments say; returns the exit status."""
    parser = make_parser(program)
    given = parser.parse(arguments)
    parser.require(given, "model")

    # Expensive imports, after the flags are parsed.
    from trainable_candle.settings.checks import require_text  # noqa: PLC0415
    from trainable_candle.tasks.text import TextTask  # noqa: PLC0415

    for prompt in given.get("prompt", []):
        require_text("--prompt", prompt)
    options = writing_options(given)
    placement = choose(given.get("device", AUTO), given.get("precision", AUTO))
    task = load_model(given, placement.device, placement.precision)
    if not isinstance(task, TextTask):
        raise ConfigError(
            f"--model {given['model']} draws images, and chat writes texts; "
            "use trainable-candle sample"
        )
    system = given.get("system")
    start = [{"role": "system", "content": system}] if system else []
    for prompt in given.get("prompt", []):
        _answer(task, [*start, {"role": "user", "content": prompt}], options)
    if "prompt" not in given:
        _talk(task, start, options)
    return 0


def _talk(task: TextTask, messages: list[dict[str, str]], options: WritingOptions) -> None:
    """Answer lines of standard input as one conversation, until an empty line or the end."""
    if sys.stdin.isatty():
        print("an empty line or Ctrl-D ends the conversation", file=sys.stderr)
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True, file=sys.stderr)
        line = sys.stdin.readline().strip()
        if not line:
            return
        messages = [*messages, {"role": "user", "content": line}]
        answer = _answer(task, messages, options)
        messages = [*messages, {"role": "assistant", "content": answer}]


def _answer(task: TextTask, messages: Sequence[dict[str, str]], options: WritingOptions) -> str:
    """Print an answer while it is generated; returns it."""
    parts = []
    for part in task.answer(messages, options):
        parts.append(part)
        print(part, end="", flush=True)
    print()
    return "".join(parts)


def make_parser(program: str) -> Parser:
    """Make the parser of the flags."""
    parser = Parser(
        program,
        "Talk to a language model, with an adapter or without; each line of input is a message.",
        "--model NAME [options]",
    )
    group = parser.add_argument_group("whom to talk to")
    add_model(group, "f32, bf16 or f16 (default: bf16 on a GPU, else f32)")
    group.add_argument("--device", metavar="TEXT", help="auto (default), cpu, cuda or cuda:N")
    group = parser.add_argument_group("what to say")
    group.add_argument(
        "--prompt",
        metavar="TEXT",
        action="append",
        help="a message, instead of standard input; each --prompt is a new conversation",
    )
    group.add_argument("--system", metavar="TEXT", help="the system message")
    add_writing(group)
    group.add_argument("--seed", metavar="N", type=whole(0), help="seed of the draws (default: 0)")
    add_help(group)
    return parser
