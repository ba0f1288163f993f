"""Layers, losses, functions and initial values, with the names of `torch.nn` where it has them."""

from types import SimpleNamespace
from typing import Any

from trainable_candle._core import Var
from trainable_candle.nn import functional, init
from trainable_candle.nn.attention import MultiheadAttention
from trainable_candle.nn.containers import ModuleList, Sequential
from trainable_candle.nn.conv_adapter import LoRAConv2d
from trainable_candle.nn.layers import (
    Conv2d,
    Dropout,
    Embedding,
    Flatten,
    GroupNorm,
    Identity,
    LayerNorm,
    RMSNorm,
)
from trainable_candle.nn.linear import DoRALinear, Linear, LoRALinear
from trainable_candle.nn.losses import (
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    HuberLoss,
    L1Loss,
    MSELoss,
    SmoothL1Loss,
)
from trainable_candle.nn.module import LoadResult, Module
from trainable_candle.nn.plain import (
    ELU,
    GELU,
    AvgPool2d,
    LeakyReLU,
    LogSoftmax,
    MaxPool2d,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)

Parameter = Var
"""Another name for `Var`: torch's name for a trained tensor."""

__all__ = [
    "ELU",
    "GELU",
    "AvgPool2d",
    "BCEWithLogitsLoss",
    "Conv2d",
    "CrossEntropyLoss",
    "DoRALinear",
    "Dropout",
    "Embedding",
    "Flatten",
    "GroupNorm",
    "HuberLoss",
    "Identity",
    "L1Loss",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LoRAConv2d",
    "LoRALinear",
    "LoadResult",
    "LogSoftmax",
    "MSELoss",
    "MaxPool2d",
    "Module",
    "ModuleList",
    "MultiheadAttention",
    "Parameter",
    "RMSNorm",
    "ReLU",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "SmoothL1Loss",
    "Softmax",
    "Softplus",
    "Tanh",
    "functional",
    "init",
]

_BATCH_NORM = "use GroupNorm, whose results do not depend on the other examples of a batch"
_RECURRENT = "write the step as a Module and call it in a loop over the positions"
_TRANSFORMER = "write the block as a Module of MultiheadAttention, LayerNorm and Linear"
_INSTEAD = {
    **dict.fromkeys(("BatchNorm1d", "BatchNorm2d", "BatchNorm3d"), _BATCH_NORM),
    **dict.fromkeys(("RNN", "LSTM", "GRU"), _RECURRENT),
    **dict.fromkeys(("Transformer", "TransformerEncoder", "TransformerEncoderLayer"), _TRANSFORMER),
    **dict.fromkeys(("TransformerDecoder", "TransformerDecoderLayer"), _TRANSFORMER),
    "AdaptiveAvgPool2d": "for one value per channel use x.mean((2, 3), keepdim=True), or AvgPool2d",
    "BCELoss": "leave out the sigmoid and use BCEWithLogitsLoss, which cannot overflow",
    "NLLLoss": "leave out the log-softmax and use CrossEntropyLoss",
    "Conv1d": "use functional.conv1d with a Parameter",
    "ConvTranspose2d": "use functional.interpolate, then Conv2d",
    "Dropout2d": "use Dropout",
    "ModuleDict": "use a dict in an attribute; modules are found in it",
    "ParameterList": "use a list in an attribute; parameters are found in it",
    "ParameterDict": "use a dict in an attribute; parameters are found in it",
    "DataParallel": "see docs/many-gpus.md",
    "Upsample": "use functional.interpolate",
}
"""What to use instead of names that `torch.nn` has and this module lacks."""


def __getattr__(name: str) -> Any:
    if name == "utils":
        from trainable_candle.optim import clip_grad_norm_  # noqa: PLC0415 - optim imports nn

        # Torch's name of the function is `torch.nn.utils.clip_grad_norm_`.
        return SimpleNamespace(clip_grad_norm_=clip_grad_norm_)
    advice = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise AttributeError(f"module {__name__!r} has no {name!r}{advice}")
