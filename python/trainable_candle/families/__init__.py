"""The families of models that can be trained, by the names that `train-lora --model` takes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainable_candle import hub
from trainable_candle.errors import ConfigError
from trainable_candle.outputs import is_output
from trainable_candle.settings import group_of, nearest
from trainable_candle.settings.checks import existing
from trainable_candle.settings.presets import IMAGES, TEXTS
from trainable_candle.settings.texts import Texts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainable_candle.settings import TrainConfig
    from trainable_candle.tasks.task import Family, Task

NAMES: Final = {
    "sdxl": "trainable_candle.families.sdxl:SDXL",
    "sd3": "trainable_candle.families.sd3:SD3",
    "flux": "trainable_candle.families.flux:Flux",
    "chroma": "trainable_candle.families.chroma:Chroma",
    "zimage": "trainable_candle.families.z_image:ZImage",
    "flux2": "trainable_candle.families.flux2:Flux2",
    "qwen-image": "trainable_candle.families.qwen_image:QwenImage",
    "causal-lm": "trainable_candle.families.causal_lm:CausalLM",
    "digits": "trainable_candle.families.digits:Digits",
}
"""For each name of `--model`, the module and the class of its family."""


def find(name: str) -> type[Family]:
    """Return the class of the family with a name of `NAMES`.

    ```python
    assert tc.families.find("sdxl").default_weights() is not None
    ```

    Raises:
        ConfigError: there is no family of that name.
    """
    if name not in NAMES:
        raise ConfigError(f"model: `{name}` is not known{nearest(name, NAMES)}")
    module, _, attribute = NAMES[name].partition(":")
    family: type[Family] = getattr(importlib.import_module(module), attribute)
    return family


def presets(name: str) -> Mapping[str, Mapping[str, Any]]:
    """Return each preset by its name: its values for the settings that the model takes.

    ```python
    assert "fast" in tc.families.presets("sdxl")
    ```

    Raises:
        ConfigError: there is no such model.
    """
    groups = find(name).groups
    complete = TEXTS if Texts in groups else IMAGES
    return {
        preset: {key: value for key, value in values.items() if group_of(key) in groups}
        for preset, values in complete.items()
    }


def weights_of(name: str, given: str | Path | None) -> Path:
    """Return the path of a model's weights: `given`, or by default the weights in the package.

    The package has small models for a few families (`sdxl`, `causal-lm`, `digits`), not the
    published weights.

    ```python
    folder = tc.families.weights_of("sdxl", None)  # the folder of a tiny SDXL
    ```

    Args:
        name: the name of the model.
        given: a path; the name of a pipeline or a language model on the Hugging Face hub, which is
            downloaded; or None.

    Raises:
        ConfigError: there is no such model, no weights are given and the package has none, or the
            path is the output of a run.
        MissingFileError: there are no such weights, or the hub cannot be reached.
    """
    family = find(name)
    weights = given or family.default_weights()
    if not weights:
        where = f": {family.download}" if family.download else ""
        raise ConfigError(f"model: `{name}` needs its checkpoint; give --weights PATH{where}")
    # If the family's weights are a pipeline's folder, `parts` has the subfolders to download.
    if family.parts and hub.is_name(str(weights)):
        return hub.download_pipeline(str(weights), family.parts)
    if Texts in family.groups and hub.is_name(str(weights)):
        return hub.download_language_model(str(weights))
    path = existing("weights", Path(weights).expanduser())
    if is_output(path):
        raise ConfigError(
            f"--weights: {path} is the output of a run and has an adapter, not a model; give it as "
            "--adapter, or as --initial-adapter to train it further"
        )
    return path


def load(
    name: str,
    weights: str | Path | None,
    dtype: str | None,
    device: str,
    config: TrainConfig | None = None,
) -> Task:
    """Return the task of a model, to generate with the model or to merge an adapter into it.

    Checks the model's files. Weights are loaded when they are first needed.

    ```python
    task = tc.families.load("digits", None, "f32", "cpu")
    ```

    Args:
        name: the name of the model.
        weights: as `given` of `weights_of`.
        dtype: the dtype of the model and the text encoders; None: the dtype of their files.
        device: the device of all parts.
        config: settings, which may name separate files for parts of the model; None: the defaults.

    Raises:
        ConfigError: as `weights_of`; or a configuration is wrong, or the parts of the model do not
            fit together.
        MissingFileError, WeightsFormatError: the weights are missing, damaged, or of another model.
    """
    family = find(name)(weights_of(name, weights), dtype, device, config)
    family.require_own()  # checks that the weights are of this family
    return family.task()


__all__ = ["NAMES", "find", "load", "presets", "weights_of"]
