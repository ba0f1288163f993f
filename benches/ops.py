"""Time single operations of image models, forward and backward in f32, and the same in torch.

python benches/ops.py [--only SUBSTRING]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import timing

import trainable_candle as tc
from trainable_candle.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Array = NDArray[np.float32]
    Operation = Callable[..., Any]

RNG = np.random.default_rng(0)


@dataclass
class Case:
    """An operation and the shapes of its inputs."""

    title: str
    shapes: list[tuple[int, ...]]
    ours: Operation
    theirs: Operation
    """The same in torch: takes the module, then the inputs."""
    frozen: int = 0
    """How many inputs get no gradients: the last ones."""
    images: bool = False
    """Whether inputs with four axes are images, or weights of convolutions, with the channels last.

    `theirs` gets them with the channels as the second axis: once contiguous, and once in torch's
    memory format `channels_last`.
    """


def random_values(shape: tuple[int, ...]) -> Array:
    return RNG.standard_normal(shape, dtype=np.float32)


def our_side(case: Case, values: list[Array]) -> Callable[[], object]:
    """Return a forward and backward pass in this library."""
    leaves = [tc.Var(v) for v in values[: len(values) - case.frozen]]
    inputs = [*leaves, *(tc.tensor(v) for v in values[len(leaves) :])]
    grad = tc.tensor(random_values(tuple(case.ours(*inputs).shape)))

    def step() -> None:
        for leaf in leaves:
            leaf.zero_grad()
        case.ours(*inputs).backward(grad)

    return step


def torch_side(
    torch: Any, case: Case, values: list[Array], channels_last: bool
) -> Callable[[], object]:
    """Return a forward and backward pass in torch."""

    def tensor(value: Array) -> Any:
        x = torch.from_numpy(value)
        if case.images and value.ndim == 4:
            x = x.permute(0, 3, 1, 2)
            x = x.contiguous(memory_format=torch.channels_last) if channels_last else x.contiguous()
        return x

    count = len(values) - case.frozen
    leaves = [tensor(v).requires_grad_() for v in values[:count]]
    inputs = [*leaves, *(tensor(v) for v in values[count:])]
    y = case.theirs(torch, *inputs)
    grad = torch.randn_like(y)

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        case.theirs(torch, *inputs).backward(grad)

    return step


def convolution(
    title: str,
    image: tuple[int, int, int],
    out: int,
    kernel: int,
    stride: int = 1,
    groups: int = 1,
    *,
    frozen: bool = False,
) -> Case:
    """Return the case of a convolution.

    Args:
        title: what the title of the case says about the convolution.
        image: the height, width and channels of the one image.
        out: the number of output channels.
        kernel: the height and width of the kernel; the padding is half of it, rounded down.
        stride: the stride.
        groups: the number of groups of channels.
        frozen: whether the weight gets no gradient.
    """
    options = {"stride": stride, "padding": kernel // 2, "groups": groups}
    channels = image[2]
    return Case(
        f"conv2d {title}{', frozen weight' if frozen else ''}",
        [(1, *image), (out, kernel, kernel, channels // groups)],
        partial(functional.conv2d, **options, channels_last=True),
        lambda torch, x, w: torch.nn.functional.conv2d(x, w, **options),
        frozen=int(frozen),
        images=True,
    )


def cases() -> list[Case]:
    # Shapes of queries, keys and values: (batch, heads, tokens, width of a head).
    heads = (4, 8, 512, 64)
    heads_of_prompt = (4, 8, 77, 64)
    rows, width = 5120, 1024
    return [
        # Title, image (height, width, channels), output channels, kernel.
        convolution("64->64 3x3 at 64x64", (64, 64, 64), 64, 3),
        convolution("64->64 3x3 at 64x64", (64, 64, 64), 64, 3, frozen=True),
        convolution("320->320 3x3 at 32x32", (32, 32, 320), 320, 3),
        convolution("320->320 3x3 at 32x32", (32, 32, 320), 320, 3, frozen=True),
        convolution("320->320 1x1 at 32x32", (32, 32, 320), 320, 1),
        convolution("64->64 3x3 stride 2 at 64x64", (64, 64, 64), 64, 3, stride=2),
        convolution("4->320 3x3 at 64x64", (64, 64, 4), 320, 3),
        convolution("320->4 3x3 at 64x64", (64, 64, 320), 4, 3),
        convolution("256 3x3 depthwise at 32x32", (32, 32, 256), 256, 3, groups=256),
        convolution("256->256 3x3 in 8 groups at 32x32", (32, 32, 256), 256, 3, groups=8),
        Case(
            "attention 4x8x512x64",
            [heads] * 3,
            functional.scaled_dot_product_attention,
            lambda torch, *x: torch.nn.functional.scaled_dot_product_attention(*x),
        ),
        Case(
            "attention 4x8x512x64, causal",
            [heads] * 3,
            partial(functional.scaled_dot_product_attention, is_causal=True),
            lambda torch, *x: torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True),
        ),
        Case(
            "cross-attention 4x8x512x64 over 77 keys",
            [heads, heads_of_prompt, heads_of_prompt],
            functional.scaled_dot_product_attention,
            lambda torch, *x: torch.nn.functional.scaled_dot_product_attention(*x),
        ),
        Case(
            "GELU, 5 M elements",
            [(rows, width)],
            functional.gelu,
            lambda torch, x: torch.nn.functional.gelu(x),
        ),
        Case(
            "layer norm, 5 M elements in rows of 1024",
            [(rows, width), (width,), (width,)],
            lambda x, w, b: functional.layer_norm(x, width, w, b),
            lambda torch, x, w, b: torch.nn.functional.layer_norm(x, (width,), w, b),
        ),
        Case(
            "layer norm, 5 M elements in rows of 1024, frozen scale and shift",
            [(rows, width), (width,), (width,)],
            lambda x, w, b: functional.layer_norm(x, width, w, b),
            lambda torch, x, w, b: torch.nn.functional.layer_norm(x, (width,), w, b),
            frozen=2,
        ),
        Case(
            "group norm + SiLU, 1x320x64x64",
            [(1, 64, 64, 320), (320,), (320,)],
            # 32 groups.
            lambda x, w, b: functional.group_norm_silu(x, 32, w, b, channels_last=True),
            lambda torch, x, w, b: torch.nn.functional.silu(
                torch.nn.functional.group_norm(x, 32, w, b)
            ),
            images=True,
        ),
        Case(
            "GEGLU, 1024 rows of 2 x 2560",
            [(1024, 5120)],
            functional.geglu,
            torch_geglu,
        ),
        Case(
            "nearest up-sampling of 1x320x32x32, doubled",
            [(1, 32, 32, 320)],
            partial(functional.upsample_nearest2d, scale_factor=2, channels_last=True),
            lambda torch, x: torch.nn.functional.interpolate(x, scale_factor=2, mode="nearest"),
            images=True,
        ),
    ]


def torch_geglu(torch: Any, x: Any) -> Any:
    h, gate = x.chunk(2, dim=-1)
    return h * torch.nn.functional.gelu(gate)


def main() -> None:
    parser = timing.parser(__doc__)
    parser.add_argument("--only", default="", help="run the cases whose title contains this")
    options = timing.start(parser)
    torch = timing.find_torch()
    for case in cases():
        if options.only not in case.title:
            continue
        values = [random_values(shape) for shape in case.shapes]
        sides = {"ours": our_side(case, values)}
        if torch:
            sides["torch"] = torch_side(torch, case, values, channels_last=False)
            if case.images:
                sides["torch channels_last"] = torch_side(torch, case, values, channels_last=True)
        timing.report(case.title, timing.race(sides, options.rounds))


if __name__ == "__main__":
    main()
