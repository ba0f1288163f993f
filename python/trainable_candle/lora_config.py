"""`LoraConfig`, which also takes peft's arguments if they ask for what this library does anyway."""

from __future__ import annotations

import copyreg
from inspect import signature
from typing import Any, Final

from trainable_candle import _core
from trainable_candle.errors import ConfigError

_ANY: Final = object()
"""Any value, for an argument that changes no computation."""
_INITIAL: Final = (
    "adapters start without an effect; trainable_candle.lora.loftq sets other initial values"
)
_LAYERS: Final = (
    r"give target_modules a regular expression for whole names, such as '.*\.(0|1)\.to_q'"
)
_PEFT: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "task_type": ((_ANY,), ""),
    "auto_mapping": ((_ANY,), ""),
    "base_model_name_or_path": ((_ANY,), ""),
    "revision": ((_ANY,), ""),
    "runtime_config": ((_ANY,), ""),
    "megatron_core": ((_ANY,), ""),
    "qalora_group_size": ((_ANY,), ""),
    "peft_type": ((None, "LORA"), "choose the kind with `adapter`"),
    "inference_mode": ((False,), "adapters are made to be trained; `eval()` ends dropout"),
    "init_lora_weights": ((True,), _INITIAL),
    "bias": (("none",), "adapters do not change biases; to train biases, make them variables"),
    "lora_bias": ((False,), "adapters have no bias"),
    "modules_to_save": (
        (None, [], ()),
        "only adapters are trained and saved; `requires_grad_()` makes a module trainable, too",
    ),
    "fan_in_fan_out": ((False,), "weights are (out, in); transpose those of other layouts"),
    "layers_to_transform": ((None,), _LAYERS),
    "layers_pattern": ((None,), _LAYERS),
    "layer_replication": ((None,), "repeat the layers in the model"),
    "loftq_config": ((None, {}), "call trainable_candle.lora.loftq"),
    "eva_config": ((None,), _INITIAL),
    "corda_config": ((None,), _INITIAL),
    "lora_ga_config": ((None,), _INITIAL),
    "use_qalora": ((False,), "give `qat` for quantization-aware training"),
    "trainable_token_indices": ((None,), "adapters are for linear layers and convolutions"),
    "target_parameters": ((None,), "name layers in target_modules"),
    "megatron_config": ((None,), "layers of Megatron are not supported"),
    "arrow_config": ((None,), "one adapter is used at a time"),
    "alora_invocation_tokens": ((None,), "adapters act on every token"),
    "ensure_weight_tying": ((False,), "tied layers are adapted once"),
}
"""peft's arguments: the values that ask for what this library does anyway, and advice on others."""


class _Made(type):
    """Makes and recognises the extension's `LoraConfig`."""

    def __call__(cls, *args: Any, **given: Any) -> _core.LoraConfig:
        own = {name: value for name, value in given.items() if name not in _PEFT}
        for name in given.keys() - own.keys():
            same, advice = _PEFT[name]
            value = given[name]
            if _ANY not in same and not any(type(value) is type(v) and value == v for v in same):
                raise ConfigError(
                    f"LoraConfig: {name}={value!r} of peft has no counterpart: {advice}; "
                    f"{same[0]!r} is accepted"
                )
        return _core.LoraConfig(*args, **own)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _core.LoraConfig)

    def __getattr__(cls, name: str) -> Any:
        return getattr(_core.LoraConfig, name)

    def __dir__(cls) -> list[str]:
        return dir(_core.LoraConfig)


class LoraConfig(metaclass=_Made):  # noqa: D101 - the extension's docstring
    __doc__ = _core.LoraConfig.__doc__
    __module__ = _core.LoraConfig.__module__
    __signature__ = signature(_core.LoraConfig)

    def __init_subclass__(cls) -> None:
        raise TypeError("LoraConfig has no subclasses; write a function that makes the object")


def _restored(values: dict[str, Any]) -> _core.LoraConfig:
    return _core.LoraConfig(**values)


def _reduced(config: _core.LoraConfig) -> tuple[Any, tuple[dict[str, Any]]]:
    names = signature(_core.LoraConfig).parameters
    return _restored, ({name: getattr(config, name) for name in names},)


copyreg.pickle(_core.LoraConfig, _reduced)
