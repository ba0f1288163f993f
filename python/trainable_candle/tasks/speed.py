"""Estimates the time of a step on a GPU, from its arithmetic and its transfers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from trainable_candle.distributed.streamed import NVLINK
from trainable_candle.tasks.w8a8 import multiplying_codes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainable_candle import LoraConfig, PartFacts
    from trainable_candle.settings import TrainConfig

_STEP: Final = 0.0073
"""The seconds of a micro-batch that depend on none of the `Rates`: launches, small operations, the
optimizer."""
_ATTENTION: Final = 0.63
"""The rate of attention divided by that of matrix products."""
_TRAFFIC: Final = 9.5
"""The memory traffic of norms, activations, gates and adapters in a micro-batch without
recomputation, divided by the bytes that the tape keeps."""
_AGAIN: Final = 0.43
"""The memory traffic of a second forward pass over all blocks, divided by the traffic of a
micro-batch without it."""
_DECODED: Final = 4.4
"""Bytes of memory traffic for each element of a weight, each time that it is dequantized."""
_BESIDE: Final = 4
"""The exponent p in (a^p + b^p)^(1/p), the time of computing and copying in parallel. Here a is the
time of the computation alone, and b that of the copies alone."""


@dataclass(frozen=True)
class Work:
    """The arithmetic and the transfers of a micro-batch.

    The fields from `blocks` on have facts about the models that decide which plans are possible.
    """

    layers: float
    """Floating-point operations of the frozen layers in a forward pass."""
    attention: float
    """Floating-point operations of attention in a forward pass."""
    kept: float
    """Bytes that the tape keeps without checkpointing."""
    recomputed: float
    """The share of the blocks' forward pass that the backward pass repeats."""
    decoded: float
    """The number of weights that each forward and backward pass dequantizes. For a quantized model,
    this counts all parameters; for any other model it is 0."""
    streamed: float
    """Bytes of the blocks' streamed weights, copied once in the forward pass and once in the
    backward pass."""
    modulation: float
    """Bytes of the streamed modulation weights, copied once in a micro-batch. These are the weights
    of the layers that compute the scales, shifts and gates of all blocks."""
    offloaded: float
    """Bytes of the blocks' inputs that are copied to host memory in the forward pass and back in
    the backward pass."""
    states: float
    """Bytes of the optimizer's states in host memory, which an optimizer step reads and writes."""
    blocks: int
    """The number of blocks of the model that can be streamed."""
    has_modulation: bool
    """Whether the model has modulation weights that can be streamed."""
    can_be_quantized: bool
    """Whether the model has layers that can be quantized; see `PartFacts.can_be_quantized`."""
    stored_format: str | None = None
    """The quantized format in which the model's file stores every layer that can be quantized; None
    if there is no such format."""
    checkpointed: int = 0
    """The number of blocks of the model that can have a checkpointing policy."""
    texts_have_format: bool = False
    """Whether the file of a text encoder stores its layers in a quantized format."""


@dataclass(frozen=True)
class Rates:
    """What a GPU does in a second."""

    products: float
    """Floating-point operations of matrix products in bf16."""
    memory: float
    """Bytes read from or written to the GPU's memory."""
    link: float
    """Bytes copied from host memory or to it."""
    streams: float | None = None
    """Bytes of streamed weights that are copied, if not at the rate `link`: by NVLink, or partly
    through a ring of buffers in pinned memory. None: at the rate `link`."""


def _rates(tflops: float, memory_gb: float, link_gb: float) -> Rates:
    """Return rates from TFLOP/s and GB/s."""
    return Rates(tflops * 1e12, memory_gb * 1e9, link_gb * 1e9)


GPUS: Final = {
    "RTX 3060": _rates(20, 360, 25),
    "RTX 3060 Ti": _rates(25, 448, 25),
    "RTX 3070": _rates(31, 448, 25),
    "RTX 3080": _rates(46, 760, 25),
    "RTX 3090": _rates(55, 936, 25),
    "RTX 4060": _rates(23, 272, 12),
    "RTX 4060 Ti": _rates(34, 288, 12),
    "RTX 4070": _rates(45, 504, 25),
    "RTX 4070 Ti": _rates(62, 504, 25),
    "RTX 4080": _rates(75, 717, 25),
    "RTX 4090": _rates(125, 1008, 25),
    "RTX 5060 Ti": _rates(36, 448, 25),
    "RTX 5070": _rates(47, 672, 50),
    "RTX 5070 Ti": _rates(68, 896, 50),
    "RTX 5080": _rates(87, 960, 50),
    "RTX 5090": _rates(160, 1792, 50),
    "A100": _rates(240, 1555, 25),
    "L40S": _rates(279, 864, 25),
    "H100": _rates(690, 3350, 53),
    "H200": _rates(760, 4800, 53),
}
"""A part of the driver's name for a GPU -> the GPU's rates.

The rates of memory and link are the makers' figures, except for the H200's link, which is measured.
The H200's rate of products is fitted to steps measured on 2026-11-23; the H100's is measured. With
these two rates, the constants above are fitted to the steps that tests/tasks/test_speed.py lists.
The H200's rate of products is 0.77 times the maker's figure for bf16 with sums in f32. For all GPUs
but these two, the rate of products is assumed to be 0.77 times the maker's figure, too; nothing was
run on them.
"""
_NVLINK: Final = 450e9
"""Bytes that a GPU receives by NVLink in a second. NVIDIA's figure for an H100 or H200 is 900 GB/s
in both directions together. Copies of streamed weights by NVLink have not been measured."""
ANY_GPU: Final = GPUS["RTX 3060"]
"""The rates that are assumed for a GPU that is not in the table, to compare settings by time."""


