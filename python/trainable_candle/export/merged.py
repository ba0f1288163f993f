"""Merges an adapter into the weights of a language model, one weight file at a time."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import trainable_candle as tc
from trainable_candle.errors import MissingFileError, WeightsFormatError
from trainable_candle.files import read_object, write_atomically
from trainable_candle.text.tokenizer_files import copy_files

if TYPE_CHECKING:
    from pathlib import Path

    from trainable_candle import Tensor
    from trainable_candle.export.adapter import Factors, TextAdapter

CONFIG: Final = "config.json"
QUANTIZATION: Final = "quantization_config"
"""The entry of a configuration that says in which format the weights are quantized."""
INDEX: Final = "model.safetensors.index.json"
"""The file that says which weight file has which tensor; models in one weight file have none."""
SINGLE: Final = "model.safetensors"
"""The name of a single weight file."""
AT_ONCE: Final = 2**21
"""The number of elements of a weight that are merged at a time, so that they stay in CPU caches.
`_sum` counts the changed ones among them in f32, which is exact up to 2**24."""


@dataclass
class Merged:
    """How much of an adapter's change of the weights remains after rounding to their dtype."""

    files: int = 0
    """The number of weight files written."""
    weights: int = 0
    """The number of elements of the adapted layers' weights."""
    changed: int = 0
    """How many of these elements differ from the original ones after rounding."""
    squared_change: float = 0.0
    """The squared Euclidean norm of the change before rounding, over all these elements."""
    squared_loss: float = 0.0
    """The squared Euclidean norm of the difference between changes before and after rounding."""

    @property
    def lost(self) -> float:
        """The norm of what rounding took from the change, divided by the norm of the change."""
        return (self.squared_loss / self.squared_change) ** 0.5 if self.squared_change else 0.0

    def __str__(self) -> str:
        """Return the shares that changed and that rounding took, as text for the terminal."""
        share = self.changed / max(1, self.weights)
        return (
            f"{share:.1%} of the adapted layers' weights changed; rounding took "
            f"{self.lost:.1%} of the change"
        )


def write_merged(weights: Path, adapter: TextAdapter, output: Path) -> Merged:
    """Write a model's files with an adapter added to its weights; copy configuration and tokenizer.

    The adapter is added in f32, and the sum is rounded once, to the dtype of the weight. The names
    of the tensors, the names of the weight files and the index stay the same.

    Args:
        weights: the model's folder.
        adapter: the adapter.
        output: an empty folder.

    Returns:
        How much of the adapter's change remains after rounding.

    Raises:
        MissingFileError, WeightsFormatError: a file is missing or damaged, `weights` is not the
            folder of an unquantized model, or no file has the weight of an adapted layer.
        OSError: a file cannot be written.
    """
    # `unmerged` are the adapted layers whose weight has not been found yet.
    unmerged, result = dict(adapter.layers), Merged()
    for name in shards(weights):
        _merge_file(weights / name, output / name, unmerged, result)
    if unmerged:
        raise WeightsFormatError(f"weights: {weights} has no weight of {next(iter(unmerged))}")
    copy_files(weights, output, CONFIG)
    if (weights / INDEX).is_file():
        shutil.copyfile(weights / INDEX, output / INDEX)
    return result


def _merge_file(source: Path, target: Path, unmerged: dict[str, Factors], result: Merged) -> None:
    """Write a weight file with the adapter added, and count the file in `result`.

    The file's tensors are freed when this function returns.

    Args:
        source: the weight file.
        target: the file to write.
        unmerged: the adapter's layers by name; those in this file are removed.
        result: the counts and norms so far.
    """
    tensors = tc.load_file(source)
    for key, weight in tensors.items():
        layer = key.removesuffix(".weight")
        # Files of a model without its head omit the prefix `model.`.
        factors = unmerged.pop(layer, None) or unmerged.pop(f"model.{layer}", None)
        if factors is not None:
            tensors[key] = _sum(weight, factors, result)
    # transformers requires this entry of the metadata.
    tc.save_file(tensors, target, {"format": "pt"})
    result.files += 1


def quantization_of(folder: Path) -> Any:
    """Return what the configuration in a model's folder says about quantized weights.

    Return None if there is no configuration, or it says nothing about them.

    Raises:
        WeightsFormatError: the configuration is not a JSON object.
    """
    path = folder / CONFIG
    return read_object(path).get(QUANTIZATION) if path.is_file() else None


def remove_quantization(folder: Path) -> None:
    """Remove what the configuration in a model's folder says about quantized weights."""
    if quantization_of(folder) is not None:
        config = read_object(folder / CONFIG)
        del config[QUANTIZATION]
        write_atomically(folder / CONFIG, json.dumps(config, indent=2))


def shards(weights: Path) -> list[str]:
    """Return the names of the weight files in a model's folder; check that they can be merged.

    Raises:
        MissingFileError: the folder has no weight files, or `weights` is a file.
        WeightsFormatError: the index or the configuration is damaged, the index names a file in
            another folder, or the weights are quantized.
    """
    if weights.is_file():
        raise MissingFileError(
            f"weights: {weights} is a file; give the folder of the original model (a GGUF file has "
            "rounded values)"
        )
    if quantization_of(weights) is not None:
        raise WeightsFormatError(
            f"weights: the weights in {weights} are quantized ({QUANTIZATION} in {CONFIG}); give "
            "the folder of the original model, or the result of `merge`, which dequantizes them"
        )
    index = weights / INDEX
    if not index.is_file():
        if not (weights / SINGLE).is_file():
            raise MissingFileError(f"weights: {weights} has neither {SINGLE} nor {INDEX}")
        return [SINGLE]
    files = read_object(index).get("weight_map")
    if not (isinstance(files, dict) and all(isinstance(name, str) for name in files.values())):
        raise WeightsFormatError(
            f"weights: {index} has no `weight_map` with the file of each weight; download it again"
        )
    names = sorted(set(files.values()))
    outside = [name for name in names if "/" in name or "\\" in name]
    if outside:
        raise WeightsFormatError(f"weights: {index} names {outside[0]}, expected a file beside it")
    return names


def add_factors(before: Tensor, factors: Factors) -> Tensor:
    """Return the weight `before`, (out, in) in f32, plus `up @ down` of its adapter.

    `factors.up` contains the adapter's scale.
    With a magnitude (DoRA), each row of the sum is scaled so that its Euclidean norm is the row's
    element of the magnitude.
    """
    exact = before + tc.tensor(factors.up) @ tc.tensor(factors.down)
    if factors.magnitude is None:
        return exact
    lengths = (exact * exact).sum(1, keepdim=True).sqrt()
    return exact / lengths * tc.tensor(factors.magnitude).reshape(-1, 1)


def _sum(weight: Tensor, factors: Factors, result: Merged) -> Tensor:
    """Return the weight with its adapter, in its dtype; add its counts and norms to `result`.

    Only `AT_ONCE` elements, in whole rows, are computed at a time.
    """
    count, width = weight.shape
    rows_at_once = max(1, AT_ONCE // width)
    parts = []
    for start in range(0, count, rows_at_once):
        rows = slice(start, min(start + rows_at_once, count))
        before = weight[rows].to("f32")
        exact = add_factors(before, factors.rows(rows))
        after = exact.to(str(weight.dtype))
        change, rounded_change = exact - before, after.to("f32") - before
        loss = change - rounded_change
        result.changed += int((rounded_change != 0).to("f32").sum().item())
        result.squared_change += (change * change).sum().item()
        result.squared_loss += (loss * loss).sum().item()
        parts.append(after)
    result.weights += count * width
    return tc.cat(parts)
