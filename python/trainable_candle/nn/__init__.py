"""Layers."""

from trainable_candle._core import Var
from trainable_candle.nn import functional, init
from trainable_candle.nn.attention import MultiheadAttention
from trainable_candle.nn.containers import ModuleList, Sequential
from trainable_candle.nn.conv_adapter import LoRAConv2d
from trainable_candle.nn.layers import (
    GELU,
    Conv2d,
    Dropout,
    Embedding,
    Flatten,
    GroupNorm,
    Identity,
    LayerNorm,
    ReLU,
    RMSNorm,
    Sigmoid,
    SiLU,
    Softmax,
    Tanh,
)
from trainable_candle.nn.linear import DoRALinear, Linear, LoRALinear
from trainable_candle.nn.module import LoadResult, Module

Parameter = Var
"""Torch's name of a trained tensor."""

__all__ = [
    "GELU",
    "Conv2d",
    "DoRALinear",
    "Dropout",
    "Embedding",
    "Flatten",
    "GroupNorm",
    "Identity",
    "LayerNorm",
    "Linear",
    "LoRAConv2d",
    "LoRALinear",
    "LoadResult",
    "Module",
    "ModuleList",
    "MultiheadAttention",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Tanh",
    "functional",
    "init",
]
