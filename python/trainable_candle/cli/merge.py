"""`trainable-candle merge`: write a model with an adapter merged into its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainable_candle.cli.loading import add_model, load_model
from trainable_candle.cli.options import Parser, add_help
from trainable_candle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainable_candle.tasks.text import TextTask


def run(arguments: Sequence[str], program: str) -> int:
    """Merge as the arguments say; returns the exit status."""
    parser = make_parser(program)
    given = parser.parse(arguments)
    parser.require(given, "model", "adapter", "output")

    output = Path(given["output"]).expanduser()
    if "dataset" in given and "to" not in given:
        raise ConfigError("--dataset has no effect without --to; give that, or leave it out")
    task = load_model(given, "cpu", given.get("precision"))
    if "to" in given:
        _quantized(task, given, output)
    else:
        task.save_merged(output)
    print(f"merged model: {output}")
    return 0


def _quantized(task: object, given: Mapping[str, Any], output: Path) -> None:
    """Merge, quantize what was written, and print what that cost."""
    # After the arguments proved right.
    from trainable_candle import families  # noqa: PLC0415
    from trainable_candle.export import quantized  # noqa: PLC0415
    from trainable_candle.tasks.text import TextTask  # noqa: PLC0415

    if given["to"] not in quantized.FORMATS:
        known = ", ".join(quantized.FORMATS)
        raise ConfigError(f"--to is {given['to']}, expected {known}; for GGUF see export --gguf")
    if not isinstance(task, TextTask):
        raise ConfigError(
            f"--to {given['to']} writes language models, and {given['model']} draws images; leave "
            "it out"
        )
    apart = _loss(task, given)
    family = task.family
    layers = [name for name in family.layers() if name.split(".")[-1] in family.targets]
    task.save_merged(output)
    error = quantized.quantize_folder(output, layers)
    print(f"{len(layers)} layers in {given['to']}: relative error of their weights {error:.2%}")
    if apart is not None:
        merged = families.load(family.name, output, given.get("precision"), "cpu")
        loss = merged.loss_on(given["dataset"])  # type: ignore[attr-defined]
        print(f"loss: with the adapter apart {apart:.4f}, merged and quantized {loss:.4f}")


def _loss(task: TextTask, given: Mapping[str, Any]) -> float | None:
    return task.loss_on(given["dataset"]) if "dataset" in given else None


def make_parser(program: str) -> Parser:
    """Make the parser of the flags."""
    parser = Parser(
        program,
        "Write a model with an adapter merged into its weights.",
        "--model NAME --adapter FILE --output DIR [options]",
    )
    group = parser.add_argument_group("options")
    add_model(group, "dtype of the written weights (default: as stored)")
    group.add_argument("--output", metavar="DIR", help="new folder, or .safetensors file")
    group.add_argument(
        "--to", metavar="FORMAT", help="quantize language models: nf4, as bitsandbytes stores it"
    )
    group.add_argument(
        "--dataset", metavar="PATH", help="with --to: texts to compare the loss before and after on"
    )
    add_help(group)
    return parser
