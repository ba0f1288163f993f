"""How each model is trained and sampled: what `train-lora --model NAME` looks up."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

from trainable_candle.errors import ConfigError

if TYPE_CHECKING:
    from trainable_candle.recipes.base import Recipe

NAMES: Final = {"digits": "trainable_candle.recipes.digits:DigitsRecipe"}
"""Model name -> its recipe; adding a model is one line here."""


def find(name: str) -> type[Recipe]:
    """The recipe of a model.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in NAMES:
        raise ConfigError(f"model: `{name}` is not known; expected one of {', '.join(sorted(NAMES))}")
    module, _, attribute = NAMES[name].partition(":")
    recipe: type[Recipe] = getattr(importlib.import_module(module), attribute)
    return recipe


__all__ = ["NAMES", "find"]
