"""AdamW8bit over 16 M parameters against torch's f32 AdamW.

python benches/adamw8bit.py
"""

from __future__ import annotations

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
        (var * tc.tensor(grads)).sum().backward()
        optimizer = kind([var], lr=1e-4, weight_decay=0.01)
        sides[name] = optimizer.step
        optimizer.step()
        print(f"{name}: {optimizer.state_bytes / PARAMETERS:.3f} bytes of state a parameter")
    torch = timing.find_torch()
    if torch:
        parameter = torch.from_numpy(values.copy()).requires_grad_()
        parameter.grad = torch.from_numpy(grads)
        sides["torch"] = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.01).step
        fused = torch.from_numpy(values.copy()).requires_grad_()
        fused.grad = torch.from_numpy(grads)
        sides["torch fused"] = torch.optim.AdamW(
            [fused], lr=1e-4, weight_decay=0.01, fused=True
        ).step
    timing.report("16 M parameters", timing.race(sides, max(options.rounds // 3, 5)))


if __name__ == "__main__":
    main()
