"""An adapter of a language model, read from its file, with its scales multiplied in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

import trainable_candle as tc
from trainable_candle.errors import ConfigError, WeightsFormatError
from trainable_candle.files import parse_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import numpy.typing as npt

    Array = npt.NDArray[np.float32]

WEIGHTS: Final = "adapter_model.safetensors"
CONFIG: Final = "adapter_config.json"
KINDS: Final = ("lora", "dora")


class Factors(NamedTuple):
    """The change of a layer's weight, `up @ down`."""

    down: Array
    """(rank, in)."""
    up: Array
    """(out, rank), multiplied by the scale."""
    magnitude: Array | None = None
    """(out,): with DoRA, the Euclidean norms of the rows of the changed weight."""

    def rows(self, some: slice) -> Factors:
        """Return the change of these rows of the weight."""
        magnitude = None if self.magnitude is None else self.magnitude[some]
        return Factors(self.down, self.up[some], magnitude)


@dataclass(frozen=True)
class TextAdapter:
    """The adapters of a language model's layers."""

    layers: dict[str, Factors]
    """The factors of each adapted layer, by the layer's name in transformers."""

    @property
    def rank(self) -> int:
        """The largest rank among the layers."""
        return max(len(factors.down) for factors in self.layers.values())

    @property
    def is_dora(self) -> bool:
        """Whether layers have magnitudes."""
        return any(factors.magnitude is not None for factors in self.layers.values())

    def filled(self) -> dict[str, Factors]:
        """Return the layers, all with the largest rank: factors are padded with zeros."""
        return {
            layer: Factors(
                _filled(factors.down, (self.rank, factors.down.shape[1])),
                _filled(factors.up, (factors.up.shape[0], self.rank)),
                factors.magnitude,
            )
            for layer, factors in self.layers.items()
        }


def _filled(array: Array, shape: tuple[int, int]) -> Array:
    filled = np.zeros(shape, np.float32)
    filled[: array.shape[0], : array.shape[1]] = array
    return filled


def read_adapter(path: Path, family: str, weights: Path) -> TextAdapter:
    """Read an adapter: the file that a run writes, or a folder that peft writes.

    Args:
        path: the file or the folder.
        family: the model's name for `--model`.
        weights: the model's folder; its weights are not read.

    Raises:
        MissingFileError, WeightsFormatError: the adapter is missing or damaged, does not fit the
            model, or does not have peft's names of tensors.
        ConfigError: the adapter is neither LoRA nor DoRA.
    """
    report = tc.verify_adapter(path, family, weights)
    wrong = [*report.others, *(m.module for m in report.modules if m.layer is None or m.fault)]
    if wrong:
        raise WeightsFormatError(
            f"adapter: {path} is not for this model: {wrong[0]}; see `trainable-candle verify`"
        )
    kinds = {str(module.kind) for module in report.modules} - set(KINDS)
    if kinds:
        raise ConfigError(
            f"adapter: {path} is of the kind {', '.join(sorted(kinds))}, and only LoRA and DoRA "
            "can be exported; `trainable-candle merge` writes the whole model"
        )
    tensors = tc.load_file(path / WEIGHTS if path.is_dir() else path)
    layers = {}
    for module in report.modules:
        start = f"{module.module}."
        parts = {key.removeprefix(start): key for key in tensors if key.startswith(start)}

        def part(name: str, parts: Mapping[str, str] = parts) -> Array:
            return np.asarray(tensors[parts[name]].to("f32").numpy())

        if not {"lora_A.weight", "lora_B.weight"} <= parts.keys():
            raise WeightsFormatError(
                f"adapter: {path} does not have peft's names; load it with "
                "`Model.load_adapter` and write it with `AdapterSet.save(format='peft')`"
            )
        magnitude = next((part(name) for name in parts if name.startswith("lora_magn")), None)
        up = part("lora_B.weight") * np.float32(module.scale)
        layers[str(module.layer)] = Factors(part("lora_A.weight"), up, magnitude)
    if not layers:
        raise WeightsFormatError(
            f"adapter: {path} holds no adapter; give one that train-lora wrote"
        )
    return TextAdapter(layers)


def adapter_settings(path: Path) -> dict[str, Any] | None:
    """Return the `adapter_config.json` of a folder; None without one."""
    file = path / CONFIG
    if not file.is_file():
        return None
    settings: dict[str, Any] = parse_json(file.read_text(encoding="utf-8"))
    return settings


def short_names(adapted: Iterable[str], layers: Iterable[str]) -> list[str]:
    """Return the shortest names that select the adapted layers and no others.

    They are the last parts of the adapted layers' names, or the whole names if the name of another
    layer ends in one of these parts.

    Args:
        adapted: the names of the adapted layers.
        layers: the names of all layers.
    """
    chosen = set(adapted)
    last = {name.rpartition(".")[2] for name in chosen}
    named = {name for name in layers if name.rpartition(".")[2] in last}
    return sorted(last if named == chosen else chosen)
