"""What a run will hold in memory, before anything is loaded, and what to change."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import trainable_candle as tc
from trainable_candle.errors import OutOfMemoryError
from trainable_candle.settings import flag

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from trainable_candle.settings import TrainConfig
    from trainable_candle.train.headers import TensorFacts

GIB: Final = 2**30
RUNTIME_BYTES: Final = 200 * 2**20
"""Interpreter, libraries, and blocks that the allocator keeps; on a GPU kernels and workspaces."""
_MIN_8BIT: Final = 4096
_BLOCK: Final = 256
_ATTENTION: Final = (
    ".to_q", ".to_k", ".to_v", ".to_out.0", ".q_proj", ".k_proj", ".v_proj", ".out_proj",
)  # fmt: skip
_STATES: Final = {"adam": 2, "lion": 1, "prodigy": 4, "sgd": 0}


@dataclass(frozen=True)
class Item:
    """One thing in memory."""

    component: str
    """Whose it is: `unet`, for example."""
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
        """Whose memory it is."""
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
    config: TrainConfig, limit: float, estimate: Callable[[TrainConfig], Estimate]
) -> None:
    """Check that a run fits in memory.

    Args:
        config: its settings.
        limit: bytes that there are.
        estimate: what a run with other settings would hold.

    Raises:
        OutOfMemoryError: it does not; the message names settings that would.
    """
    found = estimate(config)
    needed = found.peak
    if needed <= limit:
        return
    changes, least = _what_fits(config, limit, estimate)
    start = f"{found.place}: the run needs about {_size(needed)}, and {_size(limit)} are there"
    if changes is None:
        raise OutOfMemoryError(
            f"{start}; with the smallest settings it would be {_size(least)}: "
            "use a smaller --resolution or another machine (--memory-limit overrides the check)"
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
    """Check that there is memory for pictures.

    Args:
        what: is drawn, `4 pictures of 64x64 px` for example.
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
    config: TrainConfig, limit: float, estimate: Callable[[TrainConfig], Estimate]
) -> tuple[dict[str, Any] | None, int]:
    """The first of ever smaller settings that fit, as changes, and what they need."""
    changes: dict[str, Any] = {}
    least = estimate(config).peak
    for name, value in _SMALLER:
        needed = estimate(config.with_(**{**changes, name: value})).peak
        if needed >= least:
            continue
        changes[name], least = value, needed
        if least <= limit:
            return changes, least
    return None, least


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a layer is named: by its whole name, its end after a dot, or a regular expression."""
    return any(
        name == pattern or name.endswith(f".{pattern}") or _full_match(pattern, name)
        for pattern in patterns
    )


def _full_match(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False


def adapted_layers(
    tensors: Mapping[str, TensorFacts], targets: Sequence[str], exclude: Sequence[str] = ()
) -> dict[str, tuple[int, ...]]:
    """The weights of the layers that adapters sit on: layer name -> shape."""

    def hit(layer: str, dims: int, patterns: Sequence[str]) -> bool:
        groups = {"all-linear": dims == 2, "all-conv": dims == 4}
        groups["all-attention"] = layer.endswith(_ATTENTION)
        return matches(layer, patterns) or any(groups.get(pattern, False) for pattern in patterns)

    return {
        layer: facts.shape
        for name, facts in tensors.items()
        if (layer := name.removesuffix(".weight")) != name
        and len(facts.shape) in {2, 4}
        and hit(layer, len(facts.shape), targets)
        and not hit(layer, len(facts.shape), exclude)
    }


def adapter_items(
    component: str, layers: Iterable[tuple[int, ...]], config: TrainConfig
) -> list[Item]:
    """The adapter's parameters, their gradients and the optimizer's states for these layers."""
    shapes = [shape for layer in layers for shape in _parameter_shapes(layer, config)]
    count = sum(map(math.prod, shapes))
    copies = 0 if config.precision == "f32" else 2 * count
    average = 4 * count if config.ema_decay else 0
    states = sum(_state_bytes(shape, config.optimizer) for shape in shapes)
    return [
        Item(component, "adapter", 4 * count + copies + average),
        Item(component, "gradients", 4 * count),
        Item(component, "optimizer", states),
    ]


def _parameter_shapes(layer: tuple[int, ...], config: TrainConfig) -> Sequence[tuple[int, ...]]:
    """The parameters of one adapter; a convolution's kernel comes before its inputs."""
    out_features, in_features, *kernel = layer
    flat, rank = in_features * math.prod(kernel), config.rank
    if config.adapter == "loha":
        return 2 * [(out_features, rank), (rank, flat)]
    if config.adapter == "lokr":
        return _kronecker_shapes(out_features, in_features, kernel, rank)
    low_rank = [(rank, *kernel, in_features), (out_features, rank)]
    return [*low_rank, (out_features,)] if config.adapter == "dora" else low_rank


def _kronecker_shapes(
    out_features: int, in_features: int, kernel: Sequence[int], rank: int
) -> list[tuple[int, ...]]:
    out_small, in_small = _divisor(out_features), _divisor(in_features)
    out_large, in_large = out_features // out_small, in_features // in_small
    small = (out_small, in_small)
    if 2 * rank < max(out_large, in_large):
        return [small, (out_large, rank), (rank, in_large * math.prod(kernel))]
    return [small, (out_large, *kernel, in_large)]


def _divisor(size: int) -> int:
    """The largest divisor up to the root."""
    return next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)


def _state_bytes(shape: tuple[int, ...], optimizer: str) -> int:
    size = math.prod(shape)
    if optimizer == "adafactor":
        if len(shape) < 2:
            return 4 * size
        return 4 * (size // shape[-1] + size // shape[-2])
    kind = optimizer.removesuffix("8bit").removesuffix("w")
    if optimizer.endswith("8bit") and size >= _MIN_8BIT:
        return _STATES[kind] * (size + 4 * -(-size // _BLOCK))
    return _STATES[kind] * 4 * size


def _total(items: Iterable[Item]) -> int:
    return sum(item.bytes for item in items)


def _size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
