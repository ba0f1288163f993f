"""Memory and time of checkpointing on 24 transformer blocks, of which only LoRAs are trained.

python benches/checkpointing.py
"""

from __future__ import annotations

import numpy as np
import timing

import trainable_candle as tc
from trainable_candle.nn import functional as F  # noqa: N812 (the field's name for it)

BLOCKS, BATCH, TOKENS, WIDTH, HEADS, RANK = 24, 2, 256, 256, 4, 8


class Block:
    """Pre-norm attention and GELU MLP; every linear layer is frozen and has a LoRA."""

    def __init__(self, rng: np.random.Generator) -> None:
        def lora(out: int, inner: int) -> tc.nn.LoRALinear:
            weight = rng.standard_normal((out, inner), dtype=np.float32) / np.sqrt(inner)
            base_weight = tc.tensor(weight.astype(np.float32))
            layer = tc.nn.LoRALinear(base_weight, rank=RANK, alpha=RANK)
            # The variables are the factors A and B. B starts at zero; random values make every
            # gradient of the LoRA non-zero.
            layer.get_vars()[1].set(tc.randn((out, RANK)) * 0.01)
            return layer

        self.q, self.k, self.v, self.o = (lora(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = lora(4 * WIDTH, WIDTH), lora(WIDTH, 4 * WIDTH)
        self.scale, self.shift = tc.ones(WIDTH), tc.zeros(WIDTH)

    def __call__(self, x: tc.Tensor) -> tc.Tensor:
        """x: (batch, tokens, width)."""
        h = F.layer_norm(x, (WIDTH,), self.scale, self.shift)
        q, k, v = (self._heads(layer(h)) for layer in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v)
        x = x + self.o(a.permute(0, 2, 1, 3).reshape(BATCH, TOKENS, WIDTH))
        h = F.layer_norm(x, (WIDTH,), self.scale, self.shift)
        return x + self.down(self.up(h).gelu())

    def _heads(self, x: tc.Tensor) -> tc.Tensor:
        """(batch, tokens, width) -> (batch, heads, tokens, width of a head)."""
        return x.reshape(BATCH, TOKENS, HEADS, WIDTH // HEADS).permute(0, 2, 1, 3)


def main() -> None:
    options = timing.arguments(__doc__)
    tc.manual_seed(0)
    rng = np.random.default_rng(0)
    blocks = [Block(rng) for _ in range(BLOCKS)]
    x = tc.tensor(rng.standard_normal((BATCH, TOKENS, WIDTH), dtype=np.float32))
    saved: dict[str, int] = {}  # bytes that the tape keeps for the backward pass, by policy

    def step(policy: str) -> None:
        y = x
        for block in blocks:
            y = tc.checkpoint(block, y, policy=policy)
        saved[policy] = tc.memory.saved_bytes()  # most bytes are kept at this point
        (y * y).mean().backward()

    sides = {
        policy: (lambda policy=policy: step(policy)) for policy in ("none", "selective", "full")
    }
    # A third of --rounds, because a step takes long.
    seconds = timing.race(sides, max(options.rounds // 3, 5))
    for policy in sides:
        print(
            f"{policy}: {saved[policy] / 2**20:.1f} MiB kept "
            f"({saved[policy] / saved['none']:.1%}), "
            f"{1e3 * seconds[policy]:.1f} ms a step ({seconds[policy] / seconds['none']:.3f} x)"
        )


if __name__ == "__main__":
    main()
