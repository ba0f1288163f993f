"""Train a small model with LoRA, and print step time and memory after each tenth of the steps.

The printed lines must show that neither the median time of a step nor the memory grows from one
tenth to the next; the script does not check this.

python tests/robustness/steps.py [--steps 100000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import trainable_candle as tc

TENTHS = 10


def resident_kib() -> int:
    """Return the memory that this process has in RAM, in KiB."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.partition("VmRSS:")[2].split()[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    tc.manual_seed(0)
    # The model: linear layers, each with a LoRA of rank 8 and alpha 8, and followed by GELU.
    layers = [tc.nn.LoRALinear(tc.randn((64, 64)) * 0.1, 8, 8.0) for _ in range(4)]
    parameters = [var for layer in layers for var in layer.get_vars()]
    optimizer = tc.optim.AdamW8bit(parameters, lr=1e-3, weight_decay=0.01)
    target = tc.randn((16, 64))
    print("tenth   median step   memory   kept by the tape")
    for tenth in range(TENTHS):
        times = []
        for _ in range(options.steps // TENTHS):
            started = time.perf_counter()
            x = tc.randn((16, 64))
            for layer in layers:
                x = tc.nn.functional.gelu(layer(x))
            loss = tc.nn.functional.mse_loss(x, target)
            loss.backward()
            tc.optim.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - started)
        del x, loss  # With these, the graph is gone, so the tape must keep 0 bytes.
        microseconds = 1e6 * statistics.median(times)
        kept_by_tape = tc.memory.saved_bytes()
        print(
            f"{tenth + 1:5}   {microseconds:8.1f} us   {resident_kib()} KiB   {kept_by_tape} B",
            flush=True,
        )


if __name__ == "__main__":
    main()
