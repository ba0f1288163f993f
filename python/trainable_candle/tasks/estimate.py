"""Estimates of the memory of a run, before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import trainable_candle as tc
from trainable_candle.errors import OutOfMemoryError
from trainable_candle.settings.initial import LOFTQ, PISSA
from trainable_candle.tasks.speed import states_on_host, work_of
from trainable_candle.tasks.w8a8 import multiplying_codes
from trainable_candle.train.pissa import doubled

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trainable_candle import LoraConfig, PartFacts
    from trainable_candle.settings import TrainConfig
    from trainable_candle.tasks.speed import Work

    Shape = Sequence[int]
    """The shape of a layer's weight: (out, in), or (out, in, height, width)."""

GIB: Final = 2**30
ITEM_BYTES: Final = {"f64": 8, "f32": 4, "f16": 2, "bf16": 2}
"""Bytes of an element by the name of its dtype."""
CONTEXT_BYTES: Final = 512 * 2**20
"""The approximate GPU memory that CUDA itself takes for a process."""
RUNTIME_BYTES: Final = 200 * 2**20
"""On the CPU, memory of the interpreter, the libraries and the allocator's cache; on a GPU, memory
of kernels and workspaces."""


@dataclass(frozen=True)
class Item:
    """The memory of one component for one purpose."""

    component: str
    """The model or the part of the run that owns the memory, such as `unet`."""
    what: str
    """The purpose: `weights`, `activations`, `cache`, ..."""
    bytes: int


@dataclass(frozen=True)
class Estimate:
    """The memory of a run in each of its phases."""

    phases: Mapping[str, Sequence[Item]]
    """What is in memory in each phase, by the name of the phase; without `RUNTIME_BYTES`."""
    on_gpu: bool = False
    """Whether `phases` is about the memory of a GPU."""
    work: Work | None = None
    """The arithmetic and transfers of a micro-batch, if the task estimates them."""
    host: int = 0
    """Bytes of host memory in addition to GPU memory: streamed weights, offloaded inputs of blocks,
    the optimizer's states, the original weights for LoftQ."""

    @property
    def place(self) -> str:
        """The name of the memory of `phases` in messages."""
        return "GPU memory" if self.on_gpu else "memory"

    @property
    def peak(self) -> int:
        """Bytes of the phase that needs the most memory, `RUNTIME_BYTES` included."""
        return _total(self.phases[self.highest]) + RUNTIME_BYTES

    @property
    def highest(self) -> str:
        """The name of the phase that needs the most memory."""
        return max(self.phases, key=lambda phase: _total(self.phases[phase]))

    def table(self) -> list[str]:
        """Return lines for a user: each phase with its sum and its items, then the peak."""
        lines = []
        runtime = "kernels and workspaces" if self.on_gpu else "interpreter and libraries"
        for phase, items in self.phases.items():
            lines.append(f"{self.place} while {phase}: {size(_total(items) + RUNTIME_BYTES)}")
            lines += [
                f"  {f'{item.component} {item.what}'.strip():<32}{size(item.bytes):>12}"
                for item in [*items, Item(runtime, "", RUNTIME_BYTES)]
                if item.bytes
            ]
        host = f", and {size(self.host)} in host memory" if self.host else ""
        lines.append(f"{self.place} at most: {size(self.peak)}, while {self.highest}{host}")
        return lines


def available_bytes(device: str) -> float:
    """Return the bytes that a run on a device can use; infinity if the system does not report them.

    Raises:
        CudaUnavailableError, DeviceError: there is no such device.
    """
    if device.partition(":")[0] == "cpu":
        return tc.memory.available_bytes() or math.inf
    stats = tc.cuda.memory_stats(device)
    return stats["free"] + stats["reserved"] - stats["allocated"]


def memory_limit(config: TrainConfig) -> float:
    """Return the bytes that a run may use: the free memory, limited by `vram` if that is set.

    On a GPU, `vram` includes the memory that CUDA itself takes. On the CPU, `vram` replaces the
    free memory that the system reports.

    Raises:
        CudaUnavailableError, DeviceError: there is no such device.
    """
    available = available_bytes(config.device)
    if config.vram is None:
        return available
    if config.on_gpu:
        return max(0.0, min(available, config.vram * GIB - CONTEXT_BYTES))
    return config.vram * GIB


