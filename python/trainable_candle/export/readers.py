"""Which adapters of language models other programs reject, or apply differently.

vLLM (`vllm/lora/peft_helper.py` at 02143692ba86a7ba6198a67e12982c5317c8bd2f) needs r, an integer
lora_alpha and target_modules, and raises on modules_to_save and DoRA. That version of vLLM ignores
the settings that it does not know, among them rank_pattern and alpha_pattern; vLLM 0.33 reads
rank_pattern and alpha_pattern. llama.cpp (`convert_lora_to_gguf.py` at
0b03adaa632b76c7651dd1f6fa3b7a0b5eda479c) takes lora_alpha from the configuration and the ranks
from the shapes of the factors, and stops at a tensor that is not a LoRA factor. mlx-lm
(`mlx_lm/tuner/utils.py` at d78bf58e) has a format of its own; Ollama loads llama.cpp's format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from trainable_candle.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainable_candle.export.adapter import TextAdapter

READERS: Final = {
    "peft": "transformers and peft",
    "vllm": "vLLM",
    "gguf": "llama.cpp",
    "mlx": "mlx-lm",
    "ollama": "Ollama",
}
"""For each name in `export --for`, the program that loads the exported adapter."""
VLLM_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The allowed values of vLLM's `--max-lora-rank`; its default is 16."""
_DORA: Final = "it does not load DoRA; use export --for merged"
_UNREAD: Final = {
    "vllm": ("rank_pattern", "alpha_pattern"),
    "gguf": ("alpha_pattern", "use_rslora", "modules_to_save"),
    "ollama": ("alpha_pattern", "use_rslora", "modules_to_save"),
}
"""Settings of `adapter_config.json` that a program ignores; the adapter's effect then differs."""
_READ_SINCE: Final = {"vllm": " before 0.33"}
"""The versions of a program that ignore the settings in `_UNREAD`; absent if all versions do."""


def refusals(adapter: TextAdapter, settings: Mapping[str, Any] | None) -> dict[str, list[str]]:
    """By program, the reasons why it rejects an adapter or does not apply it as trained.

    Args:
        adapter: the adapter.
        settings: the adapter's `adapter_config.json`; None if the adapter has no such file.
    """
    found: dict[str, list[str]] = {reader: [] for reader in READERS}
    for reader, reasons in found.items():
        if settings is None:
            reasons.append("there is no adapter_config.json beside the adapter")
        if adapter.is_dora and reader != "peft":
            reasons.append(_DORA)
        unread = [name for name in _UNREAD.get(reader, ()) if (settings or {}).get(name)]
        if unread:
            since = _READ_SINCE.get(reader, "")
            reasons.append(f"it does not read {' and '.join(unread)}{since}")
    if (settings or {}).get("modules_to_save"):
        found["vllm"].append("it rejects modules_to_save")
    if adapter.rank > VLLM_RANKS[-1]:
        found["vllm"].append(
            f"the adapter's rank is {adapter.rank}, expected at most {VLLM_RANKS[-1]}"
        )
    return found


def require_accepted(adapter: TextAdapter, reader: str) -> None:
    """Check that a program will load the exported adapter.

    Raises:
        ConfigError: the program rejects the adapter.
    """
    # The settings are empty: the export gives all layers one scale and rank, so the exported
    # adapter_config.json needs none of the settings that programs ignore.
    reasons = refusals(adapter, {})[reader]
    if reasons:
        raise ConfigError(
            f"export: {READERS[reader]} does not load this adapter: {'; '.join(reasons)}"
        )


def vllm_rank(rank: int) -> int:
    """The smallest `--max-lora-rank` of vLLM that admits an adapter of this rank."""
    return next(allowed for allowed in VLLM_RANKS if allowed >= rank)
