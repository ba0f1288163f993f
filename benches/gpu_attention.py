"""Attention at the sizes of the image families, beside each of torch's backends.

python benches/gpu_attention.py [--only flux] [--seconds 0.3] [--backends FLASH_ATTENTION]
TRAINABLE_CANDLE_GENERAL_KERNELS=1 python benches/gpu_attention.py

bf16, batch 1, no mask. Each line has the milliseconds of a forward pass, of a backward pass and of
the two together, and the TFLOP/s of each: ours, then those of torch's backends. The time of the
backward pass is the time of the two less that of a forward pass. The backward pass counts as 2.5
times the operations of the forward pass: five matrix products instead of two. The last number of a
backend is our time of the two divided by the backend's. All times are without a CUDA graph, and
include what the host needs to start the kernels.

With the environment variable, a GPU of compute capability 9.0 runs the kernels that other GPUs run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gpu_timing
from gpu_timing import Machine

import trainable_candle as tc
from trainable_candle.nn.functional import scaled_dot_product_attention

if TYPE_CHECKING:
    from collections.abc import Callable

BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")


@dataclass(frozen=True)
class Size:
    """The size of a self-attention: of how many heads, tokens, and features of a head."""

    name: str
    heads: int
    tokens: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (1, self.heads, self.tokens, self.width)

    @property
    def forward_flops(self) -> float:
        # Two matrix products, with a multiplication and an addition per term.
        return 4.0 * self.heads * self.tokens**2 * self.width


IMAGE = 64 * 64
"""The tokens of an image of 1024 x 1024 px: patches of 2 x 2 latents."""
# Names, heads, tokens, features of a head. SDXL's UNet attends to its 128 x 128 latents halved once
# to 64 x 64, and halved twice to 32 x 32. Tokens beside those of the image are text.
SDXL = (
    Size("sdxl, 640 channels", 10, 64 * 64, 64),
    Size("sdxl, 1280 channels", 20, 32 * 32, 64),
)
FLUX = Size("flux, klein-4b", 24, IMAGE + 512, 128)
SIZES = (
    *SDXL,
    Size("sd3.5-medium, image and text", 24, IMAGE + 333, 64),
    Size("sd3.5-medium, image", 24, IMAGE, 64),
    Size("sd3.5-large", 38, IMAGE + 333, 64),
    FLUX,
    Size("klein-9b", 32, IMAGE + 512, 128),
    Size("chroma, qwen-image", 24, IMAGE + 128, 128),
    Size("z-image", 30, IMAGE + 128, 128),
)


@dataclass(frozen=True)
class Times:
    """Seconds of a forward pass, and of a pass forward and backward."""

    forward: float
    both: float

    def text(self, size: Size) -> str:
        backward, flops = self.both - self.forward, size.forward_flops
        # Seconds, and operations in units of those of the forward pass.
        parts = [(self.forward, 1.0), (backward, 2.5), (self.both, 3.5)]
        milliseconds = " + ".join(f"{seconds * 1e3:.3f}" for seconds, _ in parts[:2])
        rates = ", ".join(f"{factor * flops / seconds / 1e12:.0f}" for seconds, factor in parts)
        return f"{milliseconds} = {self.both * 1e3:.3f} ms ({rates} TFLOP/s)"


def ours(size: Size, machine: Machine) -> Times:
    q, k, v = (tc.Var(tc.randn(size.shape, device=machine.device).to("bf16")) for _ in range(3))
    grad = tc.randn(size.shape, device=machine.device).to("bf16")

    def forward() -> tc.Tensor:
        with tc.no_grad():
            return scaled_dot_product_attention(q, k, v)

    def both() -> None:
        scaled_dot_product_attention(q, k, v).backward(grad)
        for leaf in (q, k, v):
            leaf.grad = None

    calls: tuple[Callable[[], object], ...] = (forward, both)
    return Times(*(gpu_timing.timed(call, machine.device, machine.seconds) for call in calls))


def theirs(torch: Any, size: Size, backend: str, seconds: float) -> Times | str:
    """Return torch's times with a backend, or the reason why it cannot run."""
    attention, options = torch.nn.attention, {"device": "cuda", "dtype": torch.bfloat16}
    q, k, v = (torch.randn(size.shape, requires_grad=True, **options) for _ in range(3))
    grad = torch.randn(size.shape, **options)

    def forward() -> None:
        with torch.no_grad():
            torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def both() -> None:
        result = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        torch.autograd.grad(result, (q, k, v), grad)

    with attention.sdpa_kernel(getattr(attention.SDPBackend, backend)):
        try:
            return Times(
                *(gpu_timing.torch_timed(torch, call, seconds) for call in (forward, both))
            )
        except RuntimeError as error:
            return str(error).partition("\n")[0]


def run(size: Size, machine: Machine, backends: list[str]) -> None:
    own = ours(size, machine)
    shape = f"{size.heads} x {size.tokens} x {size.width}"
    print(f"{size.name}, {shape}: ours {own.text(size)}", flush=True)
    if machine.torch is None:
        return
    for backend in backends:
        found = theirs(machine.torch, size, backend, machine.seconds)
        if isinstance(found, str):
            print(f"  {backend}: {found}", flush=True)
        else:
            ratio = own.both / found.both
            print(f"  {backend}: {found.text(size)}; ours/torch {ratio:.2f}", flush=True)


def main() -> None:
    parser = gpu_timing.parser(__doc__.partition("\n")[0])
    parser.add_argument(
        "--backends", nargs="+", choices=BACKENDS, default=BACKENDS, help="those of torch"
    )
    options = parser.parse_args()
    machine = gpu_timing.start(options)
    for size in SIZES:
        if options.only in size.name:
            run(size, machine, options.backends)
            gpu_timing.fresh(machine.device)


if __name__ == "__main__":
    main()
