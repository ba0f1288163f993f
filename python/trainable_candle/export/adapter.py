"""An adapter of a language model, read from its file, with the scales multiplied into factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

import trainable_candle as tc
from trainable_candle.errors import ConfigError, WeightsFormatError
from trainable_candle.files import read_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import numpy.typing as npt

    Array = npt.NDArray[np.float32]

WEIGHTS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"
KINDS: Final = ("lora", "dora")
"""The kinds of adapters that can be exported."""


class Factors(NamedTuple):
    """The change of a layer's weight (out, in): `up @ down`, and with DoRA a magnitude."""

    down: Array
    """(rank, in)."""
    up: Array
    """(out, rank), multiplied by the scale."""
    magnitude: Array | None = None
    """(out,): with DoRA, the Euclidean norms of the rows of the changed weight."""

    def rows(self, selected: slice) -> Factors:
        """Return the change of the `selected` rows of the weight."""
        magnitude = None if self.magnitude is None else self.magnitude[selected]
        return Factors(self.down, self.up[selected], magnitude)


@dataclass(frozen=True)
class TextAdapter:
    """An adapter of a language model."""

    layers: dict[str, Factors]
    """The factors of each adapted layer, by the layer's name in transformers."""

    @property
    def rank(self) -> int:
        """The largest rank among the layers."""
        return max(len(factors.down) for factors in self.layers.values())

    @property
    def is_dora(self) -> bool:
        """Whether a layer has a magnitude."""
        return any(factors.magnitude is not None for factors in self.layers.values())

    def filled(self) -> dict[str, Factors]:
        """Return the factors of each layer, padded with zeros to the largest rank."""
        return {
            layer: Factors(
                _padded(factors.down, (self.rank, factors.down.shape[1])),
                _padded(factors.up, (factors.up.shape[0], self.rank)),
                factors.magnitude,
            )
            for layer, factors in self.layers.items()
        }


def _padded(matrix: Array, shape: tuple[int, int]) -> Array:
    """Return the matrix with rows and columns of zeros added up to `shape`."""
    padded = np.zeros(shape, np.float32)
    padded[: matrix.shape[0], : matrix.shape[1]] = matrix
    return padded


def read_adapter(path: Path, family: str, weights: Path) -> TextAdapter:
    """Read an adapter: the file that a run writes, or a folder that peft writes.

    Args:
        path: the file or the folder.
        family: the model's name for `--model`.
        weights: the model's folder; its weights are not read.

    Raises:
        MissingFileError, WeightsFormatError: the adapter is missing or damaged, does not fit the
            model, or does not have peft's names of tensors.
        ConfigError: the adapter of a layer is neither LoRA nor DoRA, or `family` is not known.
    """
    report = tc.verify_adapter(path, family, weights)
    # Tensors that are no parameters of an adapter, and adapters of layers that the model lacks.
    foreign = [*report.others, *(m.module for m in report.modules if m.layer is None)]
    if foreign:
        raise WeightsFormatError(
            f"adapter: {path} is not for this model: {foreign[0]}; see `trainable-candle verify`"
        )
    for module in report.modules:
        if module.fault:
            raise WeightsFormatError(
                f"adapter: {path} cannot be used: {module.module}: {module.fault}; see "
                "`trainable-candle verify`"
            )
    unsupported = {str(module.kind) for module in report.modules} - set(KINDS)
    if unsupported:
        raise ConfigError(
            f"adapter: {path} has layers of the kind {', '.join(sorted(unsupported))}, and only "
            "LoRA and DoRA can be exported; `trainable-candle merge` writes the model with the "
            "adapter merged"
        )
    tensors = tc.load_file(path / WEIGHTS if path.is_dir() else path)
    layers = {}
    for module in report.modules:
        prefix = f"{module.module}."
        keys = {key.removeprefix(prefix): key for key in tensors if key.startswith(prefix)}

        def array(name: str, keys: Mapping[str, str] = keys) -> Array:
            return np.asarray(tensors[keys[name]].to("f32").numpy())

        if not {"lora_A.weight", "lora_B.weight"} <= keys.keys():
            raise WeightsFormatError(
                f"adapter: {path} does not have peft's names; load it with "
                "`Model.load_adapter` and write it with `AdapterSet.save(format='peft')`"
            )
        # peft writes the name without `.weight`, other programs with it.
        names = (name for name in keys if name.startswith("lora_magnitude_vector"))
        magnitude = next(map(array, names), None)
        up = array("lora_B.weight") * np.float32(module.scale)
        layers[str(module.layer)] = Factors(array("lora_A.weight"), up, magnitude)
    if not layers:
        raise WeightsFormatError(
            f"adapter: {path} holds no adapter; give one that train-lora wrote"
        )
    return TextAdapter(layers)


def adapter_settings(path: Path) -> dict[str, Any] | None:
    """Return the content of `adapter_config.json` in a folder; None if there is no such file.

    Raises:
        WeightsFormatError: the file is not a JSON object.
    """
    file = path / CONFIG
    if not file.is_file():
        return None
    return read_object(file)


def short_names(adapted: Iterable[str], layers: Iterable[str]) -> list[str]:
    """Return the shortest names that select the adapted layers and no others.

    They are the last parts of the adapted layers' names, such as `q_proj`, or the complete names if
    the name of a layer that is not adapted ends in one of these parts.

    Args:
        adapted: the names of the adapted layers.
        layers: the names of all layers.
    """
    chosen = set(adapted)
    last = {name.rpartition(".")[2] for name in chosen}
    selected = {name for name in layers if name.rpartition(".")[2] in last}
    return sorted(last if selected == chosen else chosen)
