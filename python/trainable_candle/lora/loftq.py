"""LoRAs initialised with the quantization error of the base (Li et al. 2023, arXiv:2310.08659)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

import trainable_candle as tc
from trainable_candle.errors import ArgumentError, ConfigError
from trainable_candle.lora.factors import approximate
from trainable_candle.lora.stack import scale_of

if TYPE_CHECKING:
    from trainable_candle import AdapterSet, QuantizedTensor, Tensor, Var
    from trainable_candle.lora.factors import Factors, Matrix
    from trainable_candle.models import Model

_DOWN = ".lora_A.weight"
_UP = ".lora_B.weight"


def loftq(
    weight: Tensor, rank: int, format: str = "nf4", iterations: int = 1
) -> tuple[QuantizedTensor, Factors]:
    """Find a quantized matrix Q and a product B A, so that Q + B A approximates a weight W.

    Begins with B A = 0. Each iteration computes Q = quantize(W - B A), and then B A as the nearest
    matrix to W - Q of rank `rank`. This is the algorithm of peft's `loftq_init`, except that
    `quantize` also quantizes the scales of "nf4":
    <https://github.com/huggingface/peft/blob/5d602fdbff04c33c1c4de55cda9d4ae1d7cb7e40/src/peft/utils/loftq_utils.py>.
    After one iteration, Q = quantize(W).

    Args:
        weight: W, (out, in), floating point.
        rank: the rank of B A, at least 1; a rank above the smaller side of W is reduced to it.
        format: the format of Q; see `quantize`.
        iterations: the number of iterations, at least 1; the paper uses 5.

    Returns:
        Q, and the factors: `up` is B, `down` is A.

    Raises:
        ArgumentError: the rank or the number of iterations is below 1, the format is unknown, or a
            value is non-finite or too large for the format.
        ShapeError: the weight is not a matrix, or its rows do not fit the format.
    """
    for name, number in (("rank", rank), ("iterations", iterations)):
        if number < 1:
            raise ArgumentError(f"loftq: {name} is {number}, expected at least 1")
    exact = weight.detach().to("cpu").to("f32")
    rank = min(rank, *exact.shape)
    rest = exact  # W - B A
    for _ in range(iterations):
        quantized = tc.quantize(rest, format)
        factors = approximate((exact - quantized.dequantize()).numpy(), rank)
        rest = exact - tc.tensor(factors.up) @ tc.tensor(factors.down)
    return quantized, factors


def start_from_rounding(adapter: AdapterSet, base: Model, original: Model) -> None:
    """Set each LoRA on a quantized base to approximate the quantization error of its layer.

    The base does not change. This is `loftq` with one iteration, like peft's
    `replace_lora_weights_loftq`. The LoRAs of convolutions and of layers without an error keep
    their values. If the rank exceeds the smaller side of a weight, the additional rows of A and
    columns of B are zero.

    Args:
        adapter: LoRAs on the base, whose values are replaced.
        base: the model with the LoRAs.
        original: the same model before it was quantized; it may be on another device.

    Raises:
        ConfigError: the adapters are not LoRA, `original` lacks a layer or has it in another size,
            or no layer has an error.
        NonFiniteError: a weight has a value that is not a finite number.
    """
    parameters = adapter.named_parameters()
    if adapter.config.adapter != "lora" or adapter.config.use_dora:
        raise ConfigError(
            "start_from_rounding: expected LoRA, whose product is added to the weight; the "
            f"adapter is {'dora' if adapter.config.use_dora else adapter.config.adapter}"
        )
    changed = 0
    for name, down in parameters.items():
        layer = name.removesuffix(_DOWN)
        is_down = layer != name
        if not is_down or len(down.shape) != 2:  # the down factor of a convolution has 4 dimensions
            continue
        up = parameters[layer + _UP]
        error = _quantization_error(layer, base, original)
        if not error.any():
            continue
        rank = down.shape[0]
        scale = scale_of(adapter.config, layer, rank)
        # The layer multiplies the product of its factors by `scale`.
        factors = approximate(error, min(rank, *error.shape)).scaled(1 / scale)
        additional = rank - factors.rank
        down.set(_like(down, np.pad(factors.down, ((0, additional), (0, 0)))))
        up.set(_like(up, np.pad(factors.up, ((0, 0), (0, additional)))))
        changed += 1
    if not changed:
        raise ConfigError(
            "start_from_rounding: no layer has a quantization error: the base is not quantized, or "
            "the file of the original model already has quantized weights"
        )


def _quantization_error(layer: str, base: Model, original: Model) -> Matrix:
    """Return a layer's weight in `original` minus its dequantized weight in `base`, f32.

    Raises:
        ConfigError: `original` lacks the layer or has it in another size.
    """
    dequantized = base.get_tensor(f"{layer}.weight")
    try:
        exact = original.get_tensor(f"{layer}.weight")
    except ArgumentError:
        exact = None
    if exact is None or exact.shape != dequantized.shape:
        sizes = " x ".join(map(str, dequantized.shape))
        raise ConfigError(
            f"start_from_rounding: the original model has no linear layer {layer} of {sizes}; give "
            "the model from which the base was quantized"
        )
    error = exact.to("cpu").to("f32") - dequantized.to("cpu").to("f32")
    return error.numpy()


def _like(var: Var, values: Matrix) -> Tensor:
    """Return the values as a tensor with the dtype and the device of `var`."""
    return tc.tensor(values).to(var.dtype).to(var.device)
