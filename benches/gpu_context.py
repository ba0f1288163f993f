"""The longest text on which Llama-3.1-8B can be trained with a given amount of GPU memory.

python benches/gpu_context.py [--gib 8 12 16 24] [--checkpointing offload]

The model has random weights: an NF4 base, LoRA of rank 32 on the seven linear layers of every block
and 8-bit AdamW. A step has one text. Two short texts give the memory of a step as a linear function
of the number of tokens, from which the script predicts the longest text for each amount of memory.
Then it limits the allocator to this amount, less the memory that CUDA itself takes, and makes steps
with the predicted number of tokens. If memory runs out, it shortens the text by 1 % until a step
succeeds; otherwise it makes the text longer by 1 % until a step fails. It tries at most 8 lengths.
Each line has the longest text with which a step succeeded, the peak of the memory that the
allocator reserved in this step, and the seconds of this step.

For comparison, unsloth publishes 2,972, 21,848, 40,724 and 78,475 tokens in 8, 12, 16 and 24 GB
(<https://docs.unsloth.ai/basics/long-context>).
"""

from __future__ import annotations

import argparse
import gc
import time
from dataclasses import replace

import gpu_timing
from gpu_lm import LLAMA3, Case, prepared, step_of
from gpu_timing import GIB

import trainable_candle as tc

DEVICE = "cuda"
LLAMA31 = LLAMA3 | {
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
SHORT = (4096, 8192)
"""The lengths, in tokens, of the texts that give the memory of a token."""
MULTIPLE = 128
"""The tried lengths are multiples of this number of tokens."""
TRIES = 8
"""The most lengths to try for an amount of memory."""


class Trainer:
    """A model with its adapter and optimizer, and the memory that a step takes."""

    def __init__(self, checkpointing: str) -> None:
        self.case = Case(
            "llama3.1-8b",
            LLAMA31,
            sequences=1,
            length=SHORT[0],
            checkpointing=checkpointing,
            rank=32,
        )
        self.model, self.optimizer = prepared(self.case, DEVICE, "nf4")
        self.step(SHORT[0])  # The first step loads kernels and makes the optimizer's states.
        short, long = SHORT
        short_bytes, long_bytes = (self.step(length)[0] for length in SHORT)
        self.per_token = (long_bytes - short_bytes) / (long - short)
        self.fixed = short_bytes - short * self.per_token

    def step(self, length: int) -> tuple[int, float]:
        """Make a step with a text of `length` tokens; return its peak in bytes and its seconds."""
        step = step_of(replace(self.case, length=length), self.model, self.optimizer, DEVICE)
        gc.collect()
        tc.cuda.empty_cache(DEVICE)
        tc.cuda.reset_peak_memory_stats(DEVICE)
        started = time.perf_counter()
        step().item()
        seconds = time.perf_counter() - started
        return tc.cuda.memory_stats(DEVICE)["peak_reserved"], seconds

    def longest(self, limit: int) -> tuple[int, int, float] | None:
        """Return the longest text that fits into `limit` bytes, and its step's bytes and seconds.

        None if no tried length fits.
        """
        tc.cuda.set_memory_limit(limit, DEVICE)
        length = multiple((limit - self.fixed) / self.per_token)
        found, has_failed = None, False
        for _ in range(TRIES):
            outcome = self.tried(length)
            if outcome is None:
                has_failed = True
                if found is not None:
                    break
                length = multiple(length * 0.99)
            else:
                found = (length, *outcome)
                if has_failed:
                    break
                # At least one multiple more, because `multiple` rounds down.
                length = multiple(length * 1.01) + MULTIPLE
        tc.cuda.set_memory_limit(None, DEVICE)
        return found

    def tried(self, length: int) -> tuple[int, float] | None:
        """Return what `step` returns, or None if the step ran out of memory."""
        try:
            return self.step(length)
        except tc.OutOfMemoryError:
            return None


def multiple(tokens: float) -> int:
    """Round down to a multiple of `MULTIPLE`, at least one."""
    return max(int(tokens) // MULTIPLE, 1) * MULTIPLE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gib", type=float, nargs="+", default=[8, 12, 16, 24])
    parser.add_argument("--checkpointing", choices=("full", "offload"), default="offload")
    given = parser.parse_args()
    reason = tc.cuda.unavailable_reason()
    if reason is not None:
        raise SystemExit(f"no CUDA: {reason}")
    gpu_timing.fresh(DEVICE)
    trainer = Trainer(given.checkpointing)
    stats = tc.cuda.memory_stats(DEVICE)
    # What CUDA itself takes.
    context = stats["total"] - stats["free"] - stats["reserved"]
    print(
        f"{given.checkpointing}: {trainer.fixed / GIB:.2f} GiB, and {trainer.per_token:.0f} bytes "
        f"a token; CUDA itself takes {context / GIB:.2f} GiB",
        flush=True,
    )
    for gib in given.gib:
        found = trainer.longest(int(gib * GIB) - context)
        if found is None:
            print(f"{gib:g} GiB: nothing fits", flush=True)
        else:
            length, peak, seconds = found
            print(
                f"{gib:g} GiB: {length} tokens, {peak / GIB:.2f} GiB, {seconds:.1f} s", flush=True
            )


if __name__ == "__main__":
    main()
