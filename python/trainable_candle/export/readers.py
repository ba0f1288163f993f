"""The programs that load exported adapters of language models, and the adapters they reject.

vLLM (`vllm/lora/peft_helper.py` at 02143692ba86a7ba6198a67e12982c5317c8bd2f) rejects DoRA.
llama.cpp's format, which Ollama loads too, cannot store DoRA's magnitudes. mlx-lm loads DoRA, but
`export` does not write DoRA in mlx-lm's format. The module `verdicts` says what each program does
with given files.
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
"""For each value of `export --for` except `merged`, the program that loads the exported adapter."""
VLLM_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The allowed values of vLLM's `--max-lora-rank`, ascending."""


def refusals(adapter: TextAdapter, reader: str) -> list[str]:
    """Return why a program cannot load an adapter once it is exported; empty if it can.

    Exported adapters have the same scale and rank in all layers. So they need no rank_pattern and
    no alpha_pattern, which some programs ignore.

    Args:
        adapter: the adapter to export.
        reader: the program, a key of `READERS`.
    """
    reasons = []
    if reader == "vllm" and adapter.rank > VLLM_RANKS[-1]:
        reasons.append(f"the adapter's rank is {adapter.rank}, expected at most {VLLM_RANKS[-1]}")
    if adapter.is_dora and reader != "peft":
        reason = "export writes no DoRA for it" if reader == "mlx" else "it does not load DoRA"
        reasons.append(f"{reason}; use export --for merged")
    return reasons


def require_accepted(adapter: TextAdapter, reader: str) -> None:
    """Check that a program can load an adapter once it is exported; see `refusals`.

    Raises:
        ConfigError: the program cannot.
    """
    reasons = refusals(adapter, reader)
    if reasons:
        raise ConfigError(
            f"export: {READERS[reader]} does not load this adapter: {'; '.join(reasons)}"
        )


def vllm_rank(rank: int) -> int:
    """Return vLLM's smallest `--max-lora-rank` for adapters of `rank`, which is at most 512."""
    return next(allowed for allowed in VLLM_RANKS if allowed >= rank)
