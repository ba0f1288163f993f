"""Writes a language model, with an adapter merged into its weights, as one GGUF file for llama.cpp.

The names of the tensors, the metadata and the order of a weight's rows are those of llama.cpp's
converter (`convert_hf_to_gguf.py` at 0b03adaa632b76c7651dd1f6fa3b7a0b5eda479c).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

import trainable_candle as tc
from trainable_candle.errors import ConfigError, WeightsFormatError
from trainable_candle.export import gguf
from trainable_candle.export.gguf_file import KINDS, Entry, Fact, write
from trainable_candle.export.gguf_vocabulary import vocabulary
from trainable_candle.export.merged import CONFIG, add_factors, shards
from trainable_candle.files import read_object

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from trainable_candle import Tensor
    from trainable_candle.export.adapter import TextAdapter

FILE_TYPES: Final = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7, "bf16": 32}
"""The value of `general.file_type` for each kind that `write_model` offers for matrices."""
_QUANTIZATION_VERSION: Final = 2
"""ggml's number for the current layouts of quantized blocks (`GGML_QNT_VERSION`)."""
_OUTSIDE: Final = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
"""Parameters outside the blocks: the name in transformers, without `model.` -> llama.cpp's name."""
_NORMS: Final = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
"""Norms in a block: the name in transformers -> llama.cpp's name."""


def write_model(weights: Path, adapter: TextAdapter, path: Path, kind: str) -> None:
    """Write a model with an adapter added to its weights.

    The adapter is added in f32. Matrices are rounded once, to `kind`, or to f16 if their rows are
    not whole blocks of `kind`; norms and biases are f32.

    Args:
        weights: the model's folder.
        adapter: the adapter.
        path: the file to write.
        kind: "f32", "f16", "bf16", "q8_0" or "q4_0".

    Raises:
        ConfigError: llama.cpp does not support the model or its tokenizer, the kind is unknown, or
            a value is not finite in f16.
        MissingFileError, WeightsFormatError: a file is missing or damaged, `weights` is not the
            folder of an unquantized model, or no file has the weight of an adapted layer.
        ArgumentError: a value is not finite or too large for "q8_0" or "q4_0".
        OSError: the file cannot be written.
    """
    if kind not in FILE_TYPES:
        raise ConfigError(f"--gguf is {kind}, expected one of {', '.join(FILE_TYPES)}")
    file_names = shards(weights)
    config = read_object(weights / CONFIG)
    facts = model_facts(config) | vocabulary(weights, int(config["vocab_size"]))
    facts["general.file_type"] = FILE_TYPES[kind]
    facts["general.quantization_version"] = _QUANTIZATION_VERSION
    unmerged = dict(adapter.layers)
    entries = _rotary_divisors(config)
    for file_name in file_names:
        for key, tensor in tc.load_file(weights / file_name).items():
            name_in_model = key.removeprefix("model.")
            # llama.cpp computes the rotary frequencies itself, and uses the embedding as the head
            # if the file has no head.
            if name_in_model.endswith("rotary_emb.inv_freq"):
                continue
            if name_in_model == "lm_head.weight" and config.get("tie_word_embeddings"):
                continue
            layer = f"model.{name_in_model.removesuffix('.weight')}"
            factors = unmerged.pop(layer, None)
            gguf_name = parameter_name(name_in_model)

            # The default arguments hold the values of this turn of the loop.
            def values(
                tensor: Tensor = tensor, factors: Any = factors, gguf_name: str = gguf_name
            ) -> Tensor:
                exact = tensor.to("f32")
                if factors is not None:
                    exact = add_factors(exact, factors)
                return _ordered(exact, gguf_name, config)

            shape = tuple(tensor.shape)
            entries.append(Entry(gguf_name, shape, _kind_of(shape, kind), values))
    if unmerged:
        raise WeightsFormatError(f"weights: {weights} has no weight of {next(iter(unmerged))}")
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        write(file, facts, entries)
    partial.replace(path)


def _kind_of(shape: Sequence[int], kind: str) -> str:
    """Return the kind that a tensor is stored in: f32 for vectors, else `kind`.

    As in llama.cpp's converter, f16 replaces `kind` if the rows are not whole blocks of `kind`.
    """
    if len(shape) == 1:
        return "f32"
    return kind if shape[-1] % KINDS[kind].block == 0 else "f16"


