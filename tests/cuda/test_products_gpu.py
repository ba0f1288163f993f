"""Products whose algorithm is measured, on a real GPU."""

import os
import subprocess
import sys

import pytest

import trainable_candle as tc

pytestmark = pytest.mark.gpu

# (rows, inputs, outputs), of SDXL's linear layers.
SHAPES = ((4096, 640, 1920), (4096, 640, 5120), (1024, 1280, 1280), (1024, 5120, 1280))
PRINT_DIGESTS = f"""
import hashlib
import trainable_candle as tc
tc.manual_seed(0)
for rows, inputs, outputs in {SHAPES}:
    sizes = ((rows, inputs), (outputs, inputs), (outputs,), (rows, outputs))
    x, w, bias, grad = (tc.randn(size, dtype="bf16", device="cuda") for size in sizes)
    for _ in range(2):
        results = x @ w.t(), grad @ w, tc.nn.functional.linear(x, w, bias)
        for result in results:
            print(hashlib.sha256(result.to("f32").numpy().tobytes()).hexdigest())
"""


def digests(measure: str) -> list[str]:
    """The digests of the products in a new process, each computed twice."""
    environment = {**os.environ, "TRAINABLE_CANDLE_CUDA_MEASURE": measure}
    command = [sys.executable, "-c", PRINT_DIGESTS]
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return output.stdout.split()


def test_measured_algorithms_do_not_change_a_bit() -> None:
    reason = tc.cuda.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)
    with_measuring = digests("1")
    assert len(with_measuring) == 6 * len(SHAPES)
    assert with_measuring == digests("0")
