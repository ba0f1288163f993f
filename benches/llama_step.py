"""A LoRA training step of the built-in language model and of torch, on the CPU.

python benches/llama_step.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import timing

import trainable_candle as tc
from trainable_candle.families.causal_lm import BUILT_IN

if TYPE_CHECKING:
    from collections.abc import Callable

# The sizes of the built-in model: HEADS query heads of width HEAD, feed-forward networks of width
# INNER.
WIDTH, LAYERS, HEADS, HEAD, INNER, VOCABULARY = 96, 3, 3, 32, 128, 260
# LENGTH is the number of tokens of a sequence.
SEQUENCES, LENGTH, RANK = 8, 128, 16
LINEAR_LAYERS = {
    "self_attn.q_proj": (HEADS * HEAD, WIDTH), "self_attn.k_proj": (HEAD, WIDTH),
    "self_attn.v_proj": (HEAD, WIDTH), "self_attn.o_proj": (WIDTH, HEADS * HEAD),
    "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER),
}  # fmt: skip
"""The linear layers of a block, which all get a LoRA, and the shapes (out, in) of their weights.
There is one head of keys and one of values."""


def our_step(ids: np.ndarray) -> Callable[[], object]:
    """Return a step of our model on these tokens, (sequences, tokens)."""
    model = tc.models.CausalLM.from_pretrained(BUILT_IN, dtype="f32")
    modules = [name.rpartition(".")[2] for name in LINEAR_LAYERS]
    adapter = model.add_adapter(tc.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=modules))
    optimizer = tc.optim.AdamW(adapter.parameters(), lr=1e-4, weight_decay=0.0)
    inputs = tc.tensor(ids)
    targets = inputs  # `loss` compares the scores after each token with the next token

    def step() -> object:
        loss = model.loss(inputs, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


class TorchLlama:
    """The same architecture in usual torch code, with random weights."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.embedding = torch.randn(VOCABULARY, WIDTH) * 0.1
        self.weights = [
            {name: torch.randn(shape) * 0.1 for name, shape in LINEAR_LAYERS.items()}
            for _ in range(LAYERS)
        ]
        self.adapter = [
            {
                name: (torch.randn(RANK, inputs) * 0.1, torch.zeros(outputs, RANK))
                for name, (outputs, inputs) in LINEAR_LAYERS.items()
            }
            for _ in range(LAYERS)
        ]
        angles = torch.outer(torch.arange(LENGTH), 10000 ** (-torch.arange(0, HEAD, 2) / HEAD))
        angles = torch.cat([angles, angles], dim=1)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.norm_weight = torch.ones(WIDTH)

    def linear(self, layer: int, name: str, x: Any) -> Any:
        """Return the output of a linear layer with its LoRA of scale 1."""
        linear = self.torch.nn.functional.linear
        down, up = self.adapter[layer][name]
        return linear(x, self.weights[layer][name]) + linear(linear(x, down), up)

    def norm(self, x: Any) -> Any:
        """Return the root mean square norm of `x`, with weights of 1."""
        return self.torch.nn.functional.rms_norm(x, (WIDTH,), self.norm_weight, 1e-5)

    def heads(self, layer: int, name: str, x: Any, *, rotated: bool) -> Any:
        """Return the queries, keys or values of `x`, (sequences, heads, tokens, HEAD).

        If `rotated`, apply the rotary embeddings of the positions.
        """
        x = self.linear(layer, name, x).unflatten(2, (-1, HEAD)).transpose(1, 2)
        if not rotated:
            return x
        first, second = x.chunk(2, dim=3)
        return x * self.cos + self.torch.cat([-second, first], dim=3) * self.sin

    def loss(self, ids: Any) -> Any:
        """Return the mean cross-entropy of the next tokens; `ids` are (sequences, tokens)."""
        functional = self.torch.nn.functional
        h = functional.embedding(ids, self.embedding)
        for i in range(LAYERS):
            normed = self.norm(h)
            q = self.heads(i, "self_attn.q_proj", normed, rotated=True)
            k = self.heads(i, "self_attn.k_proj", normed, rotated=True)
            v = self.heads(i, "self_attn.v_proj", normed, rotated=False)
            attended = functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
            h = h + self.linear(i, "self_attn.o_proj", attended.transpose(1, 2).flatten(2))
            normed = self.norm(h)
            gate = functional.silu(self.linear(i, "mlp.gate_proj", normed))
            h = h + self.linear(i, "mlp.down_proj", gate * self.linear(i, "mlp.up_proj", normed))
        scores = functional.linear(self.norm(h)[:, :-1], self.embedding)
        return functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


def their_step(torch: Any, ids: np.ndarray) -> Callable[[], object]:
    """Return a step of torch on these tokens, (sequences, tokens)."""
    model = TorchLlama(torch)
    leaves = [leaf for layer in model.adapter for pair in layer.values() for leaf in pair]
    for leaf in leaves:
        leaf.requires_grad_()
    optimizer = torch.optim.AdamW(leaves, lr=1e-4, weight_decay=0.0)
    inputs = torch.from_numpy(ids)

    def step() -> object:
        loss = model.loss(inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def main() -> None:
    options = timing.arguments(__doc__)
    torch = timing.find_torch()
    # Tokens of bytes; the ids from 256 on are special tokens.
    ids = np.random.default_rng(0).integers(0, 256, (SEQUENCES, LENGTH))
    sides: dict[str, Callable[[], object]] = {"ours": our_step(ids)}
    if torch:
        sides["torch"] = their_step(torch, ids)
    title = f"{SEQUENCES} sequences of {LENGTH} tokens, LoRA of rank {RANK}"
    timing.report(title, timing.race(sides, options.rounds))


if __name__ == "__main__":
    main()
