"""What a run will hold in memory, before anything is loaded, and what to change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import trainable_candle as tc
from trainable_candle.errors import OutOfMemoryError
from trainable_candle.settings import flag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from trainable_candle import LoraConfig
    from trainable_candle.settings import TrainConfig

    Shape = Sequence[int]
    """The shape of a layer's weight: (out, in), or (out, in, height, width)."""

GIB: Final = 2**30
ITEM_BYTES: Final = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}
"""Bytes of an element by the name of its dtype."""
RUNTIME_BYTES: Final = 200 * 2**20
"""Memory of the interpreter, the libraries and the allocator's cache, or of a GPU's kernels and
workspaces."""


@dataclass(frozen=True)
class Item:
    """The memory of one component for one purpose."""

    component: str
    """The model or the part of the run that owns it, such as `unet`."""
    what: str
    """`weights`, `activations`, `cache`, ..."""
    bytes: int


@dataclass(frozen=True)
class Estimate:
    """What is in memory at the same time, by phase of a run."""

    phases: Mapping[str, Sequence[Item]]
    on_gpu: bool = False
    """Whether it is the memory of a GPU."""

    @property
    def place(self) -> str:
        """The name of the memory in messages."""
        return "GPU memory" if self.on_gpu else "memory"

    @property
    def peak(self) -> int:
        """Bytes of the largest phase, with the runtime."""
        return max(map(_total, self.phases.values())) + RUNTIME_BYTES

    def table(self) -> list[str]:
        """Lines for a user: each phase with its items and its sum."""
        lines = []
        around = "kernels and workspaces" if self.on_gpu else "interpreter and libraries"
        for phase, items in self.phases.items():
            lines.append(f"{self.place} while {phase}: {_size(_total(items) + RUNTIME_BYTES)}")
            lines += [
                f"  {f'{item.component} {item.what}'.strip():<32}{_size(item.bytes):>12}"
                for item in [*items, Item(around, "", RUNTIME_BYTES)]
                if item.bytes
            ]
        return lines


def require_fit(
    found: Estimate,
    config: TrainConfig,
    limit: float,
    estimate: Callable[[TrainConfig], Estimate],
) -> None:
    """Check that a run fits in memory.

    Args:
        found: what it will hold.
        config: its settings.
        limit: bytes that there are.
        estimate: what a run with other settings would hold; asked if this one does not fit.

    Raises:
        OutOfMemoryError: it does not; the message names settings that would.
    """
    needed = found.peak
    if needed <= limit:
        return
    changes, least = _what_fits(found, config, limit, estimate)
    start = f"{found.place}: the run needs about {_size(needed)}, and {_size(limit)} are there"
    if changes is None:
        raise OutOfMemoryError(
            f"{start}; with the smallest settings it would be {_size(least)}: "
            "use a smaller --resolution, a shorter --sequence-length or another machine "
            "(--memory-limit overrides the check)"
        )
    flags = " ".join(f"{flag(name)} {value}" for name, value in changes.items())
    raise OutOfMemoryError(
        f"{start}; with {flags} it would be {_size(least)} (--memory-limit overrides the check)"
    )


def available_bytes(device: str) -> float:
    """Bytes that a run on a device can take up; infinity where the system does not tell.

    Raises:
        CudaUnavailableError, DeviceError: there is no such device.
    """
    if device.partition(":")[0] == "cpu":
        return tc.memory.available_bytes() or math.inf
    stats = tc.cuda.memory_stats(device)
    return stats["free"] + stats["reserved"] - stats["allocated"]


def memory_limit(config: TrainConfig) -> float:
    """Bytes that a run may take up.

    Raises:
        CudaUnavailableError, DeviceError: there is no such device.
    """
    available = available_bytes(config.device)
    return available if config.memory_limit is None else config.memory_limit * GIB


def require_memory(what: str, needed: float, limit: float) -> None:
    """Check that there is memory for images.

    Args:
        what: is drawn, `4 images of 64x64 px` for example.
        needed: bytes, about.
        limit: bytes that there are.

    Raises:
        OutOfMemoryError: there is too little.
    """
    if needed > limit:
        raise OutOfMemoryError(
            f"sample: {what} need about {_size(needed)} of memory, and {_size(limit)} are there; "
            "draw fewer or smaller ones"
        )


_SMALLER: Final[tuple[tuple[str, Any], ...]] = (
    ("rank", 128),
    ("gradient_checkpointing", "selective"),
    ("gradient_checkpointing", "full"),
    ("batch_size", 1),
    ("optimizer", "adamw8bit"),
    ("cache", "disk"),
    ("train_text_encoder", False),
    ("precision", "bf16"),
    ("rank", 16),
    ("rank", 4),
)


def _what_fits(
    found: Estimate,
    config: TrainConfig,
    limit: float,
    estimate: Callable[[TrainConfig], Estimate],
) -> tuple[dict[str, Any] | None, int]:
    """The first of ever smaller settings that fit, as changes, and what they need."""
    changes: dict[str, Any] = {}
    least = found.peak
    for name, value in _SMALLER:
        needed = estimate(config.with_(**{**changes, name: value})).peak
        if needed >= least:
            continue
        changes[name], least = value, needed
        if least <= limit:
            return changes, least
    return None, least


def adapted_layers(
    layers: Mapping[str, Shape], targets: Sequence[str], exclude: Sequence[str] = ()
) -> dict[str, Shape]:
    """The layers that adapters sit on, with the shapes of their weights.

    Args:
        layers: shapes of weights by the names of layers.
        targets: names and patterns, as for `tc.LoraConfig`.
        exclude: likewise, of layers to leave out.

    Raises:
        ConfigError: a pattern is not a regular expression.
    """
    config = tc.LoraConfig(target_modules=list(targets), exclude_modules=list(exclude))
    return {name: layers[name] for name in config.select(dict(layers))}


def adapter_items(
    component: str, layers: Mapping[str, Shape], adapter: LoraConfig, config: TrainConfig
) -> list[Item]:
    """The adapters' parameters, their gradients and the optimizer's states.

    Args:
        component: whose they are.
        layers: shapes of weights by the names of layers, which `adapter` chooses from.
        adapter: which layers get adapters, and of what sizes.
        config: the settings.
    """
    count, states = adapter.plan(dict(layers), config.optimizer)
    copies = 0 if config.precision == "f32" else 2 * count
    average = 4 * count if config.ema_decay else 0
    return [
        Item(component, "adapter", 4 * count + copies + average),
        Item(component, "gradients", 4 * count),
        Item(component, "optimizer", states),
    ]


def _total(items: Iterable[Item]) -> int:
    return sum(item.bytes for item in items)


def _size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
