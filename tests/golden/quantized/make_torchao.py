"""Rounded values and gradients of a small matrix by torchao's quantization-aware training.

    pip install torch==2.11.0 torchao==0.18.0
    python tests/golden/quantized/make_torchao.py

Writes torchao.npz: for each format, the fake quantized `values` of `matrix` (of make_nf4.py). For
int8 and int4, it also has the `gradient` of the sum of these values, in which the scales count as
constants. Integers are symmetric, so their zero point is 0: int8 has codes from -127 to 127 and one
scale for each row; int4 is the format of `IntxFakeQuantizeConfig(torch.int4, group_size=32)`, with
codes from -8 to 7.
"""

from pathlib import Path

import numpy as np
import torch
from make_nf4 import matrix
from torchao.quantization import PerRow
from torchao.quantization.qat import Float8FakeQuantizeConfig, IntxFakeQuantizeConfig
from torchao.quantization.qat.fake_quantizer import FakeQuantizerBase
from torchao.quantization.quant_primitives import (
    MappingType,
    _fake_quantize_affine,
    choose_qparams_affine,
)

HERE = Path(__file__).parent


def fake_quantized(x: torch.Tensor, group: int, low: int, high: int) -> torch.Tensor:
    """Return `x` fake quantized to integers from `low` to `high`, with a scale for each group.

    The gradient takes the scales as constants. `group` is the number of columns of a group.
    """
    block, kind = (1, group), MappingType.SYMMETRIC
    scale, zero = choose_qparams_affine(x.detach(), kind, block, torch.int8, low, high)
    return _fake_quantize_affine(x, block, scale, zero, torch.int8, low, high)


def main() -> None:
    """Write the file."""
    found = {}
    for name in ("int8", "int4", "fp8"):
        x = matrix(6, 64)
        x[2, :32] = 0  # an int4 group of zeros
        x.requires_grad_()
        if name == "fp8":
            config = Float8FakeQuantizeConfig(granularity=PerRow())
            y = FakeQuantizerBase.from_config(config)(x)
        elif name == "int4":
            y = fake_quantized(x, 32, -8, 7)
            config = IntxFakeQuantizeConfig(torch.int4, group_size=32)
            assert torch.equal(y, FakeQuantizerBase.from_config(config)(x))
        else:
            y = fake_quantized(x, 64, -127, 127)  # a group is a whole row
        found[f"{name}.values"] = y.detach().numpy()
        if name != "fp8":
            y.sum().backward()
            # The gradients are 1, or 0 where a value was clipped. They have rounding errors,
            # because torchao divides by the scale and multiplies by it.
            found[f"{name}.gradient"] = x.grad.numpy().round().astype(np.int8)
            assert np.abs(x.grad.numpy() - found[f"{name}.gradient"]).max() < 1e-6
    np.savez_compressed(HERE / "torchao.npz", **found)


if __name__ == "__main__":
    main()
