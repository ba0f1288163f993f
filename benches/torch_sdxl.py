"""SDXL's UNet in torch, for comparison: LoRA works as in peft, names are those of diffusers.

It computes what diffusers' `UNet2DConditionModel` computes, in eager mode, with torch's
`scaled_dot_product_attention`. With checkpointing, each residual block and each transformer block
is a checkpoint. The caller uses autocast, so f32 factors work on bf16 activations.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

# By level: channels, transformer blocks after each residual block, attention heads.
CHANNELS, DEPTHS, HEADS = (320, 640, 1280), (0, 2, 10), (5, 10, 20)
# The widths of the text's features, of the pooled text and of each embedded size.
CONTEXT, POOLED, SIZE_WIDTH = 2048, 1280, 256
GROUPS = 32
"""The groups of channels in group norms."""


class LoRALinear(nn.Module):
    """A frozen linear layer with LoRA of scale 1; the factors are f32, as in peft."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        device = base.weight.device
        # Initial values as with peft's `init_lora_weights="gaussian"`.
        self.down = nn.Parameter(torch.randn(rank, base.in_features, device=device) / rank)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, x: Any) -> Any:
        update = functional.linear(functional.linear(x, self.down), self.up)
        return self.base(x) + update


class Resnet(nn.Module):
    """A residual block, which adds a projection of the time embedding."""

    def __init__(self, channels: int, out: int, time_width: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, channels)
        self.conv1 = nn.Conv2d(channels, out, 3, padding=1)
        self.time_emb_proj = nn.Linear(time_width, out)
        self.norm2 = nn.GroupNorm(GROUPS, out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(channels, out, 1) if channels != out else None

    def forward(self, x: Any, time: Any) -> Any:
        hidden = self.conv1(functional.silu(self.norm1(x)))
        hidden = hidden + self.time_emb_proj(functional.silu(time))[:, :, None, None]
        hidden = self.conv2(functional.silu(self.norm2(hidden)))
        return hidden + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Attention(nn.Module):
    def __init__(self, dim: int, context: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(context, dim, bias=False)
        self.to_v = nn.Linear(context, dim, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(dim, dim)])

    def forward(self, x: Any, context: Any) -> Any:
        def split(y: Any) -> Any:
            return y.unflatten(2, (self.heads, -1)).transpose(1, 2)

        q, k, v = split(self.to_q(x)), split(self.to_k(context)), split(self.to_v(context))
        mixed = functional.scaled_dot_product_attention(q, k, v)
        return self.to_out[0](mixed.transpose(1, 2).flatten(2))


class GEGLU(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        # Twice 4 dim: the features of the hidden layer, and their gates.
        self.proj = nn.Linear(dim, 8 * dim)

    def forward(self, x: Any) -> Any:
        hidden, gate = self.proj(x).chunk(2, dim=-1)
        return hidden * functional.gelu(gate)


class FeedForward(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        # The identity stands for diffusers' dropout, so that the last layer is `net.2`, as there.
        self.net = nn.ModuleList([GEGLU(dim), nn.Identity(), nn.Linear(4 * dim, dim)])

    def forward(self, x: Any) -> Any:
        return self.net[2](self.net[0](x))


class Block(nn.Module):
    """A transformer block: self-attention, attention to the text, feed-forward."""

    def __init__(self, dim: int, context: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn1 = nn.LayerNorm(dim), Attention(dim, dim, heads)
        self.norm2, self.attn2 = nn.LayerNorm(dim), Attention(dim, context, heads)
        self.norm3, self.ff = nn.LayerNorm(dim), FeedForward(dim)

    def forward(self, x: Any, context: Any) -> Any:
        normed = self.norm1(x)
        x = self.attn1(normed, normed) + x
        x = self.attn2(self.norm2(x), context) + x
        return self.ff(self.norm3(x)) + x


class Transformer(nn.Module):
    """Transformer blocks on the positions of a feature map.

    `forward` gets the method `UNet.call`, which calls each block, perhaps as a checkpoint.
    """

    def __init__(self, dim: int, context: int, heads: int, depth: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, dim, eps=1e-6)
        self.proj_in, self.proj_out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        blocks = [Block(dim, context, heads) for _ in range(depth)]
        self.transformer_blocks = nn.ModuleList(blocks)

    def forward(self, x: Any, context: Any, call: Any) -> Any:
        height, width = x.shape[2:]
        tokens = self.proj_in(self.norm(x).flatten(2).transpose(1, 2))
        for block in self.transformer_blocks:
            tokens = call(block, tokens, context)
        update = self.proj_out(tokens).transpose(1, 2).unflatten(2, (height, width))
        return update + x


class Resampler(nn.Module):
    """Doubles the height and width if `up`, else halves them."""

    def __init__(self, channels: int, *, up: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=1 if up else 2, padding=1)
        self.up = up

    def forward(self, x: Any) -> Any:
        return self.conv(functional.interpolate(x, scale_factor=2.0) if self.up else x)


class Level(nn.Module):
    """The residual blocks of a level; if its depth is not 0, a transformer follows each.

    `UNet.run` calls them.

    Args:
        inputs: the input channels of each residual block.
        out: the output channels.
        level: the index of the level in `DEPTHS` and `HEADS`.
        time_width: the width of the time embedding.
        context: the width of the text's features.
    """

    def __init__(
        self, inputs: list[int], out: int, level: int, time_width: int, context: int
    ) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([Resnet(channels, out, time_width) for channels in inputs])
        depth, count = DEPTHS[level], len(inputs)
        if depth:
            attentions = [Transformer(out, context, HEADS[level], depth) for _ in range(count)]
            self.attentions = nn.ModuleList(attentions)


class Mid(Level):
    """Two residual blocks with one transformer between them."""

    def __init__(self, channels: int, time_width: int, context: int) -> None:
        super().__init__([channels, channels], channels, len(CHANNELS) - 1, time_width, context)
        del self.attentions[1]


class Embedding(nn.Module):
    def __init__(self, inputs: int, dim: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(inputs, dim), nn.Linear(dim, dim)

    def forward(self, x: Any) -> Any:
        return self.linear_2(functional.silu(self.linear_1(x)))


def sinusoids(numbers: Any, dim: int) -> Any:
    """Return the cosines, then the sines of numbers (n,) at `dim / 2` frequencies, (n, dim)."""
    half = dim // 2
    steps = torch.arange(half, device=numbers.device, dtype=torch.float32)
    angles = numbers.float()[:, None] * torch.exp(-math.log(10_000.0) * steps / half)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class UNet(nn.Module):
    """The UNet of SDXL's base model; if `checkpointing` is set, with checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        time_width = 4 * CHANNELS[0]
        self.conv_in = nn.Conv2d(4, CHANNELS[0], 3, padding=1)  # Latents have 4 channels.
        self.time_embedding = Embedding(CHANNELS[0], time_width)
        # An image has six numbers: its original size, the corner of its crop, and its target size.
        self.add_embedding = Embedding(POOLED + 6 * SIZE_WIDTH, time_width)
        last = len(CHANNELS) - 1
        downs, ups, skip_widths, channels = [], [], [CHANNELS[0]], CHANNELS[0]
        for level, width in enumerate(CHANNELS):
            block = Level([channels, width], width, level, time_width, CONTEXT)
            skip_widths += [width, width]
            if level < last:
                block.downsamplers = nn.ModuleList([Resampler(width, up=False)])
                skip_widths.append(width)
            downs.append(block)
            channels = width
        for level in reversed(range(len(CHANNELS))):
            width, inputs = CHANNELS[level], []
            for _ in range(3):
                inputs.append(channels + skip_widths.pop())
                channels = width
            block = Level(inputs, width, level, time_width, CONTEXT)
            if level:
                block.upsamplers = nn.ModuleList([Resampler(width, up=True)])
            ups.append(block)
        self.down_blocks, self.up_blocks = nn.ModuleList(downs), nn.ModuleList(ups)
        self.mid_block = Mid(CHANNELS[-1], time_width, CONTEXT)
        self.conv_norm_out = nn.GroupNorm(GROUPS, CHANNELS[0])
        self.conv_out = nn.Conv2d(CHANNELS[0], 4, 3, padding=1)
        self.checkpointing = False

    def call(self, module: Any, *inputs: Any) -> Any:
        """Call a module; with checkpointing, as a checkpoint."""
        if self.checkpointing:
            return checkpoint(module, *inputs, use_reentrant=False)
        return module(*inputs)

    def run(self, level: Any, number: int, x: Any, time: Any, context: Any) -> Any:
        """Run residual block `number` of a level, and the transformer after it if there is one."""
        x = self.call(level.resnets[number], x, time)
        if hasattr(level, "attentions") and number < len(level.attentions):
            x = level.attentions[number](x, context, self.call)
        return x

    def forward(self, sample: Any, timestep: Any, context: Any, pooled: Any, sizes: Any) -> Any:
        """Return the prediction; `sizes` are diffusers' `time_ids`, six numbers for each image."""
        dtype = self.conv_in.weight.dtype
        time = self.time_embedding(sinusoids(timestep, CHANNELS[0]).to(dtype))
        embedded = sinusoids(sizes.flatten(), SIZE_WIDTH).reshape(len(sample), -1)
        time = time + self.add_embedding(torch.cat([pooled.float(), embedded], -1).to(dtype))
        x = self.conv_in(sample)
        skips = [x]
        for block in self.down_blocks:
            for number in range(2):
                x = self.run(block, number, x, time, context)
                skips.append(x)
            if hasattr(block, "downsamplers"):
                x = block.downsamplers[0](x)
                skips.append(x)
        x = self.run(self.mid_block, 0, x, time, context)
        x = self.run(self.mid_block, 1, x, time, context)
        for block in self.up_blocks:
            for number in range(3):
                x = torch.cat([x, skips.pop()], dim=1)
                x = self.run(block, number, x, time, context)
            if hasattr(block, "upsamplers"):
                x = block.upsamplers[0](x)
        return self.conv_out(functional.silu(self.conv_norm_out(x)))


def with_lora(model: UNet, rank: int, *, every_layer: bool) -> list[Any]:
    """Freeze the model and put LoRA on linear layers of its transformers; return the factors.

    With `every_layer`, these are all linear layers of the transformers, else those of attention.
    """
    model.requires_grad_(False)
    kind = Transformer if every_layer else Attention
    for module in [m for m in model.modules() if isinstance(m, kind)]:
        layers = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
        for name in layers:
            parent, _, last = name.rpartition(".")
            owner = module.get_submodule(parent)
            setattr(owner, last, LoRALinear(getattr(owner, last), rank))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
