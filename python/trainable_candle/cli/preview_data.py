"""`trainable-candle preview-data`: show the tokens of a data set, and which of them are learnt."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from trainable_candle.cli.options import Parser, add_help, whole
from trainable_candle.settings.texts import OBJECTIVES, TRAIN_ON

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainable_candle.families.causal_lm import CausalLM


def run(arguments: Sequence[str], program: str) -> int:
    """Show examples as the arguments say; returns the exit status."""
    parser = make_parser(program)
    given = parser.parse(arguments)
    parser.require(given, "dataset")

    # Expensive imports, after the flags are parsed.
    from trainable_candle.data.chats import TextOptions, best_fit, load_texts  # noqa: PLC0415
    from trainable_candle.data.chats.preview import legend, shown  # noqa: PLC0415
    from trainable_candle.data.chats.reading import dataset_path  # noqa: PLC0415
    from trainable_candle.families import weights_of  # noqa: PLC0415
    from trainable_candle.families.causal_lm import CausalLM  # noqa: PLC0415
    from trainable_candle.tasks.text.tokenizer_check import (  # noqa: PLC0415
        check_tokenizer,
        context_of,
        row_length,
    )

    weights = weights_of(CausalLM.name, given.get("weights"))
    family = CausalLM(weights, dtype=None, device="cpu")  # only its tokenizer and settings are used
    tokenizer, settings = family.tokenizer, _settings(family)
    vocabulary = settings.get("vocab_size")
    if vocabulary is not None:
        check_tokenizer(tokenizer, family.weights, vocabulary)
    options = TextOptions(
        sequence_length=row_length(given.get("sequence_length"), context_of(settings)),
        train_on=given.get("train_on", TextOptions.train_on),
        preferences=given.get("objective") == "dpo",
        skip_bad=given.get("skip_bad", False),
        vocabulary=vocabulary,
    )
    train, validation = load_texts(dataset_path(given["dataset"]), tokenizer, options)
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print(legend(colour=colour))
    for number, example in enumerate(train.examples[: given.get("examples", 3)], 1):
        learnt = int(example.learnt.sum())
        print(f"\nexample {number}: {len(example)} tokens, {learnt} learnt")
        print(shown(example, tokenizer, colour=colour))
    print(f"\n{tokenizer.summary()}\n{train.summary()}")
    # Training packs several examples into each row.
    rows = len(best_fit([len(example) for example in train.examples], options.sequence_length))
    percent = 100 * train.tokens / (rows * options.sequence_length)
    print(f"  packed: {rows} rows of {options.sequence_length} tokens, {percent:.0f} % full")
    if validation is not None:
        print(validation.summary().replace("dataset:", "validation:", 1))
    return 0


def _settings(family: CausalLM) -> Mapping[str, Any]:
    """Return the model's configuration; empty if there is neither a GGUF file nor `config.json`."""
    # An expensive import, after the flags are parsed.
    from trainable_candle.text.tokenizer_files import read_object  # noqa: PLC0415

    weights = family.weights
    if weights.suffix == ".gguf":
        return family.settings
    # `family.settings` would require the files of weights too, which only training needs.
    return read_object((weights if weights.is_dir() else weights.parent) / "config.json")


def make_parser(program: str) -> Parser:
    """Make the parser of the flags."""
    parser = Parser(
        program,
        "Show the tokens of a data set for language models, and which of them are learnt.",
        "--dataset PATH [options]",
    )
    group = parser.add_argument_group("options")
    group.add_argument(
        "--weights",
        metavar="PATH",
        help="folder of a model, its tokenizer.json or a GGUF file (default: the built-in model)",
    )
    group.add_argument(
        "--dataset", metavar="PATH", help="file or folder of examples, or a data set of the hub"
    )
    group.add_argument(
        "--examples", metavar="N", type=whole(0), help="number of examples to show (default: 3)"
    )
    group.add_argument(
        "--sequence-length",
        metavar="N",
        type=whole(2),
        help="most tokens of an example (default: 2048, or the model's context if it is shorter)",
    )
    group.add_argument("--objective", choices=OBJECTIVES, metavar="NAME", help="sft (default), dpo")
    group.add_argument(
        "--train-on",
        choices=TRAIN_ON,
        metavar="NAME",
        help=f"tokens to learn: {', '.join(TRAIN_ON)} (default: {TRAIN_ON[0]})",
    )
    group.add_argument(
        "--skip-bad", action="store_true", help="leave out lines that cannot be used"
    )
    add_help(group)
    return parser