def require_memory(what: str, needed: float, limit: float) -> None:
    """Check that there is enough memory for drawing images.

    Args:
        what: the images for the message, such as `4 images of 64x64 px`.
        needed: the approximate bytes.
        limit: the available bytes.

    Raises:
        OutOfMemoryError: there is too little memory.
    """
    if needed > limit:
        raise OutOfMemoryError(
            f"sample: {what} need about {size(needed)} of memory, and {size(limit)} are available; "
            "draw fewer or smaller images"
        )


def adapted_layers(
    layers: Mapping[str, Shape], targets: Sequence[str], exclude: Sequence[str] = ()
) -> dict[str, Shape]:
    """Return the layers that get adapters, with the shapes of their weights.

    Args:
        layers: shapes of weights by the names of layers.
        targets: names and patterns of layers, as for `tc.LoraConfig`.
        exclude: names and patterns of layers to leave out.

    Raises:
        ConfigError: a pattern is not a regular expression.
    """
    config = tc.LoraConfig(target_modules=list(targets), exclude_modules=list(exclude))
    return {name: layers[name] for name in config.select(dict(layers))}


def adapter_items(
    component: str, layers: Mapping[str, Shape], adapter: LoraConfig, config: TrainConfig
) -> list[Item]:
    """Return the memory of the adapters, their gradients and the optimizer's states.

    The memory of the adapters includes copies in the precision of the computation, and a moving
    average. Optimizer states in host memory are left out; `states_on_host` counts them.

    Args:
        component: the adapted model.
        layers: shapes of weights by the names of layers, which `adapter` chooses from.
        adapter: which layers get adapters, and of which ranks.
        config: the settings.
    """
    # The number of the adapters' elements, and the bytes of the optimizer's states.
    count, states = adapter.plan(dict(layers), config.optimizer)
    parameters = ITEM_BYTES[str(adapter.dtype)] * count
    needs_copies = config.precision != adapter.dtype
    copies = ITEM_BYTES[config.precision] * count if needs_copies else 0
    average = ITEM_BYTES["f32"] * count if config.ema_decay else 0
    states -= states_on_host(layers, adapter, config)
    return [
        Item(component, "adapter", parameters + copies + average),
        Item(component, "gradients", parameters),
        Item(component, "optimizer", states),
    ]


@dataclass(frozen=True)
class Trained:
    """The memory and the work of the model that is trained."""

    items: list[Item]
    """The memory during training."""
    work: Work
    """The work of a micro-batch."""
    early_phases: Mapping[str, list[Item]]
    """The memory in phases between encoding and training, by the name of the phase."""
    host: int
    """See `Estimate.host`."""


def trained_model(
    component: str,
    facts: PartFacts,
    adapter: LoraConfig,
    config: TrainConfig,
    **sizes: int,
) -> Trained:
    """Return the memory of the model that is trained, and the work of a micro-batch.

    Args:
        component: the name of the model in the estimate.
        facts: the facts about the model.
        adapter: which layers get adapters, and of which ranks.
        config: the settings.
        sizes: `height`, `width` and `tokens` of a sample, as for `PartFacts.saved_values`.
    """
    itemsize = ITEM_BYTES[config.precision]
    layers: Mapping[str, Shape] = facts.layers
    # Some models quantize fewer layers with `w8a8`, which makes linear layers multiply 8-bit codes.
    with multiplying_codes(config):
        loaded = facts.weight_bytes(config.precision, config.base_format, **config.streaming)
    weights = Item(component, "weights", loaded)
    adapters = adapter_items(component, layers, adapter, config)
    # With PiSSA, a layer subtracts the product of the adapter's initial factors, the start. It
    # computes the adapter and the start as one adapter of twice the rank.
    computed = doubled(adapter) if config.init == PISSA else adapter
    widest = facts.widest_gradient(adapter, **sizes) * config.batch_size * itemsize
    items = [
        weights,
        *adapters,
        activations(component, facts, computed, config, config.checkpoint_blocks, **sizes),
        Item(component, "backward pass", widest),
    ]
    if config.init == PISSA:
        items.append(_start(component, facts, computed, config))
    if config.qat is not None:
        items.append(_rounded(component, facts, adapter, config))
    work = work_of(facts, adapter, config, itemsize, **sizes)
    # `decoded` is 0 unless the base is quantized.
    if work.decoded and not config.w8a8:
        # A product dequantizes the weight of its layer, unless it multiplies the codes (`w8a8`).
        matrices = [shape for shape in layers.values() if len(shape) == 2]
        largest = max(map(math.prod, matrices), default=0) * itemsize
        items.append(Item(component, "dequantized weight", largest))
    host = int(work.streamed + work.modulation + work.offloaded + work.states)
    early_phases: dict[str, list[Item]] = {}
    if config.init == LOFTQ and not config.resume:
        # LoftQ reads the original weights on the host. On the CPU, that is the device's memory.
        original = facts.weight_bytes(config.precision)
        if config.on_gpu:
            host += original
        else:
            originals = Item(component, "original weights", original)
            adapter_item, *_ = adapters  # There are no gradients and optimizer states yet.
            early_phases["starting the adapter"] = [weights, adapter_item, originals]
    return Trained(items, work, early_phases, host if config.on_gpu else 0)


