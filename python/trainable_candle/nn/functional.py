"""Operations as functions, with torch's names and argument orders."""

from trainable_candle._core import (
    Tensor,
    conv2d,
    cross_entropy,
    dropout,
    embedding,
    group_norm,
    huber_loss,
    l1_loss,
    layer_norm,
    linear,
    mse_loss,
    rms_norm,
    rope,
    scaled_dot_product_attention,
)

__all__ = [
    "conv2d",
    "cross_entropy",
    "dropout",
    "embedding",
    "gelu",
    "group_norm",
    "huber_loss",
    "l1_loss",
    "layer_norm",
    "linear",
    "log_softmax",
    "mse_loss",
    "relu",
    "rms_norm",
    "rope",
    "scaled_dot_product_attention",
    "sigmoid",
    "silu",
    "softmax",
    "tanh",
]


def relu(input: Tensor) -> Tensor:
    """Return max(input, 0)."""
    return Tensor.relu(input)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """Return GELU, exact ("none") or by its approximation with tanh ("tanh")."""
    return Tensor.gelu(input, approximate)


def silu(input: Tensor) -> Tensor:
    """Return input * sigmoid(input)."""
    return Tensor.silu(input)


def sigmoid(input: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-input))."""
    return Tensor.sigmoid(input)


def tanh(input: Tensor) -> Tensor:
    """Return the hyperbolic tangent."""
    return Tensor.tanh(input)


def softmax(input: Tensor, dim: int = -1) -> Tensor:
    """Return exp(input) over its sum along `dim`."""
    return Tensor.softmax(input, dim)


def log_softmax(input: Tensor, dim: int = -1) -> Tensor:
    """Return the logarithm of `softmax`, computed directly."""
    return Tensor.log_softmax(input, dim)
