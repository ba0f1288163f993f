"""`trainable-candle train` and `train-lora`: fine-tune a model on images or texts."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.cli.options import Parser, add_settings
from trainable_candle.distributed.launch import chosen_gpus, follow_launcher, is_launched, launch
from trainable_candle.distributed.world import from_environment
from trainable_candle.errors import ConfigError
from trainable_candle.outputs import CONFIG
from trainable_candle.settings import TrainConfig, flag
from trainable_candle.settings.checks import settings_without_effect
from trainable_candle.settings.config import read_settings
from trainable_candle.settings.presets import IMAGES, LENGTHS, PRESET, TEXTS, completed, described

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

_SEQUENCE_LENGTH: Final = "sequence_length"
"""The setting whose value in a preset is reduced to the model's context, if this is shorter."""


def run(arguments: Sequence[str], program: str) -> int:
    """Train as the arguments say; returns the exit status."""
    parser = make_parser(program, rare=False)
    given = parser.parse(arguments)
    if given.pop("help_all", False):
        make_parser(program, rare=True).print_help()
        print("\npresets for images:", *described(IMAGES), sep="\n")
        print("\npresets for texts:", *described(TEXTS), sep="\n")
        print("\nweights to download:", *_downloads(), sep="\n")
        return 0
    config = read_config(given)
    world = from_environment()
    # `launch` runs this function again in each process that it starts, and these processes must not
    # launch others. If `launch` starts a single process, that process has no world; there,
    # `is_launched` returns True.
    if config.gpus is not None and world is None and not is_launched():
        return _launch(config, arguments)
    follow_launcher()  # From here on, this process ends with the launcher, if there is one.

    # An expensive import, after the arguments are checked.
    from trainable_candle.run import train_adapter  # noqa: PLC0415

    result = train_adapter(config, world=world, report=lambda line: print(line, flush=True))
    if world is not None and world.rank > 0:
        return 0
    if result.completed:
        return 0
    print(
        f"stopped after step {result.step} of {config.steps}; continue with:\n"
        f"  {program} --config {shlex.quote(str(result.output / CONFIG))} --resume latest",
        file=sys.stderr,
    )
    # As in a shell: 128 plus the number of the signal.
    return 128 + result.stopped_by if result.stopped_by else 0


def _downloads() -> Iterator[str]:
    """Yield a paragraph for each model to download: where to get it, its size and its licence."""
    from trainable_candle import families  # noqa: PLC0415 - only the long help needs them

    for name in families.NAMES:
        if download := families.find(name).download:
            yield fill(f"{name}: {download}", 80, initial_indent="  ", subsequent_indent="    ")


def _launch(config: TrainConfig, arguments: Sequence[str]) -> int:
    """Train in the processes that `--gpus` asks for on this machine; returns the exit status."""
    config.require("model", "dataset", "output")
    gpus = str(config.gpus)
    on_gpu = config.device != "cpu"
    if config.device not in {"auto", "cuda", "cpu"}:
        raise ConfigError(f"gpus: --device {config.device} names one GPU; leave --device out")
    if not (on_gpu or gpus.strip().isdecimal()):
        raise ConfigError(
            f"gpus: {gpus} selects GPUs, and --device cpu uses none; give the number of "
            "processes, or leave --device out"
        )
    # With `--device cpu`, `--gpus` is a number of processes, and `launch` only counts the indices.
    indices = chosen_gpus(gpus) if on_gpu else list(range(int(gpus)))
    output = Path(config.output).expanduser()
    # An expensive import, after the other checks.
    from trainable_candle.tasks.checks import require_apart  # noqa: PLC0415

    # The check that the output folder is apart from the data sets must precede `launch`, whose
    # processes write logs into the output folder.
    require_apart(config, output)
    return launch(arguments, indices, on_gpu=on_gpu, output=output)


def make_parser(program: str, *, rare: bool) -> Parser:
    """Make the parser of the flags; if `rare`, its help shows rarely needed flags too."""
    parser = Parser(
        program,
        "Fine-tune a model on images or texts. Flags override --config.",
        "--model NAME --dataset DIR --output DIR [options]",
    )
    add_settings(parser, rare=rare)
    return parser


def read_config(given: dict[str, Any]) -> TrainConfig:
    """Return the configuration: the flags, then the file of `--config`, then the preset.

    Each of these gives only the settings that those before it leave out.

    Raises:
        ConfigError: the file, a flag or the preset is wrong, or a preset is given without a model.
        MissingFileError: there is no such file, or no such weights.
        WeightsFormatError: the weights of a language model with a preset are damaged, or of another
            model.
    """
    flags = dict(given)
    path = flags.pop("config", None)
    source = "command line"
    values = flags
    if path is not None:
        source = f"{path} with the flags given" if flags else str(path)
        stored = read_settings(path)
        if LENGTHS & flags.keys():
            # `LENGTHS` are `steps` and `epochs`. A run's config.yaml has `steps` even if the user
            # gave `epochs`. So one of them in the flags replaces both in the file.
            stored = {name: value for name, value in stored.items() if name not in LENGTHS}
        values = {**stored, **flags}
    preset = values.pop(PRESET, None)
    if preset is not None:
        from trainable_candle import families  # noqa: PLC0415 - only a preset needs them

        if not values.get("model"):
            raise ConfigError(f"--preset {preset} depends on the model: give --model, too")
        by_hand = frozenset(values)  # the settings that the user gave, by flags or in the file
        values = completed(values, preset, families.presets(values["model"]))
        # Drop the preset's settings that have no effect. Settings of the user without effect stay:
        # they are errors.
        try:
            # Pairs of a condition that does not hold and the settings that depend on it.
            idle = settings_without_effect(TrainConfig.from_mapping(values, source))
        except ConfigError as error:
            raise _naming_preset(error, preset, values.keys() - by_hand) from None
        for name in {name for _, names in idle for name in names} - by_hand:
            del values[name]
        if _SEQUENCE_LENGTH in values.keys() - by_hand:
            context = _context(values["model"], values.get("weights"))
            values[_SEQUENCE_LENGTH] = min(values[_SEQUENCE_LENGTH], context)
    return TrainConfig.from_mapping(values, source)


def _context(model: str, weights: str | None) -> int:
    """Return the context of a language model: the most tokens of a text that it was made for.

    Raises:
        ConfigError, MissingFileError, WeightsFormatError: the weights are missing, damaged, or of
            another model.
    """
    from trainable_candle import families  # noqa: PLC0415 - only a preset needs them
    from trainable_candle.tasks.text import TextTask  # noqa: PLC0415

    task = families.load(model, weights, None, "cpu")
    assert isinstance(task, TextTask)
    return task.family.context


def _naming_preset(error: ConfigError, preset: str, names: Collection[str]) -> ConfigError:
    """Return an error that also says which settings in its message come from the preset.

    Args:
        error: the original error; it is returned itself if it mentions no such setting.
        preset: the preset's name.
        names: the settings that the preset gave.
    """
    # Messages mention a setting by its name or by its flag: `ema_decay` or `--ema-decay`.
    words = re.findall(r"[a-z]\w+", str(error).replace("-", "_"))
    named = [flag(name) for name in sorted(names) if name in words]
    if not named:
        return error
    verb, them = ("comes", "it") if len(named) == 1 else ("come", "them")
    return ConfigError(
        f"{error}; {', '.join(named)} {verb} from --preset {preset}: give {them} another value"
    )
