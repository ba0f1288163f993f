"""How each model is trained and sampled: what `train-lora --model NAME` looks up."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from trainable_candle import hub
from trainable_candle.errors import ConfigError, MissingFileError
from trainable_candle.settings import flag, nearest

if TYPE_CHECKING:
    from trainable_candle.recipes.base import Recipe

NAMES: Final = {
    "sdxl": "trainable_candle.recipes.sdxl:SDXLRecipe",
    "digits": "trainable_candle.recipes.digits:DigitsRecipe",
}
"""Model name -> its recipe; adding a model is one line here."""


def find(name: str) -> type[Recipe]:
    """The recipe of a model.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in NAMES:
        raise ConfigError(f"model: `{name}` is not known{nearest(name, NAMES)}")
    module, _, attribute = NAMES[name].partition(":")
    recipe: type[Recipe] = getattr(importlib.import_module(module), attribute)
    return recipe


def weights_of(name: str, given: str | Path | None) -> Path:
    """Where the weights of a model are: as given, else those that the package ships.

    Args:
        name: of the model.
        given: a path, or the name of a pipeline on the Hugging Face hub, which is fetched.

    Raises:
        ConfigError: there is no such model, or it needs weights and none are given.
        MissingFileError: there are no such weights, or the hub cannot be reached.
    """
    recipe = find(name)
    weights = given or recipe.default_weights()
    if not weights:
        raise ConfigError(f"model: `{name}` needs its checkpoint; give --weights PATH")
    if recipe.parts and hub.is_name(str(weights)):
        return hub.download_pipeline(str(weights), recipe.parts)
    return existing("weights", Path(weights).expanduser())


def existing(setting: str, path: Path) -> Path:
    """The path itself if there is something.

    Raises:
        MissingFileError: there is nothing; names the flag of the setting.
    """
    if not path.exists():
        raise MissingFileError(f"{flag(setting)}: there is no file or folder {path}")
    return path


def load(name: str, weights: str | Path | None, dtype: str | None, device: str) -> Recipe:
    """A model by name, from its weights or those that the package ships.

    Raises:
        ConfigError: there is no such model, or it needs weights and none are given.
        MissingFileError, WeightsFormatError: the weights are missing, damaged, or of another model.
    """
    return find(name).load(weights_of(name, weights), dtype, device)


__all__ = ["NAMES", "existing", "find", "load", "weights_of"]
