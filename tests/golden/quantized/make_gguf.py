"""Blocks of ggml's formats and their values, by gguf-py 0.19 (pip install gguf).

Writes gguf.npz. For each format X, in lower case, `X.blocks` has random bytes with scales of all
magnitudes, and `X.values` has the blocks' values in f32. For Q4_0 and Q8_0, `X.made` has the blocks
that gguf-py makes of `weights`.
"""

from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize

# Byte offsets of the f16 scales in a block. Of two, the second is the block's minimum (Q4_1, Q5_1)
# or the scale of the minima (Q4_K, Q5_K).
SCALE_OFFSETS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
}  # fmt: skip
# 6e-8 is the smallest f16, -6e-5 is subnormal, ±65504 are the largest, and the last two are
# ordinary scales.
SCALE_VALUES = np.array([6e-8, -6e-5, 65504.0, -65504.0, 0.0, -0.0, 0.0123, -0.0371], np.float16)


def main() -> None:
    """Write the file."""
    random = np.random.default_rng(0)
    found = {}
    # Each row is two blocks of 32. The cube gives blocks a few weights much larger than the others.
    weights = (random.normal(0, 0.05, (4, 64)) ** 3).astype(np.float32)
    weights[1, :32] = 0  # a block of zeros
    # The random weight of the largest magnitude in this block is negative. This copy of it makes a
    # tie: two equal weights have the largest magnitude.
    weights[2, 5] = -np.abs(weights[2, :32]).max()
    found["weights"] = weights
    for name, offsets in SCALE_OFFSETS.items():
        kind = GGMLQuantizationType[name]
        values_in_block, bytes_of_block = GGML_QUANT_SIZES[kind]
        # Blocks have 256 or 32 values. Each block of 32 gets a different one of the eight
        # SCALE_VALUES, the two blocks of 256 get two of them.
        count = 2 if values_in_block == 256 else len(SCALE_VALUES)
        blocks = random.integers(0, 256, (count, bytes_of_block), np.uint8)
        for offset in offsets:
            scales = random.permutation(SCALE_VALUES)[: len(blocks)]
            blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
        blocks = blocks.reshape(2, -1)  # a matrix of two rows
        found[f"{name.lower()}.blocks"] = blocks
        found[f"{name.lower()}.values"] = dequantize(blocks, kind)
        if name in {"Q4_0", "Q8_0"}:
            found[f"{name.lower()}.made"] = quantize(weights, kind)
    np.savez_compressed(Path(__file__).with_name("gguf.npz"), **found)


if __name__ == "__main__":
    main()
