"""Optimizers on a GPU: AdamW8bit over 268 M parameters; every optimizer, and clipping, over 23 M.

python benches/gpu_optim.py [--only host]

`host` is AdamW8bit and AdamW over 268 M parameters with their states in GPU memory and in host
memory, beside bitsandbytes' paged AdamW8bit if it is installed.

The 23 M parameters are the factors of a LoRA of rank 16 on SDXL's attention, each factor a tensor.
Where torch lacks an optimizer, ours is compared with prodigyopt, schedulefree or came-pytorch, if
these are installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import gpu_timing
from gpu_timing import Machine

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LARGE = 1 << 28  # 268 M parameters
# The number of transformer blocks in SDXL's UNet, by their width.
BLOCKS = {640: 10, 1280: 60}
CONTEXT = 2048  # the number of features of a text token
RANK = 16


def adapter_shapes() -> list[tuple[int, int]]:
    """The factors of a LoRA on SDXL's attention."""
    shapes = []
    for width, count in BLOCKS.items():
        # Queries, keys, values and outputs of self-attention, then of attention to the text, in
        # which keys and values read the text.
        for inputs in [width] * 6 + [CONTEXT] * 2:
            shapes += [(RANK, inputs), (width, RANK)] * count  # the factors in each block
    return shapes


def our_vars(shapes: Sequence[tuple[int, ...]], device: str) -> list[tc.Var]:
    variables = [tc.Var(tc.randn(shape, device=device) * 0.02) for shape in shapes]
    for var in variables:
        var.grad = tc.randn(var.shape, device=device) * 1e-3
    return variables


def torch_parameters(torch: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    parameters = [torch.nn.Parameter(torch.randn(shape, device="cuda") * 0.02) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return parameters


def eight_bit(machine: Machine) -> None:
    """AdamW8bit: it reads the gradient, and updates the parameter and two one-byte states."""
    device = machine.device
    optimizer = tc.optim.AdamW8bit(our_vars([(LARGE,)], device), lr=1e-4, weight_decay=0.01)
    sides: dict[str, float] = {"ours": gpu_timing.timed(optimizer.step, device, machine.seconds)}
    del optimizer
    gpu_timing.fresh(device)
    if machine.torch is not None:
        torch = machine.torch
        parameters = torch_parameters(torch, [(LARGE,)])
        fused = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        sides["torch_fused_f32"] = gpu_timing.torch_timed(torch, fused.step, machine.seconds)
        del fused
        try:
            import bitsandbytes  # noqa: PLC0415 - optional
        except ImportError:
            print("bitsandbytes is not installed")
        else:
            eight_bit_adamw = bitsandbytes.optim.AdamW8bit(parameters, lr=1e-4)
            step = eight_bit_adamw.step
            sides["bitsandbytes"] = gpu_timing.torch_timed(torch, step, machine.seconds)
            del eight_bit_adamw, step
        del parameters
        gpu_timing.fresh(device)
    # Bytes of a parameter's gradient (read), of its value and of its states (read and written). The
    # time of the arithmetic is negligible.
    moved = LARGE * (4 + 2 * 4 + 2 * 2)
    sides["floor"] = machine.floor("f32", flops=0, moved=moved)
    print(f"AdamW8bit, 268 M parameters: {gpu_timing.milliseconds(**sides)}", flush=True)


def on_host(machine: Machine) -> None:
    """States in pinned host memory: an optimizer step reads and writes them over the bus."""
    device = machine.device
    for kind in ("adamw8bit", "adamw"):
        sides: dict[str, float] = {}
        for states in ("device", "host"):
            optimizer = tc.optim.KINDS[kind](our_vars([(LARGE,)], device), lr=1e-4, states=states)
            sides[f"states_on_{states}"] = gpu_timing.timed(optimizer.step, device, machine.seconds)
            state_bytes = sum(tensor.nbytes for tensor in optimizer.state_dict().values())
            del optimizer
            gpu_timing.fresh(device)
        # Each state is read and written.
        rate = 2 * state_bytes / (sides["states_on_host"] - sides["states_on_device"]) / 1e9
        print(
            f"{kind}, 268 M parameters, {state_bytes / gpu_timing.GIB:.2f} GiB of states: "
            f"{gpu_timing.milliseconds(**sides)}; {rate:.0f} GB/s over the bus, both ways together",
            flush=True,
        )
    if machine.torch is not None:
        try:
            import bitsandbytes  # noqa: PLC0415 - optional
        except ImportError:
            print("bitsandbytes is not installed")
            return
        parameters = torch_parameters(machine.torch, [(LARGE,)])
        paged = bitsandbytes.optim.PagedAdamW8bit(parameters, lr=1e-4)
        seconds = gpu_timing.torch_timed(machine.torch, paged.step, machine.seconds)
        print(f"  bitsandbytes' PagedAdamW8bit: {gpu_timing.milliseconds(torch=seconds)}")


def clipped(machine: Machine) -> None:
    """Clipping by the norm of all gradients, then AdamW.

    Gradients are read twice; parameters and both moments are read and written once.
    """
    device, shapes = machine.device, adapter_shapes()
    parameters = our_vars(shapes, device)
    optimizer = tc.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01)

    def step() -> Any:
        norm = tc.optim.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return norm

    plain = gpu_timing.timed(step, device, machine.seconds)
    graph = gpu_timing.timed(gpu_timing.captured(step, device), device, machine.seconds)
    sides: dict[str, float] = {"ours": graph, "ours_without_graph": plain}
    if machine.torch is not None:
        sides["torch_fused"] = torch_clipped(machine, shapes)
    count = sum(rows * columns for rows, columns in shapes)
    # Bytes of a parameter's gradient (read twice), of its value and of both moments (read and
    # written).
    sides["floor"] = machine.floor("f32", flops=0, moved=count * (2 * 4 + 3 * 2 * 4))
    what = f"AdamW and clipping, {count / 1e6:.0f} M parameters in {len(shapes)} tensors"
    print(f"{what}: {gpu_timing.milliseconds(**sides)}", flush=True)


def torch_clipped(machine: Machine, shapes: list[tuple[int, int]]) -> float:
    torch = machine.torch
    assert torch is not None
    parameters = torch_parameters(torch, shapes)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)

    def step() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return gpu_timing.torch_timed(torch, step, machine.seconds)


