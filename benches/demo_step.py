"""A training step of the demo's digit generator: noise, forward, backward, clipping and AdamW.

python benches/demo_step.py
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import timing

import trainable_candle as tc
from trainable_candle.families.digits import BASE
from trainable_candle.train import FlowMatching

if TYPE_CHECKING:
    from collections.abc import Callable

# Sizes of the digit generator. FREQUENCIES counts the cosines and sines of the timestep together.
DIM, HEADS, LAYERS, PATCH, FREQUENCIES = 96, 3, 3, 2, 64
TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
RANK = 8
TIMESTEPS = 1000


def our_step(
    model: tc.models.DigitsTransformer,
    parameters: list[tc.Var],
    images: np.ndarray,
    labels: np.ndarray,
) -> Callable[[], float]:
    flow = FlowMatching()
    optimizer = tc.optim.AdamW(parameters, lr=1e-3, weight_decay=0.0)

    def step() -> float:
        optimizer.zero_grad()
        sample, levels, target = flow.noise(tc.tensor(images))
        velocity = model(sample, levels * TIMESTEPS, tc.tensor(labels))
        loss = tc.nn.functional.mse_loss(velocity, target)
        loss.backward()
        tc.optim.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return loss.item()

    return step


class TorchDigits:
    """The same model in usual torch code.

    `weights` has copies of our model's tensors, and `adapter` has copies of the LoRA factors, or is
    empty.
    """

    def __init__(self, torch: Any, weights: dict[str, Any], adapter: dict[str, Any]) -> None:
        self.torch, self.weights, self.adapter = torch, weights, adapter
        half = FREQUENCIES // 2
        self.frequencies = torch.exp(-math.log(10000) * torch.arange(half) / half)

    def linear(self, name: str, x: Any) -> Any:
        """The output of the linear layer `name`, plus that of its LoRA if `adapter` has one.

        The scale lora_alpha / r of the LoRA is 1.
        """
        linear = self.torch.nn.functional.linear
        y = linear(x, self.weights[name + ".weight"], self.weights[name + ".bias"])
        if name + ".lora_A.weight" not in self.adapter:
            return y
        down, up = self.adapter[name + ".lora_A.weight"], self.adapter[name + ".lora_B.weight"]
        return y + linear(linear(x, down), up)

    def norm(self, x: Any, shift: Any, scale: Any) -> Any:
        """Layer norm, modulated by `shift` and `scale`."""
        return self.torch.nn.functional.layer_norm(x, (DIM,), eps=1e-6) * (1 + scale) + shift

    def __call__(self, x: Any, timestep: Any, labels: Any) -> Any:
        """The predicted velocity.

        x has the shape (batch, 1, 8, 8). `h` are the hidden states of its patches,
        (batch, patches, DIM); `e` is the embedding of timestep and label, (batch, DIM).
        """
        torch, functional, batch = self.torch, self.torch.nn.functional, len(x)
        grid = 8 // PATCH  # patches along a side of the image
        h = (
            x.reshape(batch, grid, PATCH, grid, PATCH)
            .transpose(2, 3)
            .reshape(batch, grid * grid, PATCH * PATCH)
        )
        h = self.linear("pos_embed.proj", h) + self.weights["pos_embed.pos_embed"]
        angles = timestep[:, None] * self.frequencies
        e = self.linear("time_embedding.linear_1", torch.cat([angles.cos(), angles.sin()], dim=1))
        e = self.linear("time_embedding.linear_2", functional.silu(e))
        e = functional.silu(
            e + functional.embedding(labels, self.weights["class_embedding.weight"])
        )
        for i in range(LAYERS):
            h = self.block(f"transformer_blocks.{i}.", h, e)
        scale, shift = self.linear("norm_out.linear", e)[:, None].chunk(2, dim=2)
        h = self.linear("proj_out", self.norm(h, shift, scale))
        return h.reshape(batch, grid, grid, PATCH, PATCH).transpose(2, 3).reshape(x.shape)

    def block(self, name: str, h: Any, e: Any) -> Any:
        """Attention and feed-forward layers, modulated by the embedding `e`."""
        functional = self.torch.nn.functional
        parts = self.linear(name + "norm1.linear", e)[:, None].chunk(6, dim=2)
        # _a is for attention, _f for the feed-forward network.
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = parts
        n = self.norm(h, shift_a, scale_a)
        q, k, v = (
            self.linear(name + f"attn.to_{c}", n).unflatten(2, (HEADS, -1)).transpose(1, 2)
            for c in "qkv"
        )
        a = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        h = h + gate_a * self.linear(name + "attn.to_out.0", a)
        n = functional.gelu(
            self.linear(name + "ff.net.0.proj", self.norm(h, shift_f, scale_f)), approximate="tanh"
        )
        return h + gate_f * self.linear(name + "ff.net.2", n)


def their_step(
    torch: Any,
    weights: dict[str, Any],
    adapter: dict[str, Any],
    images: np.ndarray,
    labels: np.ndarray,
) -> Callable[[], float]:
    trained = list((adapter or weights).values())  # without an adapter, all weights
    for tensor in trained:
        tensor.requires_grad_()
    model = TorchDigits(torch, weights, adapter)
    optimizer = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0)
    data, classes = torch.from_numpy(images), torch.from_numpy(labels)

    def step() -> float:
        optimizer.zero_grad()
        noise, sigmas = torch.randn_like(data), torch.rand(len(data))
        target = noise - data
        velocity = model(data + sigmas[:, None, None, None] * target, sigmas * TIMESTEPS, classes)
        loss = torch.nn.functional.mse_loss(velocity, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return loss.item()

    return step


def main() -> None:
    options = timing.arguments(__doc__)
    torch = timing.find_torch()
    rng = np.random.default_rng(0)
    for title, batch, lora in (
        ("all parameters, batch 128", 128, False),
        ("LoRA rank 8, batch 64", 64, True),
    ):
        images = rng.standard_normal((batch, 1, 8, 8), dtype=np.float32)
        labels = rng.integers(0, 10, batch)
        # BASE is the folder of the trained generator; without LoRA, training starts from scratch.
        model = tc.models.load(BASE, dtype="f32") if lora else tc.models.DigitsTransformer()
        trained = (
            model.add_adapter(tc.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(TARGETS)))
            if lora
            else model
        )
        ours = trained.named_parameters()
        sides = {"ours": our_step(model, list(ours.values()), images, labels)}
        if torch:
            copy = {
                name: torch.from_numpy(tensor.numpy()).clone()
                for name, tensor in model.named_tensors().items()
            }
            adapter = (
                {name: torch.from_numpy(var.detach().numpy()).clone() for name, var in ours.items()}
                if lora
                else {}
            )
            sides["torch"] = their_step(torch, copy, adapter, images, labels)
        timing.report(title, timing.race(sides, options.rounds))


if __name__ == "__main__":
    main()
