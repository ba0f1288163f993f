"""A frozen convolution with a LoRA adapter."""

from __future__ import annotations

from trainable_candle._core import Tensor, Var, init_linear, zeros
from trainable_candle._core import conv2d as _conv2d
from trainable_candle._core import dropout as _dropout
from trainable_candle.errors import ArgumentError
from trainable_candle.nn.layers import Conv2d, whole
from trainable_candle.nn.module import Module

__all__ = ["LoRAConv2d"]


class LoRAConv2d(Module):
    """A frozen convolution with LoRA as in peft and LyCORIS (LoCon).

    y = conv(x, W) + b + scale * conv_1x1(conv(x, lora_down), lora_up). The convolution with
    `lora_down` (rank, in, height, width) has the stride, padding and dilation of `base`. Both
    factors are f32 variables. Initially `lora_down` is drawn like the weight of a `Conv2d`, and
    `lora_up` (out, rank, 1, 1) is zero. If the attribute `enabled` is False, y is the result of
    `base`.

        layer = tc.nn.LoRAConv2d(tc.nn.Conv2d(3, 8, 3), rank=4, alpha=4)
        assert layer(tc.randn(1, 3, 6, 6)).shape == (1, 8, 4, 4)

    Args:
        base: The convolution, with one group.
        rank: The rank of the LoRA, at least 1.
        alpha: Determines the scale, alpha / rank.
        dropout: The probability with which an element of the adapter's input is set to 0 in
            training.
        rslora: Whether the scale is alpha / sqrt(rank) instead.

    Raises:
        TypeError: If `base` is not a `Conv2d`, or `rank` is not whole.
        ArgumentError: If the convolution has several groups, or a number is out of range.
    """

    def __init__(
        self,
        base: Conv2d,
        rank: int,
        alpha: float,
        dropout: float = 0.0,
        rslora: bool = False,
    ) -> None:
        if not isinstance(base, Conv2d):
            raise TypeError(f"LoRAConv2d: base is {type(base).__name__}, expected a Conv2d")
        if base.groups != 1:
            raise ArgumentError(f"LoRAConv2d: the convolution has {base.groups} groups, expected 1")
        rank = whole("LoRAConv2d", "rank", rank)
        if not 0 <= dropout < 1:
            raise ArgumentError(
                f"LoRAConv2d: dropout is {dropout}, expected a number from 0 to below 1"
            )
        self.weight = base.weight.detach()
        self.bias = None if base.bias is None else base.bias.detach()
        outputs, inputs, height, width = self.weight.shape
        down, _ = init_linear(
            inputs * height * width, rank, bias=False, dtype="f32", device=self.weight.device
        )
        self.lora_down = Var(down.detach().reshape((rank, inputs, height, width)))
        self.lora_up = Var(zeros((outputs, rank, 1, 1), dtype="f32", device=self.weight.device))
        self.scale = alpha / (rank**0.5 if rslora else rank)
        self.dropout = dropout
        self.stride, self.padding, self.dilation = base.stride, base.padding, base.dilation
        self.enabled = True

    def get_vars(self) -> list[Var]:
        """Return the trainable parameters, `lora_down` and `lora_up`."""
        return [self.lora_down, self.lora_up]

    def forward(self, input: Tensor) -> Tensor:
        """Map (B, in_channels, height, width) to (B, out_channels, height', width').

        Raises:
            ShapeError, DTypeError, DeviceError: If the input does not fit.
        """
        geometry = (self.stride, self.padding, self.dilation)
        result = _conv2d(input, self.weight, self.bias, *geometry)
        if not self.enabled:
            return result
        dtype = self.weight.dtype
        dropped = _dropout(input, self.dropout, self.training) if self.dropout else input
        low_rank = _conv2d(dropped, self.lora_down.to(dtype), None, *geometry)
        return result + _conv2d(low_rank, self.lora_up.to(dtype)) * self.scale

    def merge(self) -> Tensor:
        """Return the weight, in the base's dtype, with which `base` would equal this layer."""
        outputs, rank = self.lora_up.shape[:2]
        up, down = self.lora_up.detach(), self.lora_down.detach()
        change = up.reshape((outputs, rank)) @ down.reshape((rank, -1))
        merged = self.weight.to("f32") + change.reshape(self.weight.shape) * self.scale
        return merged.to(self.weight.dtype)

    def _facts(self) -> str:
        outputs, inputs, *kernel = self.weight.shape
        rank = self.lora_down.shape[0]
        return f"{inputs}, {outputs}, kernel_size={tuple(kernel)}, rank={rank}"
