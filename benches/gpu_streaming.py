"""A LoRA step of Flux-dev with blocks streamed from host memory, against resident blocks.

python benches/gpu_streaming.py [--base int8] [--blocks 0 28 57] [--modulation]

1024 x 1024 px, full checkpointing, random weights. The script prints a line for each number of
streamed blocks. The line has the time of a step with and without a graph, the time of a forward
pass of a few tokens, the peak on the device, the time of loading the model, and the losses of the
first steps. These losses must be equal in all lines. A few tokens take almost no computation, so
the time of their forward pass is that of copying the blocks.
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace
from typing import Any

import gpu_timing
from gpu_timing import GIB
from gpu_transformers import FLUX, cases, inputs_of, model_of, step_of

import trainable_candle as tc

BLOCKS = FLUX["num_layers"] + FLUX["num_single_layers"]
DEVICE = "cuda"


def run(base: str | None, blocks: int, seconds: float, *, modulation: bool) -> None:
    case = next(c for c in cases() if c.name == "flux-dev" and c.checkpointing == "full")
    gpu_timing.fresh(DEVICE)
    started = time.perf_counter()
    model = model_of(case, DEVICE, base, stream_blocks=blocks, stream_modulation=modulation)
    ready = time.perf_counter() - started
    step = step_of(case, model, DEVICE)
    losses = [step().item() for _ in range(3)]
    eager = gpu_timing.timed(step, DEVICE, seconds)
    peak = tc.cuda.memory_stats(DEVICE)["peak_allocated"]
    graph = gpu_timing.captured(step, DEVICE)
    recorded = gpu_timing.timed(graph, DEVICE, seconds)
    few = inputs_of(replace(case, tokens=16), DEVICE, latent=8)

    def forward(model: Any = model) -> tc.Tensor:
        with tc.no_grad():
            return model(*few)

    copies = gpu_timing.timed(forward, DEVICE, seconds / 2)
    times = gpu_timing.milliseconds(graph=recorded, eager=eager, few_tokens=copies)
    print(
        f"{base or 'bf16'}, {blocks} blocks{' and modulation' if modulation else ''}: {times}; "
        f"peak {peak / GIB:.2f} GiB; loaded in {ready:.0f} s; losses {losses}",
        flush=True,
    )
    del step, graph, forward, model
    gc.collect()
    gpu_timing.fresh(DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", choices=("int8", "fp8", "nf4"))
    parser.add_argument("--blocks", type=int, nargs="+", default=[0, BLOCKS // 2, BLOCKS])
    parser.add_argument("--modulation", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    for blocks in options.blocks:
        run(options.base, blocks, options.seconds, modulation=options.modulation)


if __name__ == "__main__":
    main()
