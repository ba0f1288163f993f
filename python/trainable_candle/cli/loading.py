"""Adds the flags that select a model, and loads that model."""

from __future__ import annotations

import argparse
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from trainable_candle.cli.adapter_files import scales_of
from trainable_candle.cli.options import factor
from trainable_candle.errors import ConfigError, Error
from trainable_candle.settings import flag
from trainable_candle.settings.checks import existing_adapter
from trainable_candle.settings.machine import FORMATS, SAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from trainable_candle.tasks.latent import LatentTask
    from trainable_candle.tasks.task import Task
    from trainable_candle.tasks.text import TextTask


def add_model(group: argparse._ArgumentGroup, precision: str) -> None:
    """Add the flags that `load_model` reads, and `--precision`, from which its caller sets `dtype`.

    Args:
        group: the group of flags to which these are added.
        precision: the help text of `--precision`.
    """
    group.add_argument(
        "--model", metavar="NAME", help="which model; `trainable-candle info` lists them"
    )
    group.add_argument(
        "--weights", metavar="PATH", help="the model's checkpoint (default: the built-in one)"
    )
    group.add_argument(
        "--text-encoder",
        metavar="PATH",
        action="append",
        help="a text encoder outside --weights; may be given again",
    )
    group.add_argument("--vae", metavar="PATH", help="the autoencoder, if outside --weights")
    group.add_argument(
        "--adapter", metavar="FILE", action="append", help="an adapter; several LoRAs add up"
    )
    group.add_argument(
        "--scale",
        metavar="X",
        type=factor,
        action="append",
        help="factor on an adapter's effect: once for all, or once per --adapter (default: 1)",
    )
    group.add_argument("--precision", metavar="NAME", help=precision)
    group.add_argument(
        "--base-precision",
        metavar="NAME",
        choices=(SAME, *FORMATS),  # SAME, the default, does not quantize.
        help=f"format of the model's linear layers: {', '.join(FORMATS)}",
    )
    group.add_argument("--dtype", dest="precision", help=argparse.SUPPRESS)


def reject(given: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    """Raise an error if flags are given that have no effect here.

    Args:
        given: the given flags and their values.
        names: the flags that have no effect here.
        where: the other flag that is the reason; ends the sentence "--vae has no effect with".

    Raises:
        ConfigError: some of these flags are given; the message names them.
    """
    useless = [flag(name) for name in names if name in given]
    if useless:
        verb, them = ("have", "them") if len(useless) > 1 else ("has", "it")
        raise ConfigError(f"{', '.join(useless)} {verb} no effect with {where}; leave {them} out")


def load_model(
    given: Mapping[str, Any],
    device: str,
    dtype: str | None,
    check: Callable[[Task], None] = lambda _: None,
    tell: Callable[[str], None] = print,
) -> Task:
    """Load the model and the adapters that the flags name, and attach the adapters.

    Args:
        given: the given flags and their values.
        device: where to load the model.
        dtype: the dtype of the weights; None keeps the stored dtype.
        check: called before weights are loaded; raises an error if the task does not suit.
        tell: gets notes about quantization that differs from that in the adapters' training.

    Raises:
        ConfigError: a flag has no effect or a wrong value, there is no model of this name, the
            model needs weights and none are given, the model takes one adapter and several are
            given, or the number of scales is neither 1 nor the number of adapters.
        MissingFileError: a file does not exist; the message names the flag.
        WeightsFormatError: the weights or the adapter are damaged, or belong to another model.
    """
    # Expensive imports, after the flags are parsed.
    from trainable_candle import families  # noqa: PLC0415
    from trainable_candle.cli.roundings import notes  # noqa: PLC0415
    from trainable_candle.settings import TrainConfig  # noqa: PLC0415
    from trainable_candle.settings.texts import Texts  # noqa: PLC0415
    from trainable_candle.tasks.latent import LatentTask  # noqa: PLC0415

    if "scale" in given and "adapter" not in given:
        raise ConfigError(
            "--scale has no effect without --adapter; give --adapter, or leave --scale out"
        )
    # Only language models have the settings `Texts`.
    if Texts in families.find(given["model"]).groups:
        where = f"--model {given['model']}, whose weights are all in --weights"
        reject(given, ("text_encoder", "vae"), where)

    # Only the command `merge` has the flags --resolution, --max-side and --to.
    config = TrainConfig(
        text_encoder=given.get("text_encoder", []),
        vae=given.get("vae"),
        base_precision=given.get("base_precision", SAME),
        **{name: given[name] for name in ("resolution", "max_side") if name in given},
    )
    task = families.load(given["model"], given.get("weights"), dtype, device, config)
    check(task)
    if "adapter" in given:
        adapters = [
            existing_adapter("adapter", Path(text).expanduser()) for text in given["adapter"]
        ]
        scales = scales_of(given, len(adapters))
        base_format = config.base_format or stored_format(task)
        for path in adapters:
            # `merge --to` names the format to which the merged weights are quantized.
            for note in notes(path, base_format, given.get("to")):
                tell(note)
        if len(adapters) == 1:
            with _naming_base(adapters[0], given):
                task.load_adapter(adapters[0], scales[0])
        elif isinstance(task, LatentTask):
            task.load_adapters(list(zip(adapters, scales, strict=True)))
        else:
            raise ConfigError(
                f"--adapter: {given['model']} takes one adapter at a time; merge one into the "
                "model, and give the merged model as --weights"
            )
    return task


def stored_format(task: Task) -> str | None:
    """Return the quantized format of the base in its file; None if the base is not quantized.

    The result is also None if some of the layers that can be quantized are in another format.
    """
    from trainable_candle import inspect  # noqa: PLC0415 - expensive

    family = cast("LatentTask | TextTask", task).family
    base = inspect(family.weights).parts.get(family.component)
    return base.stored_format if base else None


@contextmanager
def _naming_base(adapter: Path, given: Mapping[str, Any]) -> Iterator[None]:
    """Return a context whose errors also name the base model in the adapter's peft configuration.

    An error stays as it is if --weights is given, or if the configuration names no base.

    Raises:
        Error: an error of the same class as the one in the context.
    """
    try:
        yield
    except Error as error:
        from trainable_candle.export.verdicts import settings_of  # noqa: PLC0415 - expensive

        base = (settings_of(adapter) or {}).get("base_model_name_or_path")
        if "weights" in given or not base:
            raise
        raise type(error)(
            f"{error}\n  without --weights, the model is the built-in one; the adapter's base is "
            f"{base}, says its adapter_config.json: give --weights {base}"
        ) from None
