"""A LoRA step of Flux-dev with blocks streamed from host memory, and with resident blocks.

python benches/gpu_streaming.py [--base int8] [--blocks 0 28 57] [--modulation]

1024 x 1024 px, full checkpointing, random weights. The script prints a line for each number of
streamed blocks. The line has the time of a step with a CUDA graph ("graph") and without ("eager"),
the time of a forward pass of 32 tokens ("few tokens"), the peak of GPU memory before the graph was
captured, the time of making the model, and the losses of the first three steps. These losses must
be equal in all lines. The forward pass of 32 tokens takes almost no computation, so its time is
that of copying the streamed blocks.
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
    """Measure one number of streamed blocks, and print its line."""
    case = next(c for c in cases() if c.name == "flux-dev" and c.checkpointing == "full")
    gpu_timing.fresh(DEVICE)
    started = time.perf_counter()
    model = model_of(case, DEVICE, base, stream_blocks=blocks, stream_modulation=modulation)
    load_seconds = time.perf_counter() - started
    step = step_of(case, model, DEVICE)
    losses = [step().item() for _ in range(3)]
    eager = gpu_timing.timed(step, DEVICE, seconds)
    peak = tc.cuda.memory_stats(DEVICE)["peak_allocated"]
    graph = gpu_timing.captured(step, DEVICE)
    recorded = gpu_timing.timed(graph, DEVICE, seconds)
    # 16 tokens of text, and 16 of an image: latents of 8 x 8 make 4 x 4 tokens.
    few_tokens = inputs_of(replace(case, tokens=16), DEVICE, latent=8)

    # `model` is a default because `del model` below makes ruff reject a use from the outer scope.
    def forward(model: Any = model) -> tc.Tensor:
        with tc.no_grad():
            return model(*few_tokens)

    copying = gpu_timing.timed(forward, DEVICE, seconds / 2)
    times = gpu_timing.milliseconds(graph=recorded, eager=eager, few_tokens=copying)
    print(
        f"{base or 'bf16'}, {blocks} blocks{' and modulation' if modulation else ''}: {times}; "
        f"peak {peak / GIB:.2f} GiB; loaded in {load_seconds:.0f} s; losses {losses}",
        flush=True,
    )
    del step, graph, forward, model
    gc.collect()
    gpu_timing.fresh(DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    formats = gpu_timing.FORMATS
    parser.add_argument("--base", choices=formats, help="format of the frozen base (default: bf16)")
    counts = [0, BLOCKS // 2, BLOCKS]
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=counts, help="numbers of streamed blocks"
    )
    parser.add_argument(
        "--modulation", action="store_true", help="also stream the layers that compute modulation"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="how long to time a step")
    options = parser.parse_args()
    for blocks in options.blocks:
        run(options.base, blocks, options.seconds, modulation=options.modulation)


if __name__ == "__main__":
    main()
