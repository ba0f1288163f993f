"""The codes and scales of small matrices by bitsandbytes.

    pip install torch==2.11.0 bitsandbytes==0.50.2
    python tests/golden/quantized/make_nf4.py

The scales are quantized, too: to 8-bit codes of a table of values. This script itself finds the
nearest code for each scale, because some codes by bitsandbytes' library for CPUs are off by one:
that library looks them up in a table with too few entries. The CUDA kernels and the torch fallback
of bitsandbytes are exact.

Writes nf4.npz. For each matrix, `codes` has two 4-bit codes in each byte, and `scales` has the
8-bit codes of the scales. A scale is the value of its code, times the `outer` scale of its group of
256 scales, plus `offset`. `values` has the first 8 rows of the dequantized matrix, and `sum` is the
sum of all its values.
"""

from pathlib import Path

import bitsandbytes.functional as bnb
import numpy as np
import torch

HERE = Path(__file__).parent


def matrix(rows: int, columns: int) -> torch.Tensor:
    """Values from a formula, which tests can compute without the generator of another library."""
    i = torch.arange(rows * columns, dtype=torch.float64)
    values = (torch.sin(i * 0.7) + torch.sin(i * i * 0.013) * torch.sin(i * 0.0031) ** 5) * 0.05
    return values.float().reshape(rows, columns)


def main() -> None:
    """Write `nf4.npz`."""
    found = {}
    # The rows of the ragged matrix end within blocks, its last block is short, and its number of
    # elements is odd.
    for name, rows, columns in [("whole", 96, 256), ("ragged", 37, 91)]:
        for dtype in (torch.float32, torch.bfloat16):
            x = matrix(rows, columns).to(dtype)
            if name == "whole":
                x[3:5] = 0  # Blocks of zeros have a scale of 0.
            packed, state = bnb.quantize_4bit(x, quant_type="nf4", compress_statistics=True)
            # The scales in f32, one for each block of 64 elements.
            _, scales = torch.ops.bitsandbytes.quantize_4bit.default(x, 64, "nf4", torch.uint8)
            # The values of the 256 codes of scales.
            table = state.state2.code
            groups = (scales - state.offset).split(256)
            outer = torch.stack([group.abs().max() for group in groups])
            assert torch.equal(outer, state.state2.absmax)
            nearest = [
                (group[:, None] / largest - table).abs().argmin(1)
                for group, largest in zip(groups, outer, strict=True)
            ]
            scale_codes = torch.cat(nearest).to(torch.uint8)
            assert (scale_codes.int() - state.absmax.int()).abs().max() <= 1
            state.absmax = scale_codes
            values = bnb.dequantize_4bit(packed, state)
            key = f"{name}.{'f32' if dtype == torch.float32 else 'bf16'}"
            found |= {
                f"{key}.codes": packed.numpy().ravel(),
                f"{key}.scales": scale_codes.numpy(),
                f"{key}.outer": outer.numpy(),
                f"{key}.offset": np.float32(state.offset.item()),
                f"{key}.values": values.float().numpy().astype(np.float32)[:8],
                f"{key}.sum": values.double().sum().numpy(),
            }
    np.savez_compressed(HERE / "nf4.npz", **found)


if __name__ == "__main__":
    main()
