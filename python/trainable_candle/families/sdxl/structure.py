"""The layers of an SDXL UNet in order, by configuration, and what each block keeps for backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from trainable_candle.train.headers import TensorFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_FEED_FORWARD: Final = 4
_STRETCHES: Final = 3
"""In how many a transformer is divided by full checkpointing; the library's own number."""


@dataclass(frozen=True)
class Layer:
    """A linear layer or a convolution."""

    name: str
    shape: tuple[int, ...]
    """Of its weight."""


@dataclass(frozen=True)
class Piece:
    """A part of a block: its layers, and what backward reads if a gradient passes through."""

    layers: tuple[Layer, ...] = ()
    inputs: tuple[int, ...] = ()
    """Of each layer, the values of its input for one picture; an adapter keeps them."""
    positions: tuple[int, ...] = ()
    """Of each layer, the positions that its adapter's middle has values for."""
    kept: int = 0
    """Values that are kept whether there is an adapter or not, for one picture."""
    cheap: bool = False
    """Whether selective checkpointing recomputes the inputs: they come from a norm or a gate."""


@dataclass(frozen=True)
class Block:
    """What is checkpointed as one."""

    name: str
    enters: int
    """Values of its inputs that only it needs, for one picture."""
    pieces: tuple[Piece, ...]
    goes_on: bool = False
    """Whether full checkpointing computes it again together with the block before."""


