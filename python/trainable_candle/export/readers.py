"""Which exported adapters of language models other programs load.

vLLM (`vllm/lora/peft_helper.py` at 02143692ba86a7ba6198a67e12982c5317c8bd2f) raises on DoRA.
llama.cpp's format, which Ollama loads too, has no place for DoRA's magnitudes. mlx-lm loads DoRA,
but `export` does not write its form. The module `verdicts` says what programs do with files that
are not exported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from trainable_candle.errors import ConfigError

if TYPE_CHECKING:
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


def refusals(adapter: TextAdapter, reader: str) -> list[str]:
    """Return the reasons why a program does not load the exported adapter.

    The exported adapter has one scale and one rank for all layers, so it needs none of the settings
    that some programs ignore.
    """
    reasons = []
    if adapter.is_dora and reader != "peft":
        no = "export writes no DoRA for it" if reader == "mlx" else "it does not load DoRA"
        reasons.append(f"{no}; use export --for merged")
    if reader == "vllm" and adapter.rank > VLLM_RANKS[-1]:
        reasons.append(f"the adapter's rank is {adapter.rank}, expected at most {VLLM_RANKS[-1]}")
    return reasons


def require_accepted(adapter: TextAdapter, reader: str) -> None:
    """Check that a program will load the exported adapter.

    Raises:
        ConfigError: the program rejects the adapter.
    """
    reasons = refusals(adapter, reader)
    if reasons:
        raise ConfigError(
            f"export: {READERS[reader]} does not load this adapter: {'; '.join(reasons)}"
        )


def vllm_rank(rank: int) -> int:
    """Return the smallest `--max-lora-rank` of vLLM that admits an adapter of this rank."""
    return next(allowed for allowed in VLLM_RANKS if allowed >= rank)
