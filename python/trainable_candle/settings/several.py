"""Settings of training on several GPUs.

The short help omits settings that are `rare`. A `free` setting does not affect the results: with
another value, a resumed run still computes what the earlier run would have computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from trainable_candle.settings import sections
from trainable_candle.settings.setting import Group, Setting

REDUCTIONS: Final = ("f32", "bf16")
"""The dtypes in which GPUs may exchange gradients."""


def _wrong_gpus(config: Any) -> str | None:
    """Return what is wrong with `gpus`; None if it is valid or not set.

    One number is how many GPUs train; several numbers are the indices of these GPUs.
    """
    text = config.gpus
    if text is None or text == "all":
        return None
    numbers = [number.strip() for number in text.split(",")]
    if not all(number.isdecimal() for number in numbers):
        return f"gpus: found {text!r}, expected a number of GPUs, `all`, or GPU indices as in 0,2"
    if len(set(map(int, numbers))) < len(numbers):
        return f"gpus: {text!r} names a GPU twice"
    if len(numbers) == 1 and int(text) < 1:
        return f"gpus: found {text}, expected at least 1; GPU 0 alone is --device cuda:0"
    return None


def _as_text(value: Any) -> Any:
    """Convert a number of GPUs or a list of indices to text; return other values unchanged."""
    if type(value) is int:
        return str(value)
    # A list of one index stays a list, which is rejected: its text would be a number of GPUs.
    if isinstance(value, list) and len(value) > 1 and all(type(index) is int for index in value):
        return ",".join(map(str, value))
    return value


@dataclass(frozen=True)
class Several(Group):
    """The GPUs that train together, and how they exchange gradients."""

    section: ClassVar[str] = sections.MACHINE
    contradictions: ClassVar = (_wrong_gpus,)

    gpus: Annotated[
        str | None,
        Setting(
            "number of GPUs (2), their indices (0,2), or all",
            rare=True,
            free=True,
            synonyms=("devices", "num-processes", "gpu-ids"),
            read=_as_text,
        ),
    ] = None
    effective_batch: Annotated[
        int | None,
        Setting(
            "samples per step on all GPUs together; sets --gradient-accumulation", low=1, rare=True
        ),
    ] = None
    reduce: Annotated[
        str,
        Setting("dtype in which GPUs exchange gradients", choices=REDUCTIONS, rare=True, free=True),
    ] = "f32"
    compare_every: Annotated[
        int,
        Setting(
            "steps between checks that all GPUs have the same adapter; 0: never",
            low=0,
            rare=True,
            free=True,
        ),
    ] = 200
    step_limit: Annotated[
        float,
        Setting("seconds after which a GPU's step counts as hung", low=1, rare=True, free=True),
    ] = 600.0
