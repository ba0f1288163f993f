"""How long a step takes on a GPU, from what it computes and moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from trainable_candle import LoraConfig, PartFacts
    from trainable_candle.settings import TrainConfig

_STEP: Final = 0.0143
"""Seconds of a step that no rate explains: launches, small operations, the optimizer."""
_ATTENTION: Final = 0.79
"""The rate of attention over that of matrix products."""
_TRAFFIC: Final = 12.7
"""How often what the tape keeps goes through memory, there and back: in norms, activations, gates
and adapters."""
_AGAIN: Final = 0.34
"""The share of that traffic which a second forward pass adds."""
_DECODED: Final = 7.2
"""Bytes that go through memory for a weight that is dequantized."""


_BESIDE: Final = 4
"""The exponent of the mean that says what computing and copying take beside one another."""


@dataclass(frozen=True)
class Work:
    """What a micro-batch computes and moves."""

    layers: float
    """Floating-point operations of the frozen layers in a forward pass."""
    attention: float
    """Those of attention."""
    kept: float
    """Bytes that the tape keeps without checkpointing."""
    recomputes: bool
    """Whether the backward pass repeats the forward pass."""
    decoded: float
    """Quantized weights, each of which a pass dequantizes."""
    streamed: float
    """Bytes of blocks' weights in the memory of the host, copied forward and backward."""
    modulation: float
    """Bytes of modulation's weights there, copied once a step."""
    blocks: int
    """How many blocks of the model could be streamed."""
    has_modulation: bool
    """Whether it has modulation that could be streamed."""
    can_be_quantized: bool
    """Whether its layers could be held in another format than their file has."""


@dataclass(frozen=True)
class Rates:
    """What a GPU does in a second."""

    products: float
    """Floating-point operations of matrix products in bf16."""
    memory: float
    """Bytes to or from its memory."""
    link: float
    """Bytes from the memory of the host."""


def _rates(tera: float, memory: float, link: float) -> Rates:
    return Rates(tera * 1e12, memory * 1e9, link * 1e9)


GPUS: Final = {
    "RTX 3060": _rates(20, 360, 25),
    "RTX 3090": _rates(55, 936, 25),
    "RTX 4060 Ti": _rates(34, 288, 12),
    "RTX 4070": _rates(45, 504, 25),
    "RTX 4090": _rates(125, 1008, 25),
    "RTX 5090": _rates(160, 1792, 50),
    "H200": _rates(760, 4800, 53),
}
"""Rates by a part of the driver's name for a GPU.

Memory and link are the makers' figures (of the H200, the link is measured). The H200's products
and the numbers above are fitted to the steps of docs/benchmarks.md that tests/tasks/test_speed.py
has; the other GPUs' products are what matrix products reach there according to published
measurements, and nothing was run on them.
"""
ANY_GPU: Final = GPUS["RTX 3060"]
"""For comparisons of settings on a GPU that is not in the table."""


def rates_of(name: str) -> Rates | None:
    """The rates of a GPU by the driver's name for it; None if they are not known."""
    fits = [known for known in GPUS if known in name]
    return GPUS[max(fits, key=len)] if fits else None


def work_of(
    facts: PartFacts, adapter: LoraConfig, config: TrainConfig, itemsize: int, **sizes: int
) -> Work:
    """What a micro-batch of a model computes and moves.

    Args:
        facts: of the model.
        adapter: which layers get adapters.
        config: the settings.
        itemsize: bytes of a value.
        sizes: `height`, `width` and `tokens` of a sample, as for `PartFacts.saved_values`.
    """
    layers, attention = facts.forward_flops(**sizes)
    kept = facts.saved_values(adapter, "none", **sizes) * itemsize
    count = config.batch_size
    base = config.base_format
    return Work(
        layers * count,
        attention * count,
        kept * count,
        config.checkpointing == "full",
        facts.elements if base else 0,
        *facts.streamed_bytes(config.precision, base, **config.streaming),
        facts.blocks,
        facts.has_modulation,
        facts.can_be_quantized,
    )


def seconds(work: Work, rates: Rates) -> float:
    """About how long a micro-batch takes.

    The backward pass of a frozen layer is one product, that of attention two and a half forward
    passes. Copies run beside the computation, and slow it down the more the closer they come to it.
    """
    again = 1 if work.recomputes else 0
    products = (2 + again) * work.layers / rates.products
    attention = (3.5 + again) * work.attention / (_ATTENTION * rates.products)
    traffic = (1 + _AGAIN * again) * _TRAFFIC * work.kept / rates.memory
    decoding = (2 + again) * _DECODED * work.decoded / rates.memory
    computing = products + attention + traffic + decoding + _STEP
    copying = (2 * work.streamed + work.modulation) / rates.link
    return float((computing**_BESIDE + copying**_BESIDE) ** (1 / _BESIDE))
