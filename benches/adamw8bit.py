"""AdamW8bit over 16 M parameters against torch's fused f32 AdamW, with 1, 2 and all threads.

python benches/adamw8bit.py
"""

from __future__ import annotations

import os

import numpy as np
import timing

import trainable_candle as tc

PARAMETERS = 16 * 2**20


def main() -> None:
    options = timing.arguments(__doc__)
    rng = np.random.default_rng(0)
    values = rng.standard_normal(PARAMETERS, dtype=np.float32)
    grads = rng.standard_normal(PARAMETERS, dtype=np.float32)
    sides = {}
    for name, kind in (("ours", tc.optim.AdamW8bit), ("ours f32 AdamW", tc.optim.AdamW)):
        var = tc.Var(values)
        (var * tc.tensor(grads)).sum().backward()  # sets `var.grad` to `grads`
        optimizer = kind([var], lr=1e-4, weight_decay=0.01)
        sides[name] = optimizer.step
        optimizer.step()  # makes the states
        print(f"{name}: {optimizer.state_bytes / PARAMETERS:.3f} bytes of state a parameter")
    torch = timing.find_torch()
    if torch:
        fused = torch.from_numpy(values.copy()).requires_grad_()
        fused.grad = torch.from_numpy(grads)
        # timing.report divides the time of the side "ours" by that of the side "torch".
        sides["torch"] = torch.optim.AdamW([fused], lr=1e-4, weight_decay=0.01, fused=True).step
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    for threads in sorted({1, 2, cores}):
        tc.set_num_threads(threads)
        if torch:
            torch.set_num_threads(threads)
        # A third of --rounds, because a step over 16 M parameters takes long.
        times = timing.race(sides, max(options.rounds // 3, 5))
        timing.report(f"16 M parameters, {threads} threads, torch fused", times)


if __name__ == "__main__":
    main()