def rates_of(name: str) -> Rates | None:
    """Return the rates of a GPU by the driver's name for it; None if they are not known."""
    matches = [known for known in GPUS if known in name]
    # "RTX 3060 Ti" also contains "RTX 3060".
    return GPUS[max(matches, key=len)] if matches else None


def with_peers(rates: Rates, peer_link: str) -> Rates:
    """Return the rates of a GPU that copies streamed weights from other GPUs over `peer_link`.

    Without NVLink the rates stay the same: copies from other GPUs cross the same bus as copies from
    host memory.
    """
    return replace(rates, streams=_NVLINK) if peer_link == NVLINK else rates


def work_of(
    facts: PartFacts, adapter: LoraConfig, config: TrainConfig, itemsize: int, **sizes: int
) -> Work:
    """Return the arithmetic and the transfers of a micro-batch of a model.

    Args:
        facts: the facts about the model.
        adapter: which layers get adapters, and of which ranks.
        config: the settings.
        itemsize: bytes of a value in the precision of the computation.
        sizes: `height`, `width` and `tokens` of a sample, as for `PartFacts.saved_values`.
    """
    layers, attention = facts.forward_flops(**sizes)
    # `saved_values` returns numbers of values of a sample: on the device and in host memory.
    kept = facts.saved_values(adapter, "none", **sizes)[0] * itemsize
    policy, blocks = config.checkpointing, config.checkpoint_blocks
    _, offloaded = facts.saved_values(adapter, policy, blocks=blocks, **sizes)
    samples = config.batch_size
    base = config.base_format
    # Some models quantize fewer layers if the run multiplies 8-bit codes (`--w8a8`).
    with multiplying_codes(config):
        # Compare bytes, because the weights of GGUF files stay quantized even if `base` is None.
        is_quantized = facts.weight_bytes(config.precision, base) != facts.elements * itemsize
        streamed, modulation = facts.streamed_bytes(config.precision, base, **config.streaming)
    return Work(
        layers=layers * samples,
        attention=attention * samples,
        kept=kept * samples,
        recomputed=facts.recomputed_share(policy, blocks=blocks, **sizes),
        decoded=facts.elements if is_quantized else 0,
        streamed=streamed,
        modulation=modulation,
        offloaded=offloaded * itemsize * samples if config.on_gpu else 0,
        states=states_on_host(facts.layers, adapter, config),
        blocks=facts.blocks,
        has_modulation=facts.has_modulation,
        can_be_quantized=facts.can_be_quantized,
        stored_format=facts.stored_format,
        checkpointed=facts.blocks_to_checkpoint,
    )


def states_on_host(
    layers: Mapping[str, Sequence[int]], adapter: LoraConfig, config: TrainConfig
) -> int:
    """Return the bytes of the optimizer's states in host memory for the adapters of a model.

    Args:
        layers: the shapes of weights, by the names of the layers that `adapter` chooses from.
        adapter: which layers get adapters, and of which ranks.
        config: the settings.
    """
    if not config.states_on_host:
        return 0
    _parameters, state_bytes = adapter.plan(dict(layers), config.optimizer)
    return state_bytes


def states_seconds(work: Work, rates: Rates) -> float:
    """Return the approximate extra time of an optimizer step if the states are in host memory.

    The optimizer's kernels read and write the states over the link. Nothing else runs meanwhile.
    """
    return 2 * work.states / rates.link


def seconds(work: Work, rates: Rates) -> float:
    """Return the approximate time of a micro-batch.

    Copies run in parallel with the computation, and slow it down more the longer they take (see
    `_BESIDE`).
    """
    computing, copying = computing_seconds(work, rates), copying_seconds(work, rates)
    return float((computing**_BESIDE + copying**_BESIDE) ** (1 / _BESIDE))


def computing_seconds(work: Work, rates: Rates) -> float:
    """Return the approximate time of a micro-batch without copies to and from the GPU.

    The backward pass of a frozen layer costs as much as its forward pass, together 2; the backward
    pass of attention costs as much as two and a half of its forward passes, together 3.5.
    """
    repeated = work.recomputed
    products = (2 + repeated) * work.layers / rates.products
    attention = (3.5 + repeated) * work.attention / (_ATTENTION * rates.products)
    traffic = (1 + _AGAIN * repeated) * _TRAFFIC * work.kept / rates.memory
    decoding = (2 + repeated) * _DECODED * work.decoded / rates.memory
    return products + attention + traffic + decoding + _STEP


def copying_seconds(work: Work, rates: Rates) -> float:
    """Return the approximate time of a micro-batch's copies: streamed weights, inputs of blocks."""
    weights = (2 * work.streamed + work.modulation) / (rates.streams or rates.link)
    return weights + 2 * work.offloaded / rates.link
