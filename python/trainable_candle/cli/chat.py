"""`trainable-candle chat`: talk to a language model, with an adapter or without."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

from trainable_candle.cli.loading import add_model, load_model
from trainable_candle.cli.options import Parser, add_help, whole
from trainable_candle.cli.writing import add_writing, writing_options
from trainable_candle.errors import ConfigError
from trainable_candle.placement import AUTO, choose

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainable_candle.tasks.task import Task
    from trainable_candle.tasks.text import TextTask
    from trainable_candle.tasks.text.writing import WritingOptions


def run(arguments: Sequence[str], program: str) -> int:
    """Talk as the arguments say, and return the exit status."""
    parser = make_parser(program)
    given = parser.parse(arguments)
    parser.require(given, "model")

    # Expensive imports, after the flags are parsed.
    from trainable_candle.settings.checks import require_text  # noqa: PLC0415
    from trainable_candle.tasks.text import TextTask  # noqa: PLC0415

    system = given.get("system")
    opening = [{"role": "system", "content": system}] if system else []
    prompts = given.get("prompt", [])
    chats = [[*opening, {"role": "user", "content": prompt}] for prompt in prompts]
    for prompt in prompts:
        require_text("--prompt", prompt)

    def check(task: Task) -> None:
        """Raise an error if the model is for images, or a prompt is too long."""
        if not isinstance(task, TextTask):
            raise ConfigError(
                f"--model {given['model']} draws images, and chat writes texts; "
                "use trainable-candle sample"
            )
        for messages in chats:
            task.prompt_tokens(messages)  # raises an error if the prompt is too long

    options = writing_options(given)
    placement = choose(given.get("device", AUTO), given.get("precision", AUTO))
    task = cast("TextTask", load_model(given, placement.device, placement.precision, check))
    for messages in chats:
        _answer(task, messages, options)
    if not prompts:
        _talk(task, opening, options)
    return 0


def _talk(task: TextTask, messages: list[dict[str, str]], options: WritingOptions) -> None:
    """Answer each line of standard input in one conversation, until an empty line or the end.

    Args:
        task: the model.
        messages: the messages before the first line: none, or the system message.
        options: how answers are written.
    """
    # An expensive import, after the flags are parsed.
    from trainable_candle.data.folder import counted  # noqa: PLC0415

    if sys.stdin.isatty():
        _notice("an empty line or Ctrl-D ends the conversation")
    while True:
        if sys.stdin.isatty():
            print("> ", end="", flush=True, file=sys.stderr)
        line = _line()
        if not line:
            return
        try:
            asked = _shortened(task, [*messages, {"role": "user", "content": line}], options)
            task.prompt_tokens(asked)  # raises an error if there can be no answer
        except ConfigError as error:
            # One message that cannot be answered must not end the conversation.
            _notice(f"{error}; this message is left out")
            continue
        # A turn is two messages: the user's and the answer. `asked` also has the new message.
        left_out = (len(messages) + 1 - len(asked)) // 2
        if left_out:
            turns = counted(left_out, "oldest turn")
            _notice(f"the context has {task.family.context} tokens: {turns} left out")
        answer = _answer(task, asked, options)
        messages = [*asked, {"role": "assistant", "content": answer}]


def _line() -> str:
    """Return the next line of standard input, without spaces around it; "" at the end.

    Raises:
        ConfigError: the line is not text in the encoding of standard input.
    """
    # An expensive import, after the flags are parsed.
    from trainable_candle.settings.checks import require_text  # noqa: PLC0415

    try:
        line = sys.stdin.readline().strip()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"standard input: byte {error.object[error.start]:#04x} is not text in "
            f"{error.encoding}; send text in that encoding"
        ) from None
    require_text("standard input", line)
    return line


def _shortened(
    task: TextTask, messages: list[dict[str, str]], options: WritingOptions
) -> list[dict[str, str]]:
    """Leave out the oldest turns of a conversation until there is room for an answer.

    Room for the longest answer that `options` allow is enough, and so is a quarter of the context.
    The system message and the last message stay.
    """
    needed = min(options.tokens, task.family.context // 4)
    # The index of the oldest turn, after the system message.
    oldest = 1 if messages[0]["role"] == "system" else 0
    kept = messages
    while len(kept) > oldest + 1 and task.room(kept) < needed:
        # Drop the oldest turn: a message of the user, and its answer.
        kept = [*kept[:oldest], *kept[oldest + 2 :]]
    return kept


def _notice(text: str) -> None:
    print(f"[{text}]", file=sys.stderr)


def _answer(task: TextTask, messages: Sequence[dict[str, str]], options: WritingOptions) -> str:
    """Print the answer to the last message while it is generated, and return its text."""
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
    add_model(group, precision="f32, bf16 or f16 (default: bf16 on a GPU, else f32)")
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
