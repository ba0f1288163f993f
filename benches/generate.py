"""Tokens a second of a language model of 0.5 B parameters in bf16 on the CPU, at batch 1.

python benches/generate.py

A token needs every weight once, so reading memory limits the speed. The script generates in several
turns. Before each, it measures the rate at which NumPy reads large arrays with the same number of
threads. It prints this rate and the rate at which generation reads the weights.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import timing

import trainable_candle as tc

QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
    "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "hidden_act": "silu",
}  # fmt: skip
"""Qwen2-0.5B; its weights are random here."""
BYTES = 2 * 494_032_768
"""The bytes of the weights of Qwen2-0.5B in bf16. Its head and embedding are one matrix."""
ARRAY = 1 << 30
"""Bytes that a thread reads to measure the rate: far more than the caches hold."""


def read_rate(arrays: list[np.ndarray]) -> float:
    """Bytes a second that all threads together read, one array each: the best of four times."""
    times = []
    with ThreadPoolExecutor(len(arrays)) as pool:
        for _ in range(4):
            begin = time.perf_counter()
            list(pool.map(np.max, arrays))
            times.append(time.perf_counter() - begin)
    return len(arrays) * ARRAY / min(times)


def seconds_of_a_token(model: tc.models.CausalLM, rounds: int) -> float:
    """The median time of `rounds` tokens after a short prompt."""
    times, last = [], 0.0
    # Without stop tokens, the model generates as many tokens as asked.
    stream = model.stream([[1, 2, 3, 4]], max_new_tokens=rounds + 4, stop_token_ids=[])
    for _ in stream:
        now = time.perf_counter()
        times.append(now - last)
        last = now
    # The first time has no start, since no token came before it; the next three warm up.
    return statistics.median(times[4:])


def main() -> None:
    options = timing.arguments(__doc__)
    tc.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(QWEN2))
        model = tc.models.CausalLM.from_config(path, dtype="bf16", device="cpu")
    arrays = [np.ones(ARRAY // 8, np.uint64) for _ in range(options.threads)]
    for _ in range(timing.TURNS):
        rate = read_rate(arrays)
        seconds = seconds_of_a_token(model, options.rounds)
        print(
            f"reading: {rate / 1e9:.1f} GB/s; generation: {1 / seconds:.1f} tokens/s, "
            f"{BYTES / seconds / 1e9:.1f} GB/s, {BYTES / seconds / rate:.2f} of reading"
        )


if __name__ == "__main__":
    main()
