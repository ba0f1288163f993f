"""`trainable-candle merge`: write a model with an adapter merged into its weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.cli.loading import add_model, load_model
from trainable_candle.cli.options import Parser, add_help
from trainable_candle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainable_candle.tasks.task import Task
    from trainable_candle.tasks.text import TextTask


_BEFORE: Final = ("adapter", "scale", "base_precision")
"""The flags of what is merged, which the merged model has no more."""


def run(arguments: Sequence[str], program: str) -> int:
    """Merge as the arguments say; returns the exit status."""
    parser = make_parser(program)
    given = parser.parse(arguments)
    parser.require(given, "model", "adapter", "output")

    output = Path(given["output"]).expanduser()
    if "to" in given:
        _quantized(given, output)
    elif "dataset" in given:
        raise ConfigError("--dataset has no effect without --to; give that, or leave it out")
    else:
        load_model(given, "cpu", given.get("precision")).save_merged(output)
    print(f"merged model: {output}")
    return 0


def _quantized(given: Mapping[str, Any], output: Path) -> None:
    """Merge, quantize what is written, and print what that cost."""
    # After the arguments proved right.
    from trainable_candle.export.quantized import FORMATS  # noqa: PLC0415
    from trainable_candle.tasks.latent import LatentTask  # noqa: PLC0415
    from trainable_candle.tasks.text import TextTask  # noqa: PLC0415

    to = given["to"]
    if to not in FORMATS:
        known = ", ".join(FORMATS)
        raise ConfigError(f"--to is {to}, expected one of {known}; for GGUF see export --gguf")
    task = load_model(given, "cpu", given.get("precision"))
    if isinstance(task, LatentTask) and to == "nf4":
        raise ConfigError("--to nf4 writes language models; for image models give fp8 or int8")
    apart = _loss(task, given)
    if isinstance(task, LatentTask):
        if apart is not None:
            # Measuring has dropped parts that are written.
            task = load_model(given, "cpu", given.get("precision"))
        assert isinstance(task, LatentTask)
        task.save_merged(output, to)
    elif isinstance(task, TextTask):
        _quantized_text(task, output, to)
    if apart is not None:
        unadapted = {key: value for key, value in given.items() if key not in _BEFORE}
        merged = load_model({**unadapted, "weights": str(output)}, "cpu", given.get("precision"))
        loss = _loss(merged, given)
        print(f"loss: with the adapter apart {apart:.4f}, merged and quantized {loss:.4f}")


def _quantized_text(task: TextTask, output: Path, to: str) -> None:
    from trainable_candle.export.quantized import quantize_folder  # noqa: PLC0415

    family = task.family
    layers = [name for name in family.layers() if name.split(".")[-1] in family.targets]
    task.save_merged(output)
    error = quantize_folder(output, layers, to)
    print(f"{len(layers)} layers in {to}: relative error of their weights {error:.2%}")


def _loss(task: Task, given: Mapping[str, Any]) -> float | None:
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
        "--to",
        metavar="FORMAT",
        help="quantize: nf4, int8 or fp8; image models int8 or fp8, into a .safetensors file",
    )
    group.add_argument(
        "--dataset", metavar="PATH", help="with --to: data to compare the loss before and after on"
    )
    add_help(group)
    return parser
