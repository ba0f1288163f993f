"""The message for a run that does not fit in memory, and what to change."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, NoReturn

from trainable_candle.errors import ArgumentError, ConfigError, OutOfMemoryError
from trainable_candle.settings import flag
from trainable_candle.settings.config import group_of
from trainable_candle.tasks.estimate import size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from trainable_candle.settings import Group, TrainConfig
    from trainable_candle.tasks.estimate import Estimate

_SMALLER: Final[tuple[tuple[str, Any], ...]] = (
    ("rank", 128),
    ("batch_size", 1),
    ("optimizer", "adamw8bit"),
    ("gradient_checkpointing", "full"),
    ("base_precision", "nf4"),
    ("text_encoder_precision", "nf4"),
    ("cache", "disk"),
    ("train_text_encoder", False),
    ("precision", "bf16"),
)
"""Settings with values that need less memory, in the order in which `_what_fits` adds them."""
_LEAST: Final[tuple[tuple[str, Any], ...]] = (("rank", 16), ("rank", 4))
"""Settings that `_what_fits` tries after all others, because small ranks limit the training."""
_LAST: Final = {
    "resolution": "a smaller --resolution",
    "sequence_length": "a shorter --sequence-length",
}
"""Setting -> advice to lower it, for runs that do not fit even with the smallest settings above."""


def refuse(
    found: Estimate,
    smallest: TrainConfig,
    groups: Collection[type[Group]],
    limit: float,
    estimate: Callable[[TrainConfig], Estimate],
) -> NoReturn:
    """Raise the error for a run that does not fit in memory.

    Args:
        found: the estimate of the run without any savings.
        smallest: the run's settings, with the smallest values for those that a plan may choose.
        groups: the groups of settings that the model takes.
        limit: available bytes.
        estimate: a function that estimates the run with other settings.

    Raises:
        OutOfMemoryError: always; the message names settings that would fit.
    """
    changes, least = _what_fits(smallest, limit, estimate)
    start = f"{found.place}: the run needs about {size(found.peak)}, {size(limit)} are available"
    if changes is None:
        raise OutOfMemoryError(
            f"{start}; with the smallest settings the run would need {size(least)}: use "
            f"{_last(groups)}another machine"
        )
    flags = " ".join(as_flag(name, value) for name, value in changes.items())
    raise OutOfMemoryError(f"{start}; with {flags} the run would need {size(least)}")


def refuse_for_the_host(
    found: Estimate,
    fitting: Estimate,
    groups: Collection[type[Group]],
    host: tuple[float, float],
) -> NoReturn:
    """Raise the error for a run that fits on the GPU only with more host memory than there is.

    Args:
        found: the estimate of the run without any savings.
        fitting: the estimate with settings that fit on the GPU.
        groups: the groups of settings that the model takes.
        host: the bytes of host memory that all processes of the machine need together, and the
            bytes that are available.

    Raises:
        OutOfMemoryError: always.
    """
    need, there = host
    raise OutOfMemoryError(
        f"memory of the host: the run needs about {size(found.peak)} on the GPU. With a part of "
        f"these data in host memory, the run needs {size(fitting.peak)} on the GPU and "
        f"{size(need)} in host memory, of which {size(there)} are free; end other programs, or use "
        f"{_last(groups)}another machine"
    )


def as_flag(name: str, value: Any) -> str:
    """Return a setting as users give it on the command line."""
    return flag(name) if value is True else f"{flag(name)} {value}"


def _last(groups: Collection[type[Group]]) -> str:
    return "".join(f"{text} or " for name, text in _LAST.items() if group_of(name) in groups)


def _what_fits(
    config: TrainConfig, limit: float, estimate: Callable[[TrainConfig], Estimate]
) -> tuple[dict[str, Any] | None, int]:
    """Change settings, one after the other, until the run fits.

    Returns:
        The changes, or None if the run does not fit even with all of them; and the bytes that the
        run needs with the changes.
    """
    changes: dict[str, Any] = {}
    least = estimate(config).peak
    for name, value in _smaller(estimate(config)):
        # Skip settings that the model does not support or that contradict others.
        with contextlib.suppress(ArgumentError, ConfigError):
            needed = estimate(config.with_(**{**changes, name: value})).peak
            if needed >= least:
                continue
            changes[name], least = value, needed
            if least <= limit:
                return changes, least
    return None, least


def _smaller(found: Estimate) -> Iterator[tuple[str, Any]]:
    yield from _SMALLER
    if found.on_gpu and found.work is not None:
        if found.work.has_modulation:
            yield "stream_modulation", True
        if found.work.blocks:
            yield "stream_blocks", found.work.blocks
    yield from _LEAST
