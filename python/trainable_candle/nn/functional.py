"""Operations as functions. Those that torch also has have torch's names and argument orders."""

from typing import Any, Final

from trainable_candle._core import (
    Tensor,
    add_layer_norm,
    conv2d,
    cross_entropy,
    dropout,
    embedding,
    fake_quantize,
    geglu,
    group_norm,
    group_norm_silu,
    huber_loss,
    l1_loss,
    layer_norm,
    linear,
    linear_cross_entropy,
    linear_log_probs,
    modulated_layer_norm,
    mse_loss,
    quick_gelu,
    rms_norm,
    rms_norm_rope,
    rope,
    scaled_dot_product_attention,
    smooth_l1_loss,
    swiglu,
    upsample_nearest2d,
    varlen_attention,
)
from trainable_candle.nn.composed import (
    avg_pool2d,
    binary_cross_entropy_with_logits,
    conv1d,
    cosine_similarity,
    elu,
    interpolate,
    kl_div,
    leaky_relu,
    max_pool2d,
    normalize,
    one_hot,
    pad,
    softplus,
)

__all__ = [
    "add_layer_norm",
    "avg_pool2d",
    "binary_cross_entropy_with_logits",
    "conv1d",
    "conv2d",
    "cosine_similarity",
    "cross_entropy",
    "dropout",
    "elu",
    "embedding",
    "fake_quantize",
    "geglu",
    "gelu",
    "group_norm",
    "group_norm_silu",
    "huber_loss",
    "interpolate",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "leaky_relu",
    "linear",
    "linear_cross_entropy",
    "linear_log_probs",
    "log_softmax",
    "max_pool2d",
    "modulated_layer_norm",
    "mse_loss",
    "normalize",
    "one_hot",
    "pad",
    "quick_gelu",
    "relu",
    "rms_norm",
    "rms_norm_rope",
    "rope",
    "scaled_dot_product_attention",
    "sigmoid",
    "silu",
    "smooth_l1_loss",
    "softmax",
    "softplus",
    "swiglu",
    "tanh",
    "upsample_nearest2d",
    "varlen_attention",
]


def relu(input: Tensor) -> Tensor:
    """Return max(input, 0).

    ```python
    assert F.relu(tc.zeros(3)).tolist() == [0.0] * 3
    ```
    """
    return Tensor.relu(input)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """Return input * Phi(input), with Phi the standard normal distribution function.

    `approximate` is "none" for the exact function, or "tanh" for an approximation with tanh.

    ```python
    assert F.gelu(tc.zeros(3)).tolist() == [0.0] * 3
    ```
    """
    return Tensor.gelu(input, approximate)


def silu(input: Tensor) -> Tensor:
    """Return input * sigmoid(input).

    ```python
    assert F.silu(tc.zeros(3)).tolist() == [0.0] * 3
    ```
    """
    return Tensor.silu(input)


def sigmoid(input: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-input)).

    ```python
    assert F.sigmoid(tc.zeros(3)).tolist() == [0.5] * 3
    ```
    """
    return Tensor.sigmoid(input)


def tanh(input: Tensor) -> Tensor:
    """Return the hyperbolic tangent of each element.

    ```python
    assert F.tanh(tc.zeros(3)).tolist() == [0.0] * 3
    ```
    """
    return Tensor.tanh(input)


def softmax(input: Tensor, dim: int = -1) -> Tensor:
    """Return exp(input) divided by its sum along `dim`.

    ```python
    assert F.softmax(tc.zeros(2, 4)).tolist() == [[0.25] * 4] * 2
    ```
    """
    return Tensor.softmax(input, dim)


def log_softmax(input: Tensor, dim: int = -1) -> Tensor:
    """Return the logarithm of `softmax`, which is finite even if a probability underflows to 0.

    ```python
    assert tc.allclose(F.log_softmax(x).exp(), F.softmax(x), rtol=1e-5)
    ```
    """
    return Tensor.log_softmax(input, dim)


_INSTEAD: Final = {
    "adaptive_avg_pool2d": "for one value per channel use x.mean((2, 3), keepdim=True)",
    "batch_norm": "use group_norm, whose results do not depend on the other examples of a batch",
    "binary_cross_entropy": "use binary_cross_entropy_with_logits, without the sigmoid",
    "conv_transpose2d": "use interpolate, then conv2d",
    "nll_loss": "use cross_entropy, without the log-softmax",
    "logsigmoid": "use -softplus(-x)",
    "mish": "use x * softplus(x).tanh()",
    "hardtanh": "use x.clamp(-1, 1)",
    "relu6": "use x.clamp(0, 6)",
}
"""For functions that `torch.nn.functional` has and this module lacks: what to use instead."""


def __getattr__(name: str) -> Any:
    advice = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise AttributeError(f"module {__name__!r} has no {name!r}{advice}")
