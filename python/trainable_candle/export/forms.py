"""Finds out for which program an adapter of a language model was written, and what it contains.

The names of its files tell the program: `export` writes, and the programs look for, these names.
`CONFIG` and `WEIGHTS` are the names of peft's files: `adapter_config.json` and
`adapter_model.safetensors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trainable_candle as tc
from trainable_candle._core import gguf_facts
from trainable_candle.errors import WeightsFormatError
from trainable_candle.export.adapter import CONFIG, WEIGHTS
from trainable_candle.export.gguf import architecture

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any

    from trainable_candle.tasks.estimate import Shape

MLX_WEIGHTS: Final = "adapters.safetensors"
GGUF_WEIGHTS: Final = "adapter.gguf"
MODELFILE: Final = "Modelfile"


def form_of(path: Path) -> str | None:
    """Return the program whose form a file or folder has; None if it has no program's form.

    The result is "peft", "mlx", "gguf" (llama.cpp) or "ollama", a key of `export.READERS`; "peft"
    also stands for vLLM, which reads peft's form.
    """
    if path.is_file():
        if path.suffix == ".gguf":
            return "gguf"
        names = {path.name}
        if (path.parent / CONFIG).is_file():
            names.add(CONFIG)
    else:
        names = {file.name for file in path.iterdir()} if path.is_dir() else set()
    if {WEIGHTS, CONFIG} <= names:
        return "peft"
    if {MLX_WEIGHTS, CONFIG} <= names:
        return "mlx"
    if GGUF_WEIGHTS in names:
        return "ollama" if MODELFILE in names else "gguf"
    return None


def summary(path: Path, form: str) -> str:
    """Describe an adapter: its layers and ranks in mlx-lm's form, its architecture in llama.cpp's.

    Args:
        path: the file or folder.
        form: "mlx", "gguf" or "ollama".

    Raises:
        MissingFileError, WeightsFormatError: a file is missing or damaged, or holds no adapter.
    """
    if form == "mlx":
        factors = _mlx_factors(path)
        ranks = {shape[1] for key, shape in factors.items() if key.endswith(".lora_a")}
        layers = len({key.rpartition(".")[0] for key in factors})
        return f"{layers} layers, rank {', '.join(map(str, sorted(ranks)))}"
    return f"architecture {_gguf(path)['general.architecture']}"


def require_fit(
    path: Path, form: str, config: Mapping[str, Any], layers: Mapping[str, Shape]
) -> None:
    """Check that an adapter in mlx-lm's or llama.cpp's form is for a model.

    In llama.cpp's form, only the name of the architecture is compared.

    Args:
        path: the file or folder.
        form: "mlx", "gguf" or "ollama".
        config: the model's `config.json`.
        layers: the shapes of the weights of the model's linear layers.

    Raises:
        MissingFileError, WeightsFormatError: a file is missing or damaged, holds no adapter, or is
            for another model.
        ConfigError: llama.cpp's name of the model's architecture is not known.
    """
    if form != "mlx":
        found, expected = _gguf(path)["general.architecture"], architecture(config)
        if found != expected:
            raise WeightsFormatError(
                f"{path}: is for the architecture {found}, and the model is {expected}"
            )
        return
    for key, shape in _mlx_factors(path).items():
        layer, _, factor = key.rpartition(".")
        # The first two sizes of a `Shape`, which may be a convolution's. (0, 0) fits no factor.
        outputs, inputs = layers.get(layer, (0, 0))[:2]
        size, required = (shape[1], outputs) if factor == "lora_b" else (shape[0], inputs)
        if size != required:
            raise WeightsFormatError(
                f"{path}: {key} has the shape {list(shape)}, which does not fit "
                + (f"a weight of shape {[outputs, inputs]}" if layer in layers else "this model")
            )


def _mlx_factors(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the factors, by key: lora_a is (in, rank), lora_b is (rank, out).

    Raises:
        MissingFileError, WeightsFormatError: the file is missing or damaged, or has no factors.
    """
    tensors = tc.load_file(path / MLX_WEIGHTS if path.is_dir() else path)
    factors = {key: t.shape for key, t in tensors.items() if key.endswith((".lora_a", ".lora_b"))}
    if not factors:
        raise WeightsFormatError(f"{path}: has no lora_a and lora_b, mlx-lm's names of factors")
    return factors


def _gguf(path: Path) -> dict[str, Any]:
    """Return the metadata of an adapter in llama.cpp's form.

    Raises:
        MissingFileError, WeightsFormatError: the file is missing or damaged, or holds no adapter.
    """
    facts = gguf_facts(path / GGUF_WEIGHTS if path.is_dir() else path) or {}
    if facts.get("general.type") != "adapter":
        kind = facts.get("general.type", "a file without general.type")
        raise WeightsFormatError(f"{path}: expected an adapter in llama.cpp's format, found {kind}")
    return facts
