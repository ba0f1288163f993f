"""Checks of settings: the adapter format, the layers to adapt, and the folders of a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainable_candle.data.captions import CAPTION_SUFFIXES
from trainable_candle.data.pixels import SUFFIXES
from trainable_candle.errors import ConfigError
from trainable_candle.outputs import JSON_LOG, LOG
from trainable_candle.settings.adapter import OFT
from trainable_candle.settings.initial import PISSA
from trainable_candle.tasks.estimate import adapted_layers
from trainable_candle.train.adapters import oft_side

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainable_candle.settings import TrainConfig
    from trainable_candle.tasks.estimate import Shape


_MOST_EXAMPLES: Final = 12
"""The most names of layers in a message."""


def check_format(config: TrainConfig, formats: Sequence[str], parts: int) -> None:
    """Check that the format of the adapter files can represent the adapters.

    Args:
        config: the settings.
        formats: the formats that have names for the layers of the model, the default first.
        parts: how many parts of the model get adapters.

    Raises:
        ConfigError: the format cannot represent the adapters; the message names one that can, or
            the setting to leave out if there is none.
    """
    form = config.format or formats[0]
    problem = f"--format {form} cannot represent"
    # What messages advise instead; not diffusers' format, which represents the fewest adapters.
    others = [other for other in formats if other not in {form, "diffusers"}]
    instead = f"give --format {others[0]}" if others else "leave it out"
    if form not in formats:
        raise ConfigError(
            f"{problem} the layers of the model `{config.model}`; give --format {formats[0]}"
        )
    if form == "diffusers" and config.adapter not in {"lora", "dora"}:
        raise ConfigError(f"{problem} --adapter {config.adapter}; {instead}")
    if form in {"diffusers", "peft"} and (config.adapter, config.dora_axis) == ("dora", "input"):
        alternative = next((other for other in formats if other in {"kohya", "comfyui"}), None)
        instead = f"give --format {alternative}" if alternative else "leave --dora-axis out"
        raise ConfigError(f"{problem} --dora-axis input; {instead}")
    # In peft's format, OFT rotates inputs; in every other format, it rotates outputs.
    side = oft_side(config, formats)
    if config.adapter == OFT and (form == "peft") != (side == "input"):
        for_outputs = next((other for other in others if other != "peft"), None)
        alternative = "peft" if side == "input" else for_outputs
        instead = (
            f"give --format {alternative}" if alternative in formats else "leave --oft-side out"
        )
        raise ConfigError(f"{problem} --oft-side {side}; {instead}")
    if form == "peft" and parts > 1:
        raise ConfigError(
            f"{problem} several parts of a model, which --train-text-encoder adapts; {instead}"
        )


def check_targets(
    config: TrainConfig,
    layers: Mapping[str, Shape],
    targets: Sequence[str],
    others: Mapping[str, Shape] | None = None,
) -> None:
    """Check that each pattern of `target_modules` and `exclude_modules` matches a layer.

    Args:
        config: the settings.
        layers: the layers that `target_modules` chooses from: shapes of weights by name.
        targets: the patterns to use if `target_modules` is empty.
        others: layers that get adapters regardless of `target_modules`, such as those of text
            encoders: shapes of weights by name.

    Raises:
        ConfigError: a pattern is not a regular expression or matches no layer, no layer remains, or
            `init` is `pissa` and a remaining layer is a convolution.
    """
    for pattern in config.target_modules:
        if not _matched("--target-modules", pattern, layers):
            raise ConfigError(f"--target-modules: `{pattern}` is not a layer {_examples(layers)}")
    # `chosen`: without regard to `exclude_modules`.
    chosen = adapted_layers(layers, config.target_modules or targets)
    for pattern in config.exclude_modules:
        if not _matched("--exclude-modules", pattern, {**(others or {}), **chosen}):
            raise ConfigError(
                f"--exclude-modules: `{pattern}` is none of the layers that get adapters "
                f"{_examples(chosen)}"
            )
    adapted = adapted_layers(chosen, config.target_modules or targets, config.exclude_modules)
    if not adapted:
        raise ConfigError("--exclude-modules: no layer is left for an adapter")
    # The weight of a linear layer has two dimensions.
    convolutions = [name for name, shape in adapted.items() if len(shape) != 2]
    if config.init == PISSA and convolutions:
        raise ConfigError(
            f"--init pissa is for linear layers, and {convolutions[0]} is a convolution, the first "
            f"of {len(convolutions)}; name all of them in --exclude-modules"
        )


def _matched(option: str, pattern: str, layers: Mapping[str, Shape]) -> Mapping[str, Shape]:
    """Return the layers that a pattern matches.

    Raises:
        ConfigError: the pattern is not a regular expression; the message names the option.
    """
    try:
        return adapted_layers(layers, [pattern])
    except ConfigError:
        raise ConfigError(f"{option}: `{pattern}` is not a regular expression") from None


def _examples(layers: Mapping[str, Shape]) -> str:
    """Return a hint for messages: the last parts of some layers' names."""
    names = [name.split(".") for name in layers]
    # A number alone, as in `to_out.0`, says nothing without the part before it.
    ends = {".".join(parts[-2:] if parts[-1].isdigit() else parts[-1:]) for parts in names}
    # What still begins with a number is left out.
    shown = sorted(end for end in ends if not end[0].isdigit())[:_MOST_EXAMPLES]
    return f"(layers are called {', '.join(shown)}, for example)"


def require_apart(config: TrainConfig, output: Path) -> None:
    """Check that the run does not write over what it reads, or into another data set.

    Raises:
        ConfigError: a data set is the output folder or a log in that folder, `output` is a file, or
            the output folder has an image with a caption.
    """
    written = {path.resolve() for path in (output, output / LOG, output / JSON_LOG)}
    for setting in ("dataset", "validation_dataset"):
        path = getattr(config, setting)
        if path and Path(path).expanduser().resolve() in written:
            raise ConfigError(
                f"{setting}: the run would write into {path}; choose another --output"
            )
    if not output.exists():
        return
    if not output.is_dir():
        raise ConfigError(f"output: {output} exists and is a file, expected a folder")
    names = {path.name for path in output.iterdir()}
    captions = {Path(name).stem for name in names if Path(name).suffix in CAPTION_SUFFIXES}
    for name in sorted(names):
        if Path(name).suffix.lower() in SUFFIXES and Path(name).stem in captions:
            raise ConfigError(
                f"output: {output} is the folder of a data set: it has {name} and its caption; "
                "choose another --output, so that no later run trains on this run's previews"
            )
