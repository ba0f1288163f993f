"""The difference of two models as a LoRA."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trainable_candle.errors import ConfigError
from trainable_candle.lora.factors import approximate
from trainable_candle.lora.stack import attach_factors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from trainable_candle import AdapterSet
    from trainable_candle.lora.factors import Factors
    from trainable_candle.models import Model


def extract(
    base: Model,
    tuned: Model,
    layers: Collection[str],
    rank: int,
    keep: float = 1.0,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> AdapterSet:
    """Attach LoRAs to `base` that approximate `tuned` as closely as their ranks allow.

    Layers whose weights are equal get no LoRA.

    Args:
        base: a model without adapters.
        tuned: a model of the same shape.
        layers: the names of the layers to compare.
        rank: the highest rank of a layer.
        keep: a fraction, above 0 and at most 1. Each layer gets the lowest rank at which its LoRA
            keeps this fraction of the squared norm that it has at `rank`. 1 always gives `rank`.
        progress: called with the number of layers that are done and the number of all layers.

    Raises:
        ConfigError: the models have different layers or sizes, or no layer differs.
        NonFiniteError: a weight is not a finite number.
    """
    before, after = base.named_tensors(), tuned.named_tensors()
    found: dict[str, Factors] = {}
    for done, layer in enumerate(layers):
        progress(done, len(layers))
        name = f"{layer}.weight"
        if name not in after or after[name].shape != before[name].shape:
            raise ConfigError(f"extract: {layer} of the tuned model is missing or of another size")
        one, other = (state[name].to("cpu").to("f32").numpy() for state in (before, after))
        change = other - one
        if not np.any(change):
            continue
        matrix = change.reshape(len(change), -1)
        found[layer] = approximate(matrix, min(rank, *matrix.shape), keep)
    progress(len(layers), len(layers))
    if not found:
        raise ConfigError("extract: the models are equal in all of these layers")
    return attach_factors(base, found)
