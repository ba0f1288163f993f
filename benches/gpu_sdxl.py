"""A LoRA step of the full-size SDXL UNet on a GPU: 1024 x 1024 px, bf16 base of random weights.

python benches/gpu_sdxl.py [--only "batch 1"] [--profile] [--steps 2000]

A step is forward, mean squared error, backward and the optimizer, with f32 LoRA of rank 16 on the
attention or on all layers of the transformers. Our step is timed without and with a CUDA graph;
torch runs in eager mode under autocast. With `--steps N`, N of our steps run, and the first and the
last tenth are compared in time and memory.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gpu_timing
from gpu_timing import GIB, Machine

import trainable_candle as tc
from trainable_candle.families.sdxl import SDXL

if TYPE_CHECKING:
    from collections.abc import Callable

# The rank of the LoRA, the height and width of the latents, and the tokens of a prompt.
RANK, LATENT, TOKENS = 16, 128, 77
ATTENTION_LAYERS = ["to_q", "to_k", "to_v", "to_out.0"]
"""Only the attention: peft's usual choice for SDXL."""
# Floating-point operations of one image's forward pass: in linear layers and convolutions, and in
# attention.
DENSE, ATTENTION = 5.977e12, 0.784e12


@dataclass(frozen=True)
class Case:
    """The batch, the kind of checkpointing and the optimizer of a measured step."""

    batch: int
    checkpointing: str
    optimizer: str
    every_layer: bool = False
    """Whether all layers of the transformers have adapters, as in `train-lora`."""

    @property
    def title(self) -> str:
        layers = ", every transformer layer" if self.every_layer else ""
        return f"batch {self.batch}, {self.checkpointing} checkpointing, {self.optimizer}{layers}"

    @property
    def targets(self) -> list[str]:
        return list(SDXL.targets) if self.every_layer else ATTENTION_LAYERS

    @property
    def flops(self) -> float:
        """The floating-point operations of a step.

        Backward costs as much as forward in frozen layers, 2.5 times as much in attention. Full
        checkpointing repeats the forward pass; what selective checkpointing repeats is not counted.
        """
        forward = DENSE + ATTENTION
        backward = DENSE + 2.5 * ATTENTION
        return self.batch * (backward + forward * (2 if self.checkpointing == "full" else 1))


CASES = [
    Case(1, "no", "adamw"),
    Case(1, "no", "adamw8bit", every_layer=True),
    Case(1, "selective", "adamw8bit"),
    Case(1, "full", "adamw8bit"),
    Case(4, "no", "adamw"),
]

# Milliseconds of a step with torch.compile; measured once (H200, torch 2.11), because compiling
# takes four minutes.
COMPILED = {Case(1, "no", "adamw"): 170, Case(4, "no", "adamw"): 204}


