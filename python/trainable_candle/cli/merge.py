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
"""Flags that apply only to images of `--dataset`, on which losses are computed."""
_UNMERGED: Final = ("adapter", "scale", "base_precision")
"""Flags of the unmerged model, which do not apply to the merged one."""


def run(arguments: Sequence[str], program: str) -> int:
    """Merge or quantize as the arguments say, and return the exit status."""
    parser = make_parser(program)
    given = parser.parse(arguments)
    # With --to, a model without an adapter may be quantized.
    parser.require(given, "model", *([] if "to" in given else ["adapter"]), "output")

    output = Path(given["output"]).expanduser()
    if "to" in given:
        _quantize(given, output)
    elif "dataset" in given:
        raise ConfigError("--dataset has no effect without --to; give --to, or leave --dataset out")
    else:
        _require_no_sizes(given)
        task = load_model(given, "cpu", given.get("precision"))
        task.save_merged(output)
        base_format = _base_format(task, given)
        if base_format is not None:
            print(
                f"note: the base was dequantized from {base_format}; "
                "the merged model is not quantized"
            )
    print(f"{'merged' if 'adapter' in given else 'quantized'} model: {output}")
    return 0


def _base_format(task: Task, given: Mapping[str, Any]) -> str | None:
    """Return the quantized format of the base, for a message; None if it is not quantized.

    Without `--base-precision`, the format is that of the file, provided that the file stores all
    layers that can be quantized in one format. A GGUF file may mix formats.
    """
    precision = given.get("base_precision", SAME)
    if precision != SAME:
        return str(precision)
    if cast("LatentTask | TextTask", task).family.weights.suffix == ".gguf":
        return "the file's formats"
    return stored_format(task)


def _quantize(given: Mapping[str, Any], output: Path) -> None:
    """Merge, if an adapter is given, and write quantized weights; print losses with `--dataset`."""
    # Expensive imports, after the flags are parsed.
    from trainable_candle.export.quantized import FORMATS  # noqa: PLC0415
    from trainable_candle.tasks.latent import LatentTask  # noqa: PLC0415
    from trainable_candle.tasks.text import TextTask  # noqa: PLC0415

    to = given["to"]
    if to not in FORMATS:
        known = ", ".join(FORMATS)
        raise ConfigError(f"--to is {to}, expected one of {known}; for GGUF see export --gguf")
    # `load_model` calls `check` before it loads weights, so that a wrong flag is reported at once.
    check = partial(_require_writable, given=given, output=output)
    task = load_model(given, "cpu", given.get("precision"), check)
    if isinstance(task, LatentTask):
        _quantize_image_model(task, given, output)
    elif isinstance(task, TextTask):
        before = _loss(task, given)
        _quantize_text_model(task, given.get("adapter"), output, to)
        _compare(before, lambda: _load_unadapted({**given, "weights": str(output)}), given)


def _require_writable(task: Task, given: Mapping[str, Any], output: Path) -> None:
    """Check that a model of this kind can be quantized and written as the flags say.

    Raises:
        ConfigError: it cannot, or a flag for images of `--dataset` is given without such images.
    """
    from trainable_candle.tasks.latent import LatentTask  # noqa: PLC0415 - expensive

    if isinstance(task, LatentTask):
        task.family.require_quantized(output, given["to"])
    else:
        cast("TextTask", task).require_output(output)
    if not isinstance(task, LatentTask) or "dataset" not in given:
        _require_no_sizes(given)


def _quantize_image_model(task: LatentTask, given: Mapping[str, Any], output: Path) -> None:
    """Merge, quantize and write an image model; print losses with `--dataset`."""
    before = _loss(task, given)
    if before is not None:
        # Computing the loss frees parts of the model that `save_merged` writes: load them again.
        # `tell` prints nothing: the first load has printed its notes.
        again = load_model(given, "cpu", given.get("precision"), tell=lambda _: None)
        task = cast("LatentTask", again)
    task.save_merged(output, given["to"])

    def load_merged() -> Task:
        # A merged file has no tokenizers. So read only the changed parts from `output`, and
        # everything else from --weights.
        merged = cast("LatentTask", _load_unadapted(given))
        family = cast("PipelineFamily[Any]", merged.family)
        family.use_parts(output, {family.component, *task.adapted})
        return merged

    _compare(before, load_merged, given)


def _load_unadapted(given: Mapping[str, Any]) -> Task:
    """Load the model that the flags name, without the adapter and without quantizing it."""
    flags = {name: value for name, value in given.items() if name not in _UNMERGED}
    return load_model(flags, "cpu", given.get("precision"))


def _compare(
    before: float | None, load_written: Callable[[], Task], given: Mapping[str, Any]
) -> None:
    """Print the losses before and after; print nothing if `before` is None (no `--dataset`)."""
    if before is not None:
        after = _loss(load_written(), given)
        if "adapter" in given:
            print(f"loss: adapter not merged {before:.4f}, merged and quantized {after:.4f}")
        else:
            print(f"loss: before {before:.4f}, quantized {after:.4f}")


def _require_no_sizes(given: Mapping[str, Any]) -> None:
    """Check that no flag of `_SIZES` is given; the caller has no images of `--dataset`.

    Raises:
        ConfigError: such a flag is given.
    """
    for name in _SIZES:
        if name in given:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} has no effect without --dataset of images; leave it out")


def _quantize_text_model(
    task: TextTask, adapters: Sequence[str] | None, output: Path, to: str
) -> None:
    """Merge, quantize and write a language model; print the relative error of the weights."""
    from trainable_candle.cli.roundings import learned_scales  # noqa: PLC0415
    from trainable_candle.export.quantized import quantize_folder  # noqa: PLC0415

    family = task.family
    layers = [name for name in family.layers() if name.split(".")[-1] in family.targets]
    # By layer, factors on the scales of the quantized weights, if the adapter has learned them.
    factors = {}
    if adapters:  # A language model takes only one.
        factors = learned_scales(adapter_in(Path(adapters[0]).expanduser()), to)
    task.save_merged(output)
    error = quantize_folder(output, layers, to, factors)
    print(f"{len(layers)} layers in {to}: relative error of their weights {error:.2%}")


def _loss(task: Task, given: Mapping[str, Any]) -> float | None:
    """Return the loss on `--dataset`; None without this flag."""
    return task.loss_on(given["dataset"]) if "dataset" in given else None


def make_parser(program: str) -> Parser:
    """Make the parser of the flags."""
    parser = Parser(
        program,
        "Write a model with an adapter merged into its weights, or quantized, or both.",
        "--model NAME [--adapter FILE] --output PATH ...",
    )
    group = parser.add_argument_group("options")
    add_model(group, "dtype of the written weights (default: as stored)")
    group.add_argument(
        "--output", metavar="PATH", help="a new or an empty folder, or a new .safetensors file"
    )
    group.add_argument(
        "--to",
        metavar="FORMAT",
        help="quantize to nf4, int8 or fp8; image models: nf4 writes a folder, the others one file",
    )
    group.add_argument(
        "--dataset",
        metavar="PATH",
        help="with --to: print the losses on this data before and after merging and quantizing",
    )
    group.add_argument(
        "--resolution", metavar="PX", type=whole(1), help="resolution of the images of --dataset"
    )
    group.add_argument(
        "--max-side", metavar="PX", type=whole(1), help="longest side of the images of --dataset"
    )
    add_help(group)
    return parser
