"""Functions that write an adapter of a language model for other programs, one for each program.

`READERS` in readers.py describes these programs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

import trainable_candle as tc
from trainable_candle.export import gguf
from trainable_candle.export.adapter import CONFIG, WEIGHTS, TextAdapter, short_names
from trainable_candle.export.forms import GGUF_WEIGHTS, MLX_WEIGHTS, MODELFILE
from trainable_candle.export.readers import vllm_rank
from trainable_candle.files import write_atomically
from trainable_candle.text.tokenizer_files import copy_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainable_candle.tasks.text.family import TextFamily

    Writer = Callable[[TextAdapter, TextFamily, str, Path], list[str]]
    """(adapter, model, name or path of the base, empty folder) -> commands that load the files."""


def _peft(adapter: TextAdapter, family: TextFamily, base: str, output: Path) -> list[str]:
    tensors = {}
    # `filled` pads the factors to the largest rank, `adapter.rank`, which becomes `r` below.
    for layer, factors in adapter.filled().items():
        prefix = f"base_model.model.{layer}."
        tensors[f"{prefix}lora_A.weight"] = tc.tensor(factors.down)
        tensors[f"{prefix}lora_B.weight"] = tc.tensor(factors.up)
        if factors.magnitude is not None:
            tensors[f"{prefix}lora_magnitude_vector"] = tc.tensor(factors.magnitude)
    tc.save_file(tensors, output / WEIGHTS, {"format": "pt"})
    settings = {
        "alpha_pattern": {},
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        # peft multiplies by lora_alpha / r. This must be 1, because `up` includes the scale.
        "lora_alpha": adapter.rank,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": adapter.rank,
        "rank_pattern": {},
        "target_modules": short_names(adapter.layers, family.layers()),
        "task_type": "CAUSAL_LM",
        "use_dora": adapter.is_dora,
        "use_rslora": False,
    }
    write_atomically(output / CONFIG, json.dumps(settings, indent=2) + "\n")
    copy_files(family.weights, output)  # the tokenizer's files
    return [f'PeftModel.from_pretrained(model, "{output}")']


def _vllm(adapter: TextAdapter, family: TextFamily, base: str, output: Path) -> list[str]:
    _peft(adapter, family, base, output)
    rank = vllm_rank(adapter.rank)
    return [f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules tuned={output}"]


def _gguf(adapter: TextAdapter, family: TextFamily, base: str, output: Path) -> list[str]:  # noqa: ARG001
    gguf.write_adapter(output / GGUF_WEIGHTS, adapter, family.settings)
    return [f"llama-cli -m BASE.gguf --lora {output / GGUF_WEIGHTS}"]


def _ollama(adapter: TextAdapter, family: TextFamily, base: str, output: Path) -> list[str]:
    _gguf(adapter, family, base, output)
    stops = (family.tokenizer.token(number) for number in sorted(family.tokenizer.stops))
    # In a Modelfile, paths are relative to its own folder, but `base` is relative to the current
    # folder.
    local = Path(base).expanduser()
    source = local.resolve() if local.exists() else base
    lines = [f"FROM {source}", f"ADAPTER ./{GGUF_WEIGHTS}"]
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops]
    write_atomically(output / MODELFILE, "\n".join(lines) + "\n")
    return [f"ollama create tuned -f {output / MODELFILE}"]


def _mlx(adapter: TextAdapter, family: TextFamily, base: str, output: Path) -> list[str]:
    # No factors have magnitudes here: `export` writes DoRA for peft alone.
    tensors = {}
    for layer, factors in adapter.filled().items():
        tensors[f"{layer}.lora_a"] = tc.tensor(np.ascontiguousarray(factors.down.T))
        tensors[f"{layer}.lora_b"] = tc.tensor(np.ascontiguousarray(factors.up.T))
    tc.save_file(tensors, output / MLX_WEIGHTS, {"format": "mlx"})
    # "model.layers.NUMBER.NAME" -> (NUMBER of the decoder layer, NAME of the linear layer in it).
    # mlx-lm adapts all `keys` in each of the last `num_layers` decoder layers.
    numbers_and_names = [layer.split(".", 3)[2:] for layer in adapter.layers]
    total = int(family.settings["num_hidden_layers"])
    settings: dict[str, Any] = {
        "model": base,
        "fine_tune_type": "lora",
        "num_layers": total - min(int(number) for number, _ in numbers_and_names),
        "lora_parameters": {
            "rank": adapter.rank,
            "scale": 1.0,  # `up` includes the scale
            "dropout": 0.0,
            "keys": sorted({name for _, name in numbers_and_names}),
        },
    }
    write_atomically(output / CONFIG, json.dumps(settings, indent=2) + "\n")
    return [f"mlx_lm.generate --model {base} --adapter-path {output} --prompt TEXT"]


WRITERS: Final[dict[str, Writer]] = {
    "peft": _peft,
    "vllm": _vllm,
    "gguf": _gguf,
    "mlx": _mlx,
    "ollama": _ollama,
}
"""The writer of each program, by the names in `READERS`."""
