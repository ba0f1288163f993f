"""`trainable-candle preview-data`: show the tokens of a data set, and which of them are learnt."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainable_candle.cli.options import Parser, add_help, whole
from trainable_candle.settings.texts import OBJECTIVES, TRAIN_ON

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(arguments: Sequence[str], program: str) -> int:
    """Show examples as the arguments say; returns the exit status."""
    parser = make_parser(program)
    given = parser.parse(arguments)
    parser.require(given, "weights", "dataset")

    # Expensive imports, after the flags are parsed.
    from trainable_candle.data.chats import TextOptions, best_fit, load_texts  # noqa: PLC0415
    from trainable_candle.data.chats.preview import legend, shown  # noqa: PLC0415
    from trainable_candle.text.chat_tokenizer import ChatTokenizer  # noqa: PLC0415

    tokenizer = ChatTokenizer.from_pretrained(given["weights"])
    options = TextOptions(
        sequence_length=given.get("sequence_length", TextOptions.sequence_length),
        train_on=given.get("train_on", TextOptions.train_on),
        preferences=given.get("objective") == "dpo",
        skip_bad=given.get("skip_bad", False),
    )
    train, validation = load_texts(Path(given["dataset"]).expanduser(), tokenizer, options)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(legend(colour=colour))
    for number, example in enumerate(train.examples[: given.get("examples", 3)], 1):
        counted = int(example.learnt.sum())
        print(f"\nexample {number}: {len(example)} tokens, {counted} learnt")
        print(shown(example, tokenizer, colour=colour))
    print(f"\n{tokenizer.summary()}\n{train.summary()}")
    rows = len(best_fit([len(example) for example in train.examples], options.sequence_length))
    full = 100 * train.tokens / (rows * options.sequence_length)
    print(f"  packed: {rows} rows of {options.sequence_length} tokens, {full:.0f} % full")
    if validation is not None:
        print(validation.summary().replace("dataset:", "validation:", 1))
    return 0


def make_parser(program: str) -> Parser:
    """Make the parser of the flags."""
    parser = Parser(
        program,
        "Show the tokens of a data set for language models, and which of them are learnt.",
        "--weights DIR --dataset FILE [options]",
    )
    group = parser.add_argument_group("options")
    group.add_argument("--weights", metavar="DIR", help="folder of a model, or its tokenizer.json")
    group.add_argument("--dataset", metavar="PATH", help="file or folder of examples")
    group.add_argument(
        "--examples", metavar="N", type=whole(0), help="number of examples to show (default: 3)"
    )
    group.add_argument(
        "--sequence-length",
        metavar="N",
        type=whole(2),
        help="longest example, tokens (default: 2048)",
    )
    group.add_argument("--objective", choices=OBJECTIVES, metavar="NAME", help="sft (default), dpo")
    group.add_argument("--train-on", choices=TRAIN_ON, metavar="NAME", help=", ".join(TRAIN_ON))
    group.add_argument(
        "--skip-bad", action="store_true", help="leave out lines that cannot be used"
    )
    add_help(group)
    return parser