@dataclass(frozen=True)
class UNetWalk:
    """The blocks of a UNet in the order of its forward pass.

    Args:
        config: its `config.json`.
        height: of the latents.
        width: of the latents.
        tokens: of the text.
    """

    config: Mapping[str, Any]
    height: int
    width: int
    tokens: int

    def blocks(self) -> Iterator[Block]:
        """The blocks; those that nothing keeps have no pieces."""
        widths = self.config["block_out_channels"]
        levels = len(widths)
        count = self.config["layers_per_block"]
        time = 4 * widths[0]
        context = self.config["cross_attention_dim"]
        depths = _per_level(self.config.get("transformer_layers_per_block", 1), levels)
        added = self.config["projection_class_embeddings_input_dim"]
        yield Block(
            "embeddings",
            0,
            (
                _convolution("conv_in", self.config["in_channels"], widths[0], self._area(0)),
                *_linears(
                    "time_embedding", ("linear_1", widths[0], time), ("linear_2", time, time)
                ),
                *_linears("add_embedding", ("linear_1", added, time), ("linear_2", time, time)),
            ),
        )
        skips = [widths[0]]
        channels = widths[0]
        for level, width in enumerate(widths):
            name = f"down_blocks.{level}"
            attends = self.config["down_block_types"][level].startswith("CrossAttn")
            area = self._area(level)
            for number in range(count):
                yield _resnet(f"{name}.resnets.{number}", channels, width, time, area)
                channels = width
                if attends:
                    attention = f"{name}.attentions.{number}"
                    yield from self._transformer(attention, width, depths[level], context, area)
                skips.append(width)
            if level + 1 < levels:
                smaller = self._area(level + 1)
                piece = _convolution(f"{name}.downsamplers.0.conv", width, width, smaller, area)
                yield Block(f"{name}.downsamplers.0", 0, (piece,))
                skips.append(width)
        area = self._area(levels - 1)
        yield _resnet("mid_block.resnets.0", channels, channels, time, area)
        yield from self._transformer("mid_block.attentions.0", channels, depths[-1], context, area)
        yield _resnet("mid_block.resnets.1", channels, channels, time, area)
        for index in range(levels):
            level = levels - 1 - index
            name, width, area = f"up_blocks.{index}", widths[level], self._area(level)
            attends = self.config["up_block_types"][index].startswith("CrossAttn")
            for number in range(count + 1):
                joined = channels + skips.pop()
                yield _resnet(f"{name}.resnets.{number}", joined, width, time, area, joins=True)
                channels = width
                if attends:
                    attention = f"{name}.attentions.{number}"
                    yield from self._transformer(attention, width, depths[level], context, area)
            if level:
                larger = self._area(level - 1)
                piece = _convolution(f"{name}.upsamplers.0.conv", width, width, larger)
                yield Block(f"{name}.upsamplers.0", 0, (piece,))
        area = self._area(0)
        out = _convolution("conv_out", channels, self.config["out_channels"], area)
        yield Block("out", 0, (Piece(kept=area * channels), out))

    def _area(self, level: int) -> int:
        step = 1 << level
        return -(-self.height // step) * -(-self.width // step)

    def _transformer(
        self, name: str, width: int, depth: int, context: int, area: int
    ) -> Iterator[Block]:
        """A `Transformer2DModel`: its norm and projections, and its blocks."""
        kernel = () if self.config.get("use_linear_projection", False) else (1, 1)
        inside = area * width

        def projection(end: str) -> Piece:
            layer = Layer(f"{name}.{end}", (width, width, *kernel))
            return Piece((layer,), (inside,), (area,), cheap=end == "proj_in")

        yield Block(f"{name}.in", 0, (Piece(kept=inside), projection("proj_in")))
        for number in range(depth):
            block = f"{name}.transformer_blocks.{number}"
            pieces = tuple(self._token_block(block, width, context, area))
            yield Block(block, inside, pieces, goes_on=number % -(-depth // _STRETCHES) > 0)
        yield Block(f"{name}.out", 0, (projection("proj_out"),))

    def _token_block(self, name: str, width: int, context: int, area: int) -> Iterator[Piece]:
        inside = area * width
        yield Piece(kept=inside)  # the input of norm1
        yield from _attention(f"{name}.attn1", width, width, area, area)
        yield Piece(kept=inside)
        yield from _attention(f"{name}.attn2", width, context, area, self.tokens)
        yield Piece(kept=inside)
        middle = _FEED_FORWARD * width
        up = Layer(f"{name}.ff.net.0.proj", (2 * middle, width))
        yield Piece((up,), (inside,), (area,), kept=2 * area * middle, cheap=True)
        down = Layer(f"{name}.ff.net.2", (width, middle))
        yield Piece((down,), (area * middle,), (area,), cheap=True)


def _per_level(value: Any, levels: int) -> list[int]:
    return list(value) if isinstance(value, list) else [value] * levels


def _linears(name: str, *layers: tuple[str, int, int]) -> list[Piece]:
    return [
        Piece((Layer(f"{name}.{end}", (out, inner)),), (inner,), (1,)) for end, inner, out in layers
    ]


def _convolution(
    name: str, inner: int, out: int, area: int, input_area: int | None = None
) -> Piece:
    inputs = inner * (area if input_area is None else input_area)
    layer = Layer(name, (out, inner, 3, 3))
    return Piece((layer,), (inputs,), (area,), cheap=name.endswith(("conv1", "conv2")))


def _resnet(name: str, inner: int, out: int, time: int, area: int, *, joins: bool = False) -> Block:
    """A `ResnetBlock2D`; where it joins two images, the joined one is made inside."""
    pieces = [
        Piece(kept=area * inner),
        _convolution(f"{name}.conv1", inner, out, area),
        *_linears(name, ("time_emb_proj", time, out)),
        Piece(kept=area * out),
        _convolution(f"{name}.conv2", out, out, area),
    ]
    if inner != out:
        shortcut = Layer(f"{name}.conv_shortcut", (out, inner, 1, 1))
        pieces.append(Piece((shortcut,), (area * inner,), (area,)))
    return Block(name, 0 if joins else area * inner, tuple(pieces))


def _attention(
    name: str, width: int, context: int, area: int, context_area: int
) -> Iterator[Piece]:
    """The four projections; backward of attention reads q, k, v and the result."""
    inside, outside = area * width, context_area * width
    query = Layer(f"{name}.to_q", (width, width))
    yield Piece((query,), (inside,), (area,), cheap=True)
    for end in ("to_k", "to_v"):
        # Self-attention shares the input of the three; the text is there anyway.
        layer = Layer(f"{name}.{end}", (width, context))
        yield Piece((layer,), (0,), (context_area,))
    yield Piece(kept=2 * inside + 2 * outside)
    yield Piece((Layer(f"{name}.to_out.0", (width, width)),), (inside,), (area,))


def layer_facts(config: Mapping[str, Any]) -> dict[str, TensorFacts]:
    """The weights of the linear layers and convolutions by name, as a checkpoint's header has them.

    Args:
        config: of the UNet.
    """
    return {
        f"{layer.name}.weight": TensorFacts("F32", layer.shape)
        for block in UNetWalk(config, 1, 1, 1).blocks()
        for piece in block.pieces
        for layer in piece.layers
    }


def saved_values(
    blocks: Iterator[Block], adapted: Callable[[str], bool], rank: int, checkpointing: str
) -> int:
    """About how many values the tape holds at its fullest, for one picture.

    Nothing is kept before the first adapter, as no gradient goes there.

    Args:
        blocks: of the model, in order.
        adapted: whether a layer has an adapter.
        rank: of the adapters.
        checkpointing: `none`, `full` or `selective`.
    """
    held = largest = together = 0
    reached = is_counted = False
    for block in blocks:
        entered, kept, again = reached, 0, 0
        for piece in block.pieces:
            for layer, inputs, positions in zip(
                piece.layers, piece.inputs, piece.positions, strict=True
            ):
                if adapted(layer.name):
                    reached = True
                    kept += positions * rank
                    if checkpointing == "selective" and piece.cheap:
                        again += inputs
                    else:
                        kept += inputs
            if reached:
                kept += piece.kept
        if checkpointing == "full" and block.enters:
            together = kept + (together if block.goes_on else 0)
            is_counted = is_counted and block.goes_on
            if (entered or kept) and not is_counted:
                held += block.enters
                is_counted = True
            largest = max(largest, together)
        else:
            held += kept
            largest = max(largest, again)
    return held + largest