def _start(component: str, facts: PartFacts, computed: LoraConfig, config: TrainConfig) -> Item:
    """Return the memory that PiSSA takes in addition to the trained adapter.

    The model also holds the adapter that is saved to files. It has twice the rank, as `computed`
    has, and its values and gradients are in f32. Besides, the model holds two copies in the
    precision of the computation: the frozen start, which has the rank of the trained adapter; and
    the factors of each layer joined with those of the start, which have twice that rank.
    """
    count, _ = computed.plan(dict(facts.layers), config.optimizer)
    start, joined = count // 2, count
    copies = ITEM_BYTES[config.precision] * (start + joined)
    return Item(component, "start of the adapter", 2 * ITEM_BYTES["f32"] * count + copies)


def activations(
    component: str,
    facts: PartFacts,
    adapter: LoraConfig,
    config: TrainConfig,
    blocks: int | None = None,
    **sizes: int,
) -> Item:
    """Return the tape's memory for a micro-batch.

    `blocks` is as for `PartFacts.saved_values`; the other arguments are those of `trained_model`.
    """
    # On the CPU, `offload` is the same as `full`: offloaded tensors would stay in the same memory.
    policy = config.checkpointing if config.on_gpu or not config.recomputes_all else "full"
    on_device, _on_host = facts.saved_values(adapter, policy, blocks=blocks, **sizes)
    values = on_device * config.batch_size
    return Item(component, "activations", values * ITEM_BYTES[config.precision])


def _rounded(component: str, facts: PartFacts, adapter: LoraConfig, config: TrainConfig) -> Item:
    """Return the memory of the rounded weights of adapted layers in quantization-aware training.

    The tape keeps each rounded weight in the precision of the computation. For int4 and for learned
    scales, the tape also keeps it in f32. Of the blocks that checkpointing recomputes, the tape
    keeps only the rounded weights of one block at a time. In addition, one layer at a time has
    three f32 tensors: its weight, the sum of weight and adapter, and the gradient.
    """
    layers: Mapping[str, Shape] = facts.layers
    counts = [math.prod(layers[name]) for name in adapter.select(dict(layers))]
    elements = sum(counts)
    if config.recomputes_all:
        all_blocks = facts.blocks_to_checkpoint
        recomputed = config.checkpoint_blocks or all_blocks  # a number of blocks
        # The weights of the blocks that are not recomputed, and those of one recomputed block.
        not_recomputed = elements * (all_blocks - recomputed) // max(1, all_blocks)
        # `facts.blocks` is the number of blocks that can be streamed. These have linear layers, so
        # the rounded weights are in them; `all_blocks` also counts blocks without linear layers.
        elements = not_recomputed + elements // max(1, facts.blocks)
    f32 = ITEM_BYTES["f32"]
    in_f32 = config.qat == "int4" or config.qat_learned_scales
    bytes_each = ITEM_BYTES[config.precision] + (f32 if in_f32 else 0)
    largest = max(counts, default=0)
    return Item(component, "rounded weights", elements * bytes_each + 3 * f32 * largest)


def _total(items: Iterable[Item]) -> int:
    return sum(item.bytes for item in items)


def size(count: float) -> str:
    """Return a number of bytes as text, in MiB or in GiB."""
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