def parameter_name(name: str) -> str:
    """Return llama.cpp's name of a parameter; `name` is transformers' name without `model.`.

    Raises:
        ConfigError: llama.cpp has no name for the parameter.
    """
    if name in _OUTSIDE:
        return _OUTSIDE[name]
    layer, _, parameter = name.rpartition(".")
    # The groups of the match are the index of the block and the layer's name in the block.
    match = gguf.LAYER.fullmatch(f"model.{layer}")
    names = gguf.NAMES | _NORMS
    if not match or match[2] not in names:
        raise ConfigError(f"export: llama.cpp has no name for {name}")
    return f"blk.{match[1]}.{names[match[2]]}.{parameter}"


def _ordered(values: Tensor, name: str, config: Mapping[str, Any]) -> Tensor:
    """Return the values of a parameter; Llama's query and key rows get llama.cpp's order.

    The rotary embedding rotates pairs of features. llama.cpp pairs neighbouring rows of a head, and
    transformers pairs rows that are half a head apart. `name` is llama.cpp's name of the parameter.
    """
    layer = name.rpartition(".")[0]
    is_llama = gguf.architecture(config) == "llama"
    if not (is_llama and layer.endswith(("attn_q", "attn_k"))):
        return values
    rows = gguf.paired(values.numpy(), gguf.heads(config, layer))
    return tc.tensor(rows)


def model_facts(config: Mapping[str, Any]) -> dict[str, Fact]:
    """Return the model's architecture, sizes and rotary settings, as metadata of the GGUF file.

    Raises:
        ConfigError: llama.cpp does not support the model, or the kind of its rotary scaling.
    """
    name = gguf.architecture(config)
    heads = int(config["num_attention_heads"])
    width = int(config.get("head_dim") or config["hidden_size"] // heads)
    rope = _rope(config)
    # Where a field may be missing, the default is that of transformers' `LlamaConfig`.
    context = int(config.get("max_position_embeddings", 2048))
    facts: dict[str, Fact] = {
        "general.architecture": name,
        "general.type": "model",
        f"{name}.block_count": int(config["num_hidden_layers"]),
        f"{name}.context_length": context,
        f"{name}.embedding_length": int(config["hidden_size"]),
        f"{name}.feed_forward_length": int(config["intermediate_size"]),
        f"{name}.attention.head_count": heads,
        f"{name}.attention.head_count_kv": int(config.get("num_key_value_heads") or heads),
        f"{name}.attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", 1e-6)),
        f"{name}.attention.key_length": width,
        f"{name}.attention.value_length": width,
        f"{name}.rope.dimension_count": width,
        f"{name}.rope.freq_base": float(rope.get("rope_theta", 10_000.0)),
        f"{name}.vocab_size": int(config["vocab_size"]),
    }
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind in {"linear", "yarn"}:
        facts[f"{name}.rope.scaling.type"] = kind
        facts[f"{name}.rope.scaling.factor"] = float(rope["factor"])
        if kind == "yarn":
            length = int(rope.get("original_max_position_embeddings") or context)
            facts[f"{name}.rope.scaling.original_context_length"] = length
    # Llama 3's scaling is not in the metadata, but in the tensor of `_rotary_divisors`.
    elif kind not in {"default", "llama3"}:
        raise ConfigError(
            f"export: rotary scaling of the kind {kind} is not supported for llama.cpp, expected "
            "linear, yarn or llama3"
        )
    return facts


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings, for which versions of transformers have different names."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_theta": config.get("rope_theta", 10_000.0), **found}


def _rotary_divisors(config: Mapping[str, Any]) -> list[Entry]:
    """Return one entry, the divisors of the rotary frequencies, for Llama 3's scaling, else none.

    Frequencies with at most `low` turns in `original_max_position_embeddings` positions are divided
    by `factor`. Those with at least `high` turns stay. The divisor changes smoothly in between.
    """
    rope = _rope(config)
    if (rope.get("rope_type") or rope.get("type")) != "llama3":
        return []
    width = int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])
    low, high, factor = (
        float(rope[name]) for name in ("low_freq_factor", "high_freq_factor", "factor")
    )
    length = float(rope["original_max_position_embeddings"])
    frequencies = rope["rope_theta"] ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    turns = length * frequencies / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    divisors = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    make: Callable[[], Tensor] = lambda: tc.tensor(divisors)  # noqa: E731 - the name has an annotation
    return [Entry("rope_freqs.weight", divisors.shape, "f32", make)]
