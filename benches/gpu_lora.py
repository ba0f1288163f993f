"""A frozen linear layer with LoRA on a GPU: forward and backward, and the factors' gradients alone.

python benches/gpu_lora.py [--only bf16]

The printed floor is the least time that the arithmetic and the memory traffic need on this GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gpu_timing
from gpu_timing import DTYPES, Machine

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Case:
    """A layer with `width` input and output features, on an input (rows, width)."""

    dtype: str
    rows: int
    width: int
    rank: int

    @property
    def title(self) -> str:
        return f"{self.dtype} {self.rows} x {self.width}, rank {self.rank}"

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "f32" else 2

    @property
    def layer(self) -> tuple[float, float]:
        """The floating-point operations of a forward and a backward pass, and the bytes they move.

        The forward pass moves x, W and y; the backward pass moves g = dL/dy, W, dx and x. The
        factors are small and not counted.
        """
        m, h, r = self.rows, self.width, self.rank
        # Each pass has one product with W, which is frozen. The forward pass has two products with
        # the factors, the backward pass four.
        operations = 2 * (2 * m * h * h) + 6 * (2 * m * h * r)
        return operations, self.itemsize * (5 * m * h + 2 * h * h)

    @property
    def backward(self) -> tuple[float, float]:
        """Operations and bytes of the gradients of both factors; g = dL/dy and x are read once."""
        m, h, r = self.rows, self.width, self.rank
        return 4 * (2 * m * h * r), self.itemsize * 2 * m * h


CASES = [
    Case("f32", 1024, 768, 16),
    Case("f32", 1024, 2048, 16),
    Case("bf16", 1024, 768, 16),
    Case("bf16", 1024, 2048, 16),
    Case("bf16", 4096, 1280, 32),
    Case("bf16", 4096, 3072, 16),
    Case("bf16", 16384, 3072, 32),
]


def ours(case: Case, device: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The forward and backward pass of the layer, and the gradients of the factors alone."""

    def random(*shape: int) -> tc.Tensor:
        return tc.randn(shape, device=device).to(case.dtype)

    rows, width, rank = case.rows, case.width, case.rank
    # alpha is rank / 2, so the scale of the LoRA is 0.5, here and in the other functions.
    layer = tc.nn.LoRALinear(random(width, width) * 0.02, rank, rank / 2)
    # In a new layer, `lora_up` is zero.
    for var in layer.get_vars():
        var.set(tc.randn(var.shape, device=device) * 0.02)
    x, grad = tc.Var(random(rows, width)), random(rows, width)
    down, up = (var.detach().to(case.dtype) for var in layer.get_vars())
    value = x.detach()

    def step() -> tc.Tensor:
        y = layer(x)
        y.backward(grad)
        return y

    def backward() -> tuple[tc.Tensor, tc.Tensor]:
        return tc.lora_backward(grad, value, down, up, 0.5)

    return step, backward


def theirs(torch: Any, case: Case) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The same two functions as `ours`, in torch."""
    linear = torch.nn.functional.linear
    dtype, rows, width, rank = getattr(torch, DTYPES[case.dtype]), case.rows, case.width, case.rank

    def random(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", dtype=dtype)

    weight, grad = random(width, width) * 0.02, random(rows, width)
    x = random(rows, width).requires_grad_()
    a = (random(rank, width) * 0.02).requires_grad_()
    b = (random(width, rank) * 0.02).requires_grad_()
    down, up, value = a.detach(), b.detach(), x.detach()

    def step() -> None:
        (linear(x, weight) + linear(linear(x, a), b) * 0.5).backward(grad)

    def backward() -> Any:
        down_output_grad = grad @ up
        return down_output_grad.t() @ value * 0.5, grad.t() @ (value @ down.t()) * 0.5

    return step, backward


def run(case: Case, machine: Machine) -> None:
    device, seconds = machine.device, machine.seconds
    gpu_timing.fresh(device)
    names, works = ("layer", "backward alone"), (case.layer, case.backward)
    our_sides = ours(case, device)
    their_sides = theirs(machine.torch, case) if machine.torch else (None, None)
    for name, call, other, work in zip(names, our_sides, their_sides, works, strict=True):
        plain_seconds = gpu_timing.timed(call, device, seconds)
        graph_seconds = gpu_timing.timed(gpu_timing.captured(call, device), device, seconds)
        torch_seconds = (
            None if other is None else gpu_timing.torch_timed(machine.torch, other, seconds)
        )
        times = gpu_timing.milliseconds(
            ours=graph_seconds,
            ours_without_graph=plain_seconds,
            torch_eager=torch_seconds,
            floor=machine.floor(case.dtype, *work),
        )
        ratio = f", ours/torch {graph_seconds / torch_seconds:.2f}" if torch_seconds else ""
        print(f"{case.title}, {name}: {times}{ratio}", flush=True)


def main() -> None:
    options = gpu_timing.parser(__doc__).parse_args()
    machine = gpu_timing.start(options)
    for case in CASES:
        if options.only in case.title:
            run(case, machine)
            if options.profile:
                gpu_timing.profiled(ours(case, machine.device)[0], machine.device)


if __name__ == "__main__":
    main()
