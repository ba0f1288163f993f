"""Extracts the difference of two models' weights as a LoRA."""

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
    """Attach LoRAs to `base`, so that its layers approximate those of `tuned`.

    The LoRA of a layer approximates the change of its weight, `tuned` minus `base`; see
    `approximate`. A layer whose weights are equal in both models gets no LoRA.

    Args:
        base: a model without adapters.
        tuned: a model with weights of the same shapes.
        layers: the names of the layers of `base` to compare.
        rank: the highest rank of a LoRA.
        keep: a fraction, above 0 and at most 1. Each layer gets the lowest rank at which its LoRA
            keeps this fraction of the squared norm that the LoRA of rank `rank` has. With 1, each
            layer gets rank `rank`, or the smaller side of its weight if that side is below `rank`.
        progress: called with the number of layers compared so far and the number of all layers.

    Raises:
        ConfigError: `tuned` lacks a layer or has it in another size, or no layer differs.
        NonFiniteError: a weight has a non-finite value.
    """
    before, after = base.named_tensors(), tuned.named_tensors()
    factors: dict[str, Factors] = {}
    for done, layer in enumerate(layers):
        progress(done, len(layers))
        name = f"{layer}.weight"
        if name not in after or after[name].shape != before[name].shape:
            raise ConfigError(f"extract: {layer} of the tuned model is missing or of another size")
        old, new = (tensors[name].to("cpu").to("f32").numpy() for tensors in (before, after))
        change = new - old
        if not np.any(change):
            continue
        matrix = change.reshape(len(change), -1)
        factors[layer] = approximate(matrix, min(rank, *matrix.shape), keep)
    progress(len(layers), len(layers))
    if not factors:
        raise ConfigError(
            "extract: the models are equal in all given layers; give another --tuned, or name "
            "other layers"
        )
    return attach_factors(base, factors)
