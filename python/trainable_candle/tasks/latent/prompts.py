"""Reads prompts with flags in kohya's syntax, and makes the metadata of drawn images.

The metadata have the format of AUTOMATIC1111's web UI (A1111).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.errors import ConfigError
from trainable_candle.settings.previews import SAMPLERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainable_candle.tasks.latent.drawing import DrawingDefaults, SampleOptions

_FLAG: Final = re.compile(r"(?:^|\s)--([a-zA-Z]\S*)")
_LABELS: Final = {"euler": "Euler", "dpmpp_2m": "DPM++ 2M"}
"""Value of the setting `sampler` -> A1111's name of the sampler."""


@dataclass(frozen=True)
class Prompt:
    """A prompt without its flags, and the options that its image is drawn with."""

    text: str
    options: SampleOptions


@dataclass(frozen=True)
class Place:
    """The place of an image in its batch, whose images share one tensor of noise."""

    number: int
    """The index of the image in the batch."""
    count: int
    """The number of images in the batch."""


def parse_prompt(text: str, options: SampleOptions) -> Prompt:
    """Read a prompt that flags may follow: `a cat --w 1024 --h 768 --d 1 --n blurry --l 6`.

    Args:
        text: the prompt, followed by flags for width and height (`--w`, `--h`), seed (`--d`),
            negative prompt (`--n`), guidance (`--l`, or `--g` as in kohya's scripts for Flux),
            steps (`--s`) and sampler (`--ss`). All flags are optional. They may be in any order,
            and in upper or lower case.
        options: the options, whose values the flags replace.

    Raises:
        ConfigError: a flag is unknown, given twice, or has an invalid value; or only one of `--w`
            and `--h` is given, and `options` has no size.
    """
    flags = list(_FLAG.finditer(text))
    if not flags:
        return Prompt(text, options)
    # The value of a flag ends where the next flag begins.
    ends = [flag.start() for flag in flags[1:]] + [len(text)]
    changes: dict[str, Any] = {}
    sides: dict[str, int] = {}
    for flag, end in zip(flags, ends, strict=True):
        key, value = flag[1].lower(), text[flag.end() : end].strip()
        if key in sides:
            raise ConfigError(f"prompt {text!r}: --{key} is given a second time")
        if key in {"w", "h"}:
            sides[key] = _number(text, key, value, int, 1)
        elif key in _READERS:
            name, read = _READERS[key]
            if name in changes:
                raise ConfigError(f"prompt {text!r}: --{key} sets {name} a second time")
            changes[name] = read(text, key, value)
        else:
            known = ", ".join(f"--{name}" for name in ("w", "h", *_READERS))
            raise ConfigError(
                f"prompt {text!r}: --{flag[1]} is not known, expected one of {known}, with a space "
                "before the value"
            )
    if sides:
        width, height = options.size or (None, None)
        width, height = sides.get("w", width), sides.get("h", height)
        if width is None or height is None:
            raise ConfigError(f"prompt {text!r}: give both --w and --h")
        changes["size"] = (width, height)
    return Prompt(text[: flags[0].start()].strip(), replace(options, **changes))


def _number(text: str, key: str, value: str, kind: Callable[[str], Any], low: float) -> Any:
    """Return the number in a flag's value.

    Args:
        text: the prompt with all flags, for the error message.
        key: the flag, for the error message.
        value: the text of the value.
        kind: int or float.
        low: the least valid number.

    Raises:
        ConfigError: the value is not such a number, or is 2**64 or more.
    """
    try:
        number = kind(value)
    except ValueError:
        number = None
    if number is None or not low <= number < 2**64:
        form = " without a fraction" if kind is int else ""
        raise ConfigError(
            f"prompt {text!r}: --{key} is {value!r}, expected a number of at least {low:g} and "
            f"below 2**64{form}"
        )
    return number


def _sampler(text: str, key: str, value: str) -> str:
    if value not in SAMPLERS:
        known = ", ".join(SAMPLERS)
        raise ConfigError(f"prompt {text!r}: --{key} is {value!r}, expected one of {known}")
    return value


_READERS: Final[dict[str, tuple[str, Callable[[str, str, str], Any]]]] = {
    "d": ("seed", lambda text, key, value: _number(text, key, value, int, 0)),
    "s": ("steps", lambda text, key, value: _number(text, key, value, int, 1)),
    "l": ("guidance", lambda text, key, value: _number(text, key, value, float, 0)),
    "g": ("guidance", lambda text, key, value: _number(text, key, value, float, 0)),
    "n": ("negative_prompt", lambda _text, _key, value: value),
    "ss": ("sampler", _sampler),
}
"""Flag -> the field of `SampleOptions` that the flag sets, and the function that reads the value.

The function takes the prompt with all flags and the flag (both for its error messages), and the
text of the value.
"""


def infotext(
    prompt: Prompt, model: str, used: DrawingDefaults, size: tuple[int, int], place: Place
) -> str:
    """Return how an image was drawn, in A1111's format for the entry `parameters` of a PNG.

    Args:
        prompt: the prompt, and the options with the seed of the image's batch.
        model: the model's name.
        used: the steps and the guidance that were used.
        size: width and height, px.
        place: the image's place in its batch.
    """
    options = prompt.options
    lines = [prompt.text]
    # A guidance of 1 turns guidance off, and with it the negative prompt.
    if options.negative_prompt and used.guidance != 1:
        lines.append(f"Negative prompt: {options.negative_prompt}")
    facts = {
        "Steps": used.steps,
        "Sampler": _LABELS[options.sampler or "euler"],
        "CFG scale": f"{used.guidance:g}",
        "Seed": options.seed,
        "Size": f"{size[0]}x{size[1]}",
        # Commas separate these facts, so the name of the model must not contain one.
        "Model": model.replace(",", " "),
    }
    if place.count > 1:
        facts |= {"Batch size": place.count, "Batch pos": place.number}
    lines.append(", ".join(f"{name}: {value}" for name, value in facts.items()))
    return "\n".join(lines)
