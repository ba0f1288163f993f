"""Single operations on a GPU in bf16, forward and backward.

The operations have the sizes of SDXL and FLUX at 1024 x 1024 px, and of language models over
packed rows.

python benches/gpu_ops.py [--only attention] [--profile]

Norms and convolutions are frozen, as under LoRA: only their input gets a gradient. The ratio to
torch compares times without a graph, because launching a graph takes longer than many operations.
The printed floor is the least time that the arithmetic and the memory traffic need on this GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import gpu_timing
from gpu_attention import FLUX, SDXL, Size
from gpu_timing import DTYPES, Machine

import trainable_candle as tc
from trainable_candle.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    Operation = Callable[..., Any]

DTYPE = "bf16"
BYTES = 2
"""The bytes of an element."""


@dataclass(frozen=True)
class Case:
    """An operation whose first `trained` inputs get gradients."""

    title: str
    shapes: list[tuple[int, ...]]
    """The shapes of the inputs, for images with the channels last."""
    ours: Operation
    """This library's operation, a function of the inputs."""
    theirs: Operation
    """Torch's operation, a function of the torch module and the inputs."""
    flops: float
    """Floating-point operations of forward and backward."""
    traffic: float
    """The bytes that must be read and written, as a multiple of the bytes of the first input."""
    trained: int = 1
    images: bool = False
    """Whether inputs of four dimensions are images or kernels with the channels last.

    torch gets these inputs as (B, C, H, W), in its memory format `channels_last`.
    """

    @property
    def moved(self) -> float:
        """The bytes that must be read and written."""
        return BYTES * self.traffic * math.prod(self.shapes[0])


def convolution(image: tuple[int, int, int], out: int, kernel: int, stride: int = 1) -> Case:
    """A convolution of one image (height, width, channels)."""
    height, width, channels = image
    options = {"stride": stride, "padding": kernel // 2}
    # Of the forward pass; the backward pass, which gives only the input a gradient, needs as many.
    flops = 2 * height * width // stride**2 * channels * out * kernel**2
    what = f"{channels}->{out} {kernel}x{kernel}{' stride 2' if stride == 2 else ''}"
    return Case(
        f"conv2d {what} at {height}x{width}",
        [(1, *image), (out, kernel, kernel, channels)],
        partial(functional.conv2d, **options, channels_last=True),
        lambda torch, x, w: torch.nn.functional.conv2d(x, w, **options),
        flops=2 * flops,
        # The image, the result, and the gradients of both.
        traffic=2 * (1 + out / channels / stride**2),
        images=True,
    )


def attention(size: Size, keys: int) -> Case:
    """Attention of the tokens of `size` over `keys` keys, in heads of the same number and width."""
    heads, tokens, dim = size.heads, size.tokens, size.width
    flops = 4 * heads * tokens * keys * dim  # of the forward pass; backward needs 2.5 times these
    return Case(
        f"attention {heads} x {tokens} over {keys} x {dim}",
        [size.shape, (1, heads, keys, dim), (1, heads, keys, dim)],
        functional.scaled_dot_product_attention,
        lambda torch, *x: torch.nn.functional.scaled_dot_product_attention(*x),
        flops=3.5 * flops,
        # q, k, v, the result, and the gradients of all four.
        traffic=4 * (1 + keys / tokens),
        trained=3,
    )


def packed_attention(heads: int, key_heads: int, segments: int, length: int = 2048) -> Case:
    """Causal attention within the segments of a row. torch gets one call per segment.

    A row is `segments` texts, each of `length` tokens. `heads` heads of queries share `key_heads`
    heads of keys.
    """
    dim = 128
    tokens = segments * length
    bounds: list[tc.Tensor] = []  # one tensor, which the first call makes on the device of q

    def ours(q: Any, k: Any, v: Any) -> Any:
        if not bounds:
            ends = [length * i for i in range(segments + 1)]
            bounds.append(tc.tensor(ends, device=str(q.device)))
        return functional.varlen_attention(q, k, v, bounds[0])

    def theirs(torch: Any, *row: Any) -> Any:
        q, k, v = (x.view(segments, length, -1, dim).transpose(1, 2) for x in row)
        attend = torch.nn.functional.scaled_dot_product_attention
        parts = [
            attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], is_causal=True, enable_gqa=True)
            for i in range(segments)
        ]
        return torch.cat(parts).transpose(1, 2).reshape(tokens, heads, dim)

    return Case(
        f"packed attention of {heads}/{key_heads} heads, {segments} x {length} x {dim}",
        [(tokens, heads, dim), (tokens, key_heads, dim), (tokens, key_heads, dim)],
        ours,
        theirs,
        # As in `attention`, but the causal mask hides half of the scores.
        flops=3.5 * 2 * heads * segments * length**2 * dim,
        traffic=4 * (1 + key_heads / heads),
        trained=3,
    )


def torch_geglu(torch: Any, x: Any) -> Any:
    hidden, gate = x.chunk(2, dim=-1)
    return hidden * torch.nn.functional.gelu(gate)


