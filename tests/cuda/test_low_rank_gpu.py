"""The gradients of the LoRA factors of many layers on a GPU, against numpy in f64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trainable_candle as tc

pytestmark = pytest.mark.gpu

# Rows, input features (n), output features (m) and rank (r) of each layer. All n and m are
# multiples of 8, some of them not of 16. Most row counts are not multiples of a tile. All layers
# together have more blocks of 64 columns than a GPU has multiprocessors.
LAYERS = [
    (4097, 1280, 1288, 16),
    (1, 640, 640, 16),
    (77, 2048, 1280, 32),
    (300, 72, 8, 16),
    (1000, 3072, 4096, 64),
    (513, 1536, 256, 16),
    (129, 1280, 1280, 48),
    (64, 640, 24, 8),
]
REPEATED = 6
"""The index of a layer that one call lists twice: two products add to each of its gradients."""
SCALE = 0.5
"""The factor in front of the low-rank product."""


def assert_near(found: tc.Tensor, expected: np.ndarray, tolerance: float) -> None:
    difference = np.abs(found.detach().to("cpu").to("f32").numpy() - expected).max()
    assert difference <= tolerance * np.abs(expected).max(), (expected.shape, difference)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_gradients_of_factors_of_many_layers_are_near_those_of_numpy(dtype: Any) -> None:
    tc.manual_seed(0)
    downs = [tc.Var(tc.randn(r, n, device="cuda") / n**0.5) for _, n, _, r in LAYERS]
    ups = [tc.Var(tc.randn(m, r, device="cuda") / r**0.5) for _, _, m, r in LAYERS]
    xs = [tc.randn(rows, n, device="cuda").to(dtype) for rows, n, _, _ in LAYERS]
    grads = [tc.randn(rows, m, device="cuda").to(dtype) for rows, _, m, _ in LAYERS]
    opt = tc.optim.AdamW(downs + ups)
    tc.lora_backward_(grads, xs, downs, ups, SCALE)
    opt.zero_grad()
    # Now all gradients are zeros in one buffer, and each of the next two calls adds to the buffer.
    tc.lora_backward_(grads, xs, downs, ups, SCALE)
    with tc.cuda.profile("cuda") as profile:
        tc.lora_backward_(
            [*grads, grads[REPEATED]],
            [*xs, xs[REPEATED]],
            [*downs, downs[REPEATED]],
            [*ups, ups[REPEATED]],
            SCALE,
        )
    # A launch adds to a gradient at most once, so the repeated layer needs a second launch.
    launches = {kernel.name: kernel.count for kernel in profile.kernels}
    assert launches[f"low_rank_gradient_{dtype}"] == 2, launches

    def wide(tensor: tc.Tensor) -> np.ndarray:
        return tensor.detach().to("cpu").to("f32").numpy().astype(np.float64)

    # The products read the factors, which are f32, in `dtype`.
    def rounded(tensor: tc.Tensor) -> np.ndarray:
        return wide(tensor.detach().to(dtype))

    tolerance = 1.6e-2 if dtype == "bf16" else 2e-3
    for layer, (x, grad, down, up) in enumerate(zip(xs, grads, downs, ups, strict=True)):
        # The number of products that were added to each gradient since `zero_grad`.
        products = 3 if layer == REPEATED else 2
        hidden = wide(x) @ rounded(down).T
        assert up.grad is not None
        assert down.grad is not None
        assert_near(up.grad, products * SCALE * wide(grad).T @ hidden, tolerance)
        assert_near(down.grad, products * SCALE * (wide(grad) @ rounded(up)).T @ wide(x), tolerance)
