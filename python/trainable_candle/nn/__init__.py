"""Layers."""

from trainable_candle.nn import functional
from trainable_candle.nn.linear import DoRALinear, Linear, LoRALinear
from trainable_candle.nn.module import LoadResult, Module

__all__ = ["DoRALinear", "Linear", "LoRALinear", "LoadResult", "Module", "functional"]
