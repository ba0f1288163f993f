"""`trainable-candle merge`: write a model with an adapter merged in, or quantized, or both."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from trainable_candle.cli.loading import add_model, load_model, stored_format
from trainable_candle.cli.options import Parser, add_help, whole
from trainable_candle.errors import ConfigError
from trainable_candle.outputs import adapter_in
from trainable_candle.settings.machine import SAME

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from trainable_candle.families.pipeline.family import PipelineFamily
    from trainable_candle.tasks.latent import LatentTask
    from trainable_candle.tasks.task import Task
    from trainable_candle.tasks.text import TextTask


_SIZES: Final = ("resolution", "max_side")
"""Flags for the images of `--dataset`, whose losses are compared."""
_BEFORE: Final = ("adapter", "scale", "base_precision")
"""Flags of the unmerged model, which do not apply to the merged one."""


def run(arguments: Sequence[str], program: str) -> int:
    """Merge as the arguments say; returns the exit status."""
    parser = make_parser(program)
    given = parser.parse(arguments)
    # With --to, the model may be quantized alone.
    parser.require(given, "model", *([] if "to" in given else ["adapter"]), "output")

    output = Path(given["output"]).expanduser()
    if "to" in given:
        _quantized(given, output)
    elif "dataset" in given:
        raise ConfigError("--dataset has no effect without --to; give --to, or leave --dataset out")
    else:
        task = load_model(given, "cpu", given.get("precision"))
        task.save_merged(output)
        form = _format_of(task, given)
        if form is not None:
            print(f"note: the base was dequantized from {form}; the merged model is not quantized")
    print(f"{'merged' if 'adapter' in given else 'quantized'} model: {output}")
    return 0


def _format_of(task: Task, given: Mapping[str, Any]) -> str | None:
    """Return the format of the base that was merged into; None if it was not quantized.

    Without `--base-precision`, the format is that of the file, provided that the file stores all
    layers that can be quantized in one format. A GGUF file may mix formats.
    """
    form = given.get("base_precision", SAME)
    if form != SAME:
        return str(form)
    if cast("LatentTask | TextTask", task).family.weights.suffix == ".gguf":
        return "the file's formats"
    return stored_format(task)


def _quantized(given: Mapping[str, Any], output: Path) -> None:
    """Merge and write quantized weights; print their error and, with `--dataset`, the losses."""
    # Expensive imports, after the flags are parsed.
    from trainable_candle.export.quantized import FORMATS  # noqa: PLC0415
    from trainable_candle.tasks.latent import LatentTask  # noqa: PLC0415
    from trainable_candle.tasks.text import TextTask  # noqa: PLC0415

    to = given["to"]
    if to not in FORMATS:
        known = ", ".join(FORMATS)
        raise ConfigError(f"--to is {to}, expected one of {known}; for GGUF see export --gguf")
    check = partial(_require_format, given=given, output=output)
    task = load_model(given, "cpu", given.get("precision"), check)
    if isinstance(task, LatentTask):
        _quantized_image(task, given, output)
    elif isinstance(task, TextTask):
        before = _loss(task, given)
        _quantized_text(task, given.get("adapter"), output, to)
        _compare(before, lambda: _unadapted({**given, "weights": str(output)}), given)


def _require_format(task: Task, given: Mapping[str, Any], output: Path) -> None:
    """Check that a model of this kind can be quantized and written as the flags say."""
    from trainable_candle.tasks.latent import LatentTask  # noqa: PLC0415 - expensive

    if isinstance(task, LatentTask):
        task.family.require_quantized(output, given["to"])
    else:
        cast("TextTask", task).require_output(output)
    if not isinstance(task, LatentTask) or "dataset" not in given:
        _require_no_sizes(given)


def _quantized_image(task: LatentTask, given: Mapping[str, Any], output: Path) -> None:
    before = _loss(task, given)
    if before is not None:
        # Computing the loss frees parts of the model that `save_merged` writes: load them again.
        again = load_model(given, "cpu", given.get("precision"), tell=lambda _: None)
        task = cast("LatentTask", again)
    task.save_merged(output, given["to"])

    def merged() -> Task:
        # A merged file has no tokenizers. So read only the denoiser from `output`, and everything
        # else from --weights.
        task = cast("LatentTask", _unadapted(given))
        cast("PipelineFamily[Any]", task.family).use_model(output)
        return task

    _compare(before, merged, given)


def _unadapted(given: Mapping[str, Any]) -> Task:
    plain = {key: value for key, value in given.items() if key not in _BEFORE}
    return load_model(plain, "cpu", given.get("precision"))


def _compare(before: float | None, merged: Callable[[], Task], given: Mapping[str, Any]) -> None:
    if before is not None:
        loss = _loss(merged(), given)
        names = ("adapter not merged", "merged and ") if "adapter" in given else ("before", "")
        print(f"loss: {names[0]} {before:.4f}, {names[1]}quantized {loss:.4f}")


def _require_no_sizes(given: Mapping[str, Any]) -> None:
    for name in _SIZES:
        if name in given:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} has no effect without --dataset of images; leave it out")


def _quantized_text(task: TextTask, adapters: Sequence[str] | None, output: Path, to: str) -> None:
    from trainable_candle.cli.roundings import learned_scales  # noqa: PLC0415
    from trainable_candle.export.quantized import quantize_folder  # noqa: PLC0415

    family = task.family
    layers = [name for name in family.layers() if name.split(".")[-1] in family.targets]
    factors = {}
    if adapters:
        factors = learned_scales(adapter_in(Path(adapters[0]).expanduser()), to)
    task.save_merged(output)
    error = quantize_folder(output, layers, to, factors)
    print(f"{len(layers)} layers in {to}: relative error of their weights {error:.2%}")


def _loss(task: Task, given: Mapping[str, Any]) -> float | None:
    return task.loss_on(given["dataset"]) if "dataset" in given else None


def make_parser(program: str) -> Parser:
    """Make the parser of the flags."""
    parser = Parser(
        program,
        "Write a model with an adapter merged into its weights, or quantized, or both.",
        "--model NAME [--adapter FILE] --output DIR ...",
    )
    group = parser.add_argument_group("options")
    add_model(group, "dtype of the written weights (default: as stored)")
    group.add_argument("--output", metavar="DIR", help="new folder, or .safetensors file")
    group.add_argument(
        "--to",
        metavar="FORMAT",
        help="quantize to nf4, int8 or fp8; image models: nf4 writes a folder, the others one file",
    )
    group.add_argument(
        "--dataset",
        metavar="PATH",
        help="with --to: print the losses before and after merging on this data",
    )
    group.add_argument(
        "--resolution", metavar="PX", type=whole(1), help="resolution of the images of --dataset"
    )
    group.add_argument(
        "--max-side", metavar="PX", type=whole(1), help="longest side of the images of --dataset"
    )
    add_help(group)
    return parser
