"""Attaches LoRAs with given values to a model, such as the sums of the LoRAs in several files."""

from __future__ import annotations

from typing import TYPE_CHECKING, SupportsIndex

import numpy as np

import trainable_candle as tc
from trainable_candle.errors import ConfigError
from trainable_candle.lora.factors import Factors, joined

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from trainable_candle import AdapterSet
    from trainable_candle.models import Model

_DOWN = ".lora_A.weight"
_UP = ".lora_B.weight"


def stacked(model: Model, files: Sequence[tuple[Path, float]]) -> AdapterSet:
    """Attach LoRAs with the summed effect of one or more LoRA files, in any naming style.

    Args:
        model: a model without adapters.
        files: for each file, its path and a number that multiplies its effect.

    Raises:
        MissingFileError, WeightsFormatError: a file is missing, damaged, or of another model.
        ConfigError: a file has adapters other than LoRA, which cannot be added up as factors.
    """
    # For each layer, the factors from each file that adapts the layer.
    parts: dict[str, list[Factors]] = {}
    for path, scale in files:
        adapter = model.load_adapter(path, scale=scale)
        config = adapter.config
        values = {name: var.detach().to("cpu") for name, var in adapter.named_parameters().items()}
        others = any(not name.endswith((_DOWN, _UP)) for name in values)
        if config.adapter != "lora" or config.use_dora or others:
            raise ConfigError(
                f"--adapter {path}: the file has adapters other than LoRA, and only LoRAs add up; "
                "merge the file into the model first"
            )
        for name, down in values.items():
            layer = name.removesuffix(_DOWN)
            if layer == name:
                continue  # The parameter is an up factor, which is read with its down factor.
            up = values[layer + _UP]
            rank = down.shape[0]
            matrices = Factors(up.numpy().reshape(-1, rank), down.numpy().reshape(rank, -1))
            scaled = matrices.scaled(scale_of(config, layer, rank))
            parts.setdefault(layer, []).append(scaled)
        model.remove_adapter()
    return _attached(model, parts)


def scale_of(config: tc.LoraConfig, layer: str, rank: int) -> float:
    """Return the number that multiplies the product of a layer's factors.

    It is alpha / rank, or alpha / sqrt(rank) for rsLoRA. An entry of `alpha_pattern` applies only
    if its key is the layer's full name.
    """
    alpha = config.alpha_pattern.get(layer, config.lora_alpha)
    return alpha / (rank**0.5 if config.use_rslora else rank)


def attach_factors(model: Model, factors: Mapping[str, Factors]) -> AdapterSet:
    """Attach LoRAs with given values and a scale of 1 to layers of a model.

    Args:
        model: a model without adapters.
        factors: the factors by layer, for at least one layer. The columns of a convolution's `down`
            are in torch's order: input channels before the height and width of the kernel.
    """
    tensors = model.named_tensors()
    parts = {}
    for layer, change in factors.items():
        shape = tensors[f"{layer}.weight"].shape
        if len(shape) == 4:
            # The adapter's `down` of a convolution has its input channels last.
            down = change.down.reshape(change.rank, *shape[1:]).transpose(0, 2, 3, 1)
            parts[layer] = [Factors(change.up, down.reshape(change.rank, -1))]
        else:
            parts[layer] = [change]
    return _attached(model, parts)


def _attached(model: Model, parts: Mapping[str, Sequence[Factors]]) -> AdapterSet:
    """Attach to each layer a LoRA that is the sum of the layer's `parts`, with a scale of 1.

    The columns of a convolution's `down` are in the adapter's order: input channels last.
    """
    sums = {layer: joined(factors) for layer, factors in parts.items()}
    ranks: dict[str, SupportsIndex] = {layer: factors.rank for layer, factors in sums.items()}
    highest = max(factors.rank for factors in sums.values())
    adapter = model.add_adapter(
        tc.LoraConfig(
            r=highest,
            lora_alpha=float(highest),
            target_modules=list(ranks),
            rank_pattern=ranks,
            # An alpha equal to the rank is a scale of 1.
            alpha_pattern={layer: float(factors.rank) for layer, factors in sums.items()},
        )
    )
    parameters = adapter.named_parameters()
    for layer, factors in sums.items():
        for ending, matrix in ((_DOWN, factors.down), (_UP, factors.up)):
            var = parameters[layer + ending]
            value = np.ascontiguousarray(matrix.reshape(var.shape), np.float32)
            var.set(tc.tensor(value, device=var.device))
    return adapter
