"""Make a small digits transformer, an input, and the velocity and gradients that torch computes.

    python make_torch.py

Needs torch and safetensors. Writes config.json, model.safetensors and case.safetensors into the
folder of this script. Computes in f64 and stores f32.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional

HERE = Path(__file__).parent
SIZES = {
    "sample_size": 6,
    "patch_size": 2,
    "in_channels": 2,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 4,
    "mlp_ratio": 3,
    "frequency_embedding_size": 6,
    "num_classes": 3,
}
# The features of a token, those within a block's MLP, the values of a patch, and the patches along
# one side.
DIM, HIDDEN, PATCH, GRID = 8, 24, 8, 3


def weights() -> dict[str, torch.Tensor]:
    """Return random parameters under this library's names."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "pos_embed.pos_embed": (1, GRID * GRID, DIM),
        "class_embedding.weight": (SIZES["num_classes"], DIM),
    }
    linears = {
        "pos_embed.proj": (DIM, PATCH),
        "time_embedding.linear_1": (DIM, SIZES["frequency_embedding_size"]),
        "time_embedding.linear_2": (DIM, DIM),
        "norm_out.linear": (2 * DIM, DIM),
        "proj_out": (PATCH, DIM),
    }
    for i in range(2):
        block = f"transformer_blocks.{i}."
        linears[block + "norm1.linear"] = (6 * DIM, DIM)
        linears |= {
            block + f"attn.{name}": (DIM, DIM) for name in ("to_q", "to_k", "to_v", "to_out.0")
        }
        linears[block + "ff.net.0.proj"] = (HIDDEN, DIM)
        linears[block + "ff.net.2"] = (DIM, HIDDEN)
    for name, (outputs, inputs) in linears.items():
        shapes[name + ".weight"] = (outputs, inputs)
        shapes[name + ".bias"] = (outputs,)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}


def forward(
    w: dict[str, torch.Tensor], x: torch.Tensor, t: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Return the velocity for images `x`, times `t` and labels `y`, with parameters `w`."""

    def linear(name: str, v: torch.Tensor) -> torch.Tensor:
        return functional.linear(v, w[name + ".weight"], w[name + ".bias"])

    # Tokens are (batch, tokens, DIM); `shift` and `scale` are (batch, DIM).
    def modulated(v: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(v, (DIM,), eps=1e-6) * (1 + scale[:, None]) + shift[:, None]

    # As in diffusers, embed the patches with a convolution whose stride is the size of its kernel.
    # The weights of a patch are in the order (channels, rows, columns).
    kernel = w["pos_embed.proj.weight"].reshape(DIM, 2, 2, 2)
    h = (
        functional.conv2d(x, kernel, w["pos_embed.proj.bias"], stride=2).flatten(2).transpose(1, 2)
        + w["pos_embed.pos_embed"]
    )
    # Half of the 6 features of a time are cosines, and half are sines.
    frequencies = torch.exp(-math.log(10000) * torch.arange(3) / 3)
    angles = t[:, None] * frequencies
    e = linear("time_embedding.linear_1", torch.cat([angles.cos(), angles.sin()], dim=1))
    e = functional.silu(
        linear("time_embedding.linear_2", functional.silu(e)) + w["class_embedding.weight"][y]
    )
    for i in range(2):
        block = f"transformer_blocks.{i}."
        # For the attention (a) and the feed-forward layer (f).
        shift_a, scale_a, gate_a, shift_f, scale_f, gate_f = linear(
            block + "norm1.linear", e
        ).chunk(6, dim=1)
        n = modulated(h, shift_a, scale_a)
        q, k, v = (
            # (batch, heads, tokens, features of a head)
            linear(block + f"attn.to_{letter}", n).unflatten(2, (2, 4)).transpose(1, 2)
            for letter in "qkv"
        )
        a = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        h = h + gate_a[:, None] * linear(block + "attn.to_out.0", a)
        n = functional.gelu(
            linear(block + "ff.net.0.proj", modulated(h, shift_f, scale_f)), approximate="tanh"
        )
        h = h + gate_f[:, None] * linear(block + "ff.net.2", n)
    scale, shift = linear("norm_out.linear", e).chunk(2, dim=1)
    # The values of an output patch are in the order (rows, columns, channels).
    patches = linear("proj_out", modulated(h, shift, scale)).reshape(-1, GRID, GRID, 2, 2, 2)
    return torch.einsum("nhwpqc->nchpwq", patches).reshape(x.shape)


if __name__ == "__main__":
    w = {name: value.double().requires_grad_() for name, value in weights().items()}
    generator = torch.Generator().manual_seed(1)
    sample = torch.randn(4, 2, 6, 6, generator=generator)
    timestep = torch.tensor([0.0, 17.5, 500.0, 1000.0])
    labels = torch.tensor([0, 2, 1, 2])
    velocity = forward(w, sample.double(), timestep.double(), labels)
    target = torch.randn(sample.shape, generator=generator)
    functional.mse_loss(velocity, target.double()).backward()
    case = {
        "sample": sample,
        "timestep": timestep,
        "class_labels": labels,
        "target": target,
        "velocity": velocity.detach(),
    }
    case |= {f"grad.{name}": value.grad.float() for name, value in w.items()}
    save_file(
        {name: value.detach().float() for name, value in w.items()}, HERE / "model.safetensors"
    )
    save_file(
        {
            name: value.contiguous() if name == "class_labels" else value.float().contiguous()
            for name, value in case.items()
        },
        HERE / "case.safetensors",
    )
    (HERE / "config.json").write_text(
        json.dumps({"_class_name": "DigitsTransformer", **SIZES}, indent=2) + "\n"
    )