def ours(case: Case, device: str, base: str | None = None) -> Callable[[], tc.Tensor]:
    """Return this library's step; `base` is the format of the frozen model, None for bf16."""
    tc.manual_seed(0)
    model = tc.models.SDXLUNet.from_config(dtype="bf16", device=device, quantize=base)
    if case.checkpointing != "no":
        model.enable_gradient_checkpointing(case.checkpointing)
    adapter = model.add_adapter(tc.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=case.targets))
    kinds: dict[str, Any] = {"adamw": tc.optim.AdamW, "adamw8bit": tc.optim.AdamW8bit}
    optimizer = kinds[case.optimizer](adapter.parameters(), lr=1e-4)
    count = case.batch

    def random(*shape: int) -> tc.Tensor:
        return tc.randn((count, *shape), device=device).to("bf16")

    sample, text, pooled = random(4, LATENT, LATENT), random(TOKENS, 2048), random(1280)
    target = tc.randn((count, 4, LATENT, LATENT), device=device)
    timesteps = tc.full((count,), 500.0, device=device)
    sizes = tc.full((count, 6), 1024.0, device=device)

    def step() -> tc.Tensor:
        found = model(sample, timesteps, text, text_embeds=pooled, time_ids=sizes)
        loss = tc.nn.functional.mse_loss(found.to("f32"), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def theirs(torch: Any, case: Case) -> Callable[[], object]:
    """Return torch's step."""
    import torch_sdxl  # noqa: PLC0415 - torch is optional

    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = torch_sdxl.UNet()
        torch.set_default_dtype(torch.float32)
        parameters = torch_sdxl.with_lora(model, RANK, every_layer=case.every_layer)
        model.checkpointing = case.checkpointing == "full"
        count, half = case.batch, {"dtype": torch.bfloat16}
        sample = torch.randn(count, 4, LATENT, LATENT, **half)
        text, pooled = torch.randn(count, TOKENS, 2048, **half), torch.randn(count, 1280, **half)
        target = torch.randn(count, 4, LATENT, LATENT)
        timesteps, sizes = torch.full((count,), 500.0), torch.full((count, 6), 1024.0)
    optimizer = torch_optimizer(torch, parameters, case.optimizer)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            found = model(sample, timesteps, text, pooled, sizes)
        torch.nn.functional.mse_loss(found.float(), target).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def torch_optimizer(torch: Any, parameters: list[Any], kind: str) -> Any:
    """Return torch's optimizer for `kind`, the optimizer of a case."""
    if kind == "adamw8bit":
        try:
            import bitsandbytes  # noqa: PLC0415 - optional

            return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-4)
        except ImportError:
            print("bitsandbytes is not installed: torch uses its fused AdamW")
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def run(case: Case, machine: Machine, *, profile: bool, trace: bool) -> None:
    """Time a case with this library, and with torch if it is there; print the results."""
    device = machine.device
    gpu_timing.fresh(device)
    step = ours(case, device, machine.base)
    started = time.perf_counter()
    step().item()
    first = time.perf_counter() - started
    if profile:
        gpu_timing.profiled(step, device)
    eager = gpu_timing.timed(step, device, machine.seconds)
    peak = tc.cuda.memory_stats(device)["peak_allocated"]
    with tc.cuda.profile(device) as kernels:
        step()
    graph = gpu_timing.captured(step, device)
    if trace and machine.torch is not None:
        gpu_timing.traced(machine.torch, graph, device)
    recorded = gpu_timing.timed(graph, device, machine.seconds)
    tc.cuda.empty_cache(device)
    # A graph keeps its memory reserved between replays, so this is what the step needs as a graph.
    reserved = tc.cuda.memory_stats(device)["reserved"]
    # The time of the step's operations at the rate of a large matrix product. The bytes that the
    # step moves are not counted.
    floor = machine.floor("bf16", case.flops, moved=0)
    times = gpu_timing.milliseconds(ours=recorded, ours_without_graph=eager, floor=floor)
    print(
        f"{case.title}{gpu_timing.title_suffix(machine)}: {times}; "
        f"peak {peak / GIB:.2f} GiB, as a graph {reserved / GIB:.2f}; "
        f"{kernels.launches} launches, kernels {kernels.milliseconds:.1f} ms; "
        f"first step {first:.1f} s",
        flush=True,
    )
    del step, graph
    gc.collect()
    gpu_timing.fresh(device)
    # torch has no selective checkpointing.
    if machine.torch is not None and case.checkpointing != "selective":
        torch = machine.torch
        their_step = theirs(torch, case)
        seconds = gpu_timing.torch_timed(torch, their_step, machine.seconds)
        allocated = torch.cuda.max_memory_allocated() / GIB
        ratio = recorded / seconds
        times = gpu_timing.milliseconds(torch_eager=seconds)
        compiled = COMPILED.get(case)
        known = f"; torch.compile {compiled} ms on an H200" if compiled else ""
        print(f"  {times}{known}; peak {allocated:.2f} GiB; ours/torch {ratio:.2f}", flush=True)
        del their_step
        gpu_timing.fresh(device)


def run_long(case: Case, device: str, steps: int) -> None:
    """Print whether steps get slower or take more memory; the host waits for each step."""
    gpu_timing.fresh(device)
    graph = gpu_timing.captured(ours(case, device), device)
    tenth = max(1, steps // 10)
    times, memory = [], []
    for _ in range(tenth + steps):
        started = time.perf_counter()
        graph()
        tc.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
        stats = tc.cuda.memory_stats(device)
        memory.append((stats["allocated"], stats["reserved"]))
    # The loop runs `tenth` extra steps first, which record the graph and warm up. They are not
    # among the `steps` that are compared.
    first, last = (statistics.median(part) for part in (times[tenth : 2 * tenth], times[-tenth:]))
    change = [end - begin for begin, end in zip(memory[tenth], memory[-1], strict=True)]
    tenths = gpu_timing.milliseconds(first_tenth=first, last_tenth=last)
    print(
        f"{case.title}, {steps} steps: {tenths}; "
        f"allocated {change[0]:+d} bytes, reserved {change[1]:+d} bytes",
        flush=True,
    )


def main() -> None:
    parser = gpu_timing.parser(__doc__)
    parser.set_defaults(seconds=2.0)
    parser.add_argument("--steps", type=int, default=0, help="run this many steps, without torch")
    parser.add_argument("--trace", action="store_true", help="list a replay's kernels; needs torch")
    options = parser.parse_args()
    machine = gpu_timing.start(options)
    for case in CASES:
        if options.only not in case.title:
            continue
        if options.steps:
            run_long(case, machine.device, options.steps)
        else:
            run(case, machine, profile=options.profile, trace=options.trace)


if __name__ == "__main__":
    main()
