"""The setting `init`, and settings that contradict it or contradict `qat`.

`init` says which initial values adapters get, and `qat` turns on quantization-aware training. The
argument `config` of the functions is a `TrainConfig`.
"""

from __future__ import annotations

from typing import Any, Final

DEFAULT: Final = "default"
LOFTQ: Final = "loftq"
PISSA: Final = "pissa"
INITS: Final = (DEFAULT, LOFTQ, PISSA)
"""How adapters start, in this order: without an effect; with values that offset the base's
quantization error; as the principal part of the weights."""


def contradiction(config: Any) -> str | None:
    """Return why `qat` or `init` contradicts another setting; None if neither does."""
    return _qat_contradiction(config) or _init_contradiction(config)


def _qat_contradiction(config: Any) -> str | None:
    """Return why `qat` contradicts another setting; None if it does not."""
    if config.qat is None:
        return None
    if config.lora_dropout:
        return (
            "--qat rounds the sum of weight and adapter, and --lora-dropout needs the two apart; "
            "leave out one of the flags"
        )
    base = config.base_format
    if base not in {None, config.qat}:
        return (
            f"--qat {config.qat} cannot start from --base-precision {base}, which has rounded the "
            "weights to another grid; leave --base-precision out"
        )
    return None


def _init_contradiction(config: Any) -> str | None:
    """Return why `init` contradicts another setting; None if it does not."""
    init = config.init
    if init == DEFAULT:
        return None
    if config.adapter != "lora":
        return f"--init {init} works only with --adapter lora, and --adapter is {config.adapter}"
    if config.initial_adapter:
        return f"--init {init} and --initial-adapter both say how the adapter starts; give one"
    if init == PISSA:
        return _pissa_contradiction(config)
    if config.base_format is None:
        return (
            "--init loftq offsets the error of a quantized base; give --base-precision, such as nf4"
        )
    return None


def _pissa_contradiction(config: Any) -> str | None:
    """Return why `init: pissa` contradicts a setting; None if it does not.

    `_init_contradiction` has already checked the settings that contradict `loftq` as well.
    """
    if config.base_format is not None:
        return (
            f"--init pissa needs the original weights, and --base-precision {config.base_format} "
            "rounds them; leave out --base-precision, or give --init loftq"
        )
    if config.stream_blocks or config.stream_modulation:
        return (
            "--init pissa needs the weights in the device's memory; leave out --stream-blocks and "
            "--stream-modulation"
        )
    if config.qat is not None:
        return "--init pissa does not work with --qat, which rounds adapted weights; give one"
    if config.training_adapter:
        return (
            "--init pissa subtracts its start as a frozen LoRA, and a layer has room for one: "
            "give --init pissa or --training-adapter"
        )
    if config.lora_dropout:
        return (
            "--lora-dropout would drop the principal part of the weights, with which --init pissa "
            "starts; leave out one of the flags"
        )
    if config.adapter_precision != "f32":
        return (
            "--init pissa writes a small difference of two large products, which "
            f"--adapter-precision {config.adapter_precision} would round away; leave "
            "--adapter-precision out"
        )
    return None