THEIRS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "adamw": ("torch.optim", "AdamW", {"fused": True}),
    "adafactor": ("torch.optim", "Adafactor", {}),
    "came": ("came_pytorch", "CAME", {}),
    "prodigy": ("prodigyopt", "Prodigy", {}),
    "adamwschedulefree": ("schedulefree", "AdamWScheduleFree", {}),
    "muon": ("torch.optim", "Muon", {}),
}
"""By kind: module, class and options of the optimizer that ours is compared with."""


def every(machine: Machine) -> None:
    """One step of each optimizer over the adapter's factors."""
    device, shapes = machine.device, adapter_shapes()
    for kind, optimizer_class in tc.optim.KINDS.items():
        optimizer = optimizer_class(our_vars(shapes, device), lr=1e-4)
        optimizer.step()
        graph = gpu_timing.captured(optimizer.step, device)
        sides: dict[str, float | None] = {
            "ours": gpu_timing.timed(graph, device, machine.seconds),
            "ours_without_graph": gpu_timing.timed(optimizer.step, device, machine.seconds),
        }
        if machine.torch is not None and kind in THEIRS:
            sides["theirs"] = theirs(machine, kind, shapes)
        print(f"{kind}: {gpu_timing.milliseconds(**sides)}", flush=True)
        del optimizer, graph
        gpu_timing.fresh(device)


def theirs(machine: Machine, kind: str, shapes: list[tuple[int, int]]) -> float | None:
    module, name, options = THEIRS[kind]
    try:
        optimizer_class = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None
    parameters = torch_parameters(machine.torch, shapes)
    optimizer = optimizer_class(parameters, lr=1e-4, **options)
    # Schedule-free optimizers take a step only in training mode.
    if hasattr(optimizer, "train"):
        optimizer.train()
    return gpu_timing.torch_timed(machine.torch, optimizer.step, machine.seconds)


def main() -> None:
    options = gpu_timing.parser(__doc__).parse_args()
    machine = gpu_timing.start(options)
    # By title; `--only` runs the cases whose title contains its value.
    cases: dict[str, Callable[[Machine], None]] = {
        "AdamW8bit": eight_bit,
        "host": on_host,
        "AdamW": clipped,
        "every": every,
    }
    for title, case in cases.items():
        if options.only in title:
            gpu_timing.fresh(machine.device)
            case(machine)


if __name__ == "__main__":
    main()
