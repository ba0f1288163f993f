"""The errors for a run that does not fit into memory; they say what to change."""

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
"""Settings with values that may need less memory, in the order in which `_what_fits` tries them.

A run may need less with its own value, such as a rank below 128; then `_what_fits` keeps it.
"""
_SMALL_RANKS: Final[tuple[tuple[str, Any], ...]] = (("rank", 16), ("rank", 4))
"""Settings that `_what_fits` tries after all others, because small ranks limit the training."""
_ADVICE: Final = {
    "resolution": "a smaller --resolution",
    "sequence_length": "a shorter --sequence-length",
}
"""Setting -> advice to lower it, for runs that fit with none of the values that `_what_fits` tries.
"""


def refuse(
    found: Estimate,
    smallest: TrainConfig,
    groups: Collection[type[Group]],
    limit: float,
    estimate: Callable[[TrainConfig], Estimate],
) -> NoReturn:
    """Raise the error for a run that does not fit into the memory of its device.

    Args:
        found: the estimate of the run before a plan saves memory.
        smallest: the run's settings. Those that the user left to the plan have the values that need
            least memory.
        groups: the groups of settings that the model takes.
        limit: available bytes.
        estimate: a function that estimates the run with other settings.

    Raises:
        OutOfMemoryError: always. The message names settings that would fit; if there are none, it
            advises smaller inputs or another machine.
    """
    changes, needed = _what_fits(smallest, limit, estimate)
    problem = f"{found.place}: the run needs about {size(found.peak)}, {size(limit)} are available"
    if changes is None:
        raise OutOfMemoryError(
            f"{problem}; with the smallest settings the run would need {size(needed)}: use "
            f"{_advice(groups)}another machine"
        )
    flags = " ".join(as_flag(name, value) for name, value in changes.items())
    raise OutOfMemoryError(f"{problem}; with {flags} the run would need {size(needed)}")


def refuse_for_the_host(
    found: Estimate,
    fitting: Estimate,
    groups: Collection[type[Group]],
    host: tuple[float, float],
) -> NoReturn:
    """Raise the error for a run that fits on the GPU only with more host memory than is free.

    Args:
        found: the estimate of the run before a plan saves memory.
        fitting: the estimate with settings that fit on the GPU.
        groups: the groups of settings that the model takes.
        host: the bytes of host memory that all processes of the machine need together, and the
            bytes that are free.

    Raises:
        OutOfMemoryError: always.
    """
    needed, free = host
    raise OutOfMemoryError(
        f"memory of the host: the run needs about {size(found.peak)} on the GPU. With a part of "
        f"these data in host memory, the run needs {size(fitting.peak)} on the GPU and "
        f"{size(needed)} in host memory, where {size(free)} are free; end other programs, or use "
        f"{_advice(groups)}another machine"
    )


def as_flag(name: str, value: Any) -> str:
    """Return a setting as users give it on the command line."""
    if isinstance(value, bool):
        return flag(name) if value else flag(f"no_{name}")
    return f"{flag(name)} {value}"


def _advice(groups: Collection[type[Group]]) -> str:
    """Return the advice for settings of `groups`, each followed by "or"."""
    return "".join(f"{text} or " for name, text in _ADVICE.items() if group_of(name) in groups)


def _what_fits(
    config: TrainConfig, limit: float, estimate: Callable[[TrainConfig], Estimate]
) -> tuple[dict[str, Any] | None, int]:
    """Change settings, one after the other, until the run fits; keep changes that save memory.

    Returns:
        The changes, or None if the run does not fit even with all of them; and the bytes that the
        run needs with all these changes.
    """
    changes: dict[str, Any] = {}
    unchanged = estimate(config)
    least = unchanged.peak
    for name, value in _smaller(unchanged):
        # Skip settings that the model does not support or that contradict others: these raise
        # errors.
        with contextlib.suppress(ArgumentError, ConfigError):
            needed = estimate(config.with_(**{**changes, name: value})).peak
            if needed >= least:
                continue
            changes[name], least = value, needed
            if least <= limit:
                return changes, least
    return None, least


def _smaller(found: Estimate) -> Iterator[tuple[str, Any]]:
    """Yield settings with values that may need less memory, in the order in which to try them."""
    yield from _SMALLER
    # Weights can be streamed from host memory to a GPU: those of the layers that compute the
    # blocks' modulation, and those of the blocks. `work.blocks` is the number of blocks.
    if found.on_gpu and found.work is not None:
        if found.work.has_modulation:
            yield "stream_modulation", True
        if found.work.blocks:
            yield "stream_blocks", found.work.blocks
    yield from _SMALL_RANKS