def norms() -> list[Case]:
    """Norms, and GEGLU, which reads its input in both passes as norms do, in the sizes of SDXL."""
    # Traffic: the input in both passes, the result, and the gradients of result and input. A result
    # of GEGLU has half the size of its input.
    result = []
    for tokens, width in ((4096, 640), (1024, 1280)):
        result.append(
            Case(
                f"layer norm {tokens} x {width}",
                [(1, tokens, width), (width,), (width,)],
                partial(layer_norm, width),
                partial(torch_layer_norm, width),
                flops=0,
                traffic=5,
            )
        )
        result.append(
            Case(
                f"GEGLU {tokens} x 2 x {4 * width}",
                [(1, tokens, 8 * width)],
                functional.geglu,
                torch_geglu,
                flops=0,
                traffic=4,
            )
        )
    for side, width in ((128, 320), (64, 640), (32, 1280), (32, 2560)):
        result.append(
            Case(
                f"group norm + SiLU {width} at {side}x{side}",
                [(1, side, side, width), (width,), (width,)],
                partial(group_norm_silu, 32),
                lambda torch, x, w, b: torch.nn.functional.silu(
                    torch.nn.functional.group_norm(x, 32, w, b)
                ),
                flops=0,
                traffic=5,
                images=True,
            )
        )
    return result


def layer_norm(width: int, x: Any, w: Any, b: Any) -> Any:
    return functional.layer_norm(x, width, w, b)


def torch_layer_norm(width: int, torch: Any, x: Any, w: Any, b: Any) -> Any:
    return torch.nn.functional.layer_norm(x, (width,), w, b)


def group_norm_silu(groups: int, x: Any, w: Any, b: Any) -> Any:
    return functional.group_norm_silu(x, groups, w, b, channels_last=True)


def cases() -> list[Case]:
    return [
        # SDXL: over the image's own tokens, then over the 77 tokens of the text.
        *(attention(size, size.tokens) for size in SDXL),
        *(attention(size, keys=77) for size in SDXL),
        attention(FLUX, FLUX.tokens),
        # Language models.
        packed_attention(12, 2, 4),
        packed_attention(12, 2, 32, 256),
        packed_attention(32, 8, 2),
        # SDXL.
        convolution((128, 128, 4), 320, 3),
        convolution((128, 128, 320), 320, 3),
        convolution((128, 128, 640), 320, 3),
        convolution((128, 128, 320), 320, 3, 2),
        convolution((64, 64, 640), 640, 3),
        convolution((64, 64, 1280), 640, 3),
        convolution((32, 32, 1280), 1280, 3),
        convolution((32, 32, 2560), 1280, 3),
        convolution((32, 32, 2560), 1280, 1),
        convolution((128, 128, 320), 4, 3),
        *norms(),
    ]


def our_side(case: Case, device: str) -> Callable[[], Any]:
    def random(*shape: int) -> tc.Tensor:
        return (tc.randn(shape, device=device) * 0.5).to(DTYPE)

    leaves = [tc.Var(random(*shape)) for shape in case.shapes[: case.trained]]
    inputs = [*leaves, *(random(*shape) for shape in case.shapes[case.trained :])]
    grad = random(*case.ours(*inputs).shape)

    def step() -> Any:
        for leaf in leaves:
            leaf.zero_grad()
        y = case.ours(*inputs)
        y.backward(grad)
        return y

    return step


def torch_side(torch: Any, case: Case) -> Callable[[], Any]:
    dtype = getattr(torch, DTYPES[DTYPE])

    def random(shape: tuple[int, ...]) -> Any:
        x = torch.randn(shape, device="cuda", dtype=dtype) * 0.5
        if case.images and len(shape) == 4:
            x = x.permute(0, 3, 1, 2)
        return x.detach()

    values = [random(shape) for shape in case.shapes]
    for leaf in values[: case.trained]:
        leaf.requires_grad_()
    grad = torch.randn_like(case.theirs(torch, *values))

    def step() -> None:
        for leaf in values[: case.trained]:
            leaf.grad = None
        case.theirs(torch, *values).backward(grad)

    return step


def main() -> None:
    options = gpu_timing.parser(__doc__).parse_args()
    machine = gpu_timing.start(options)
    for case in cases():
        if options.only in case.title:
            run(case, machine, profile=options.profile)


def run(case: Case, machine: Machine, *, profile: bool) -> None:
    device, seconds = machine.device, machine.seconds
    step = our_side(case, device)
    plain = gpu_timing.timed(step, device, seconds)
    graph = gpu_timing.timed(gpu_timing.captured(step, device), device, seconds)
    torch = None
    if machine.torch is not None:
        torch = gpu_timing.torch_timed(machine.torch, torch_side(machine.torch, case), seconds)
    times = gpu_timing.milliseconds(
        ours=graph,
        ours_without_graph=plain,
        torch_eager=torch,
        floor=machine.floor(DTYPE, case.flops, case.moved),
    )
    ratio = f", ours/torch {plain / torch:.2f}" if torch else ""
    print(f"{case.title}: {times}{ratio}", flush=True)
    if profile:
        gpu_timing.profiled(step, device)


if __name__ == "__main__":
    main()
