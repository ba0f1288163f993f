"""The principal part of a weight, as a LoRA's start (Meng et al. 2024, arXiv:2404.02948)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

import trainable_candle as tc
from trainable_candle.errors import ArgumentError
from trainable_candle.lora.factors import WHOLE, approximate, balanced, require_finite, wide_svd

if TYPE_CHECKING:
    from trainable_candle import Tensor
    from trainable_candle.lora.factors import Factors, Matrix

_ITERATIONS: Final = 16
"""Power iterations. Singular values of weights decay slowly, so more are needed than for changes of
weights; the paper, too, uses 16."""
_LEAST_OVERSAMPLED: Final = 16
"""The least number of columns that the random matrix has in addition to the rank."""
_SMALLEST: Final = 1e-6
"""Eigenvalues of a Gram matrix below this fraction of the largest are rounding errors of f32."""


def pissa(weight: Tensor, rank: int, seed: int = 0) -> Factors:
    """Find the product B A of rank `rank` that is nearest to a weight W = U S Vᵀ.

    B is U sqrt(S) and A is sqrt(S) Vᵀ for the largest singular values, as in peft's
    `init_lora_weights="pissa"`. Large weights are decomposed by a randomized range finder (Halko,
    Martinsson and Tropp 2011, arXiv:0909.4061), whose products run on the weight's device.

    ```python
    weight = tc.randn(64, 128)
    factors = tc.lora.pissa(weight, 8)
    rest = weight - tc.tensor(factors.up) @ tc.tensor(factors.down)  # what stays frozen
    assert rest.square().sum().item() < weight.square().sum().item()
    ```

    Args:
        weight: W, (out, in), floating point.
        rank: the rank of B A, at least 1; at most the smaller side of W is used.
        seed: the seed of the random matrix.

    Returns:
        The factors: `up` is B, `down` is A.

    Raises:
        ArgumentError: the rank is below 1.
        NonFiniteError: a value is not a finite number.
    """
    if rank < 1:
        raise ArgumentError(f"pissa: rank is {rank}, expected at least 1")
    exact = weight.detach().to("f32")
    rank = min(rank, *exact.shape)
    if min(exact.shape) <= WHOLE * rank:
        return approximate(exact.to("cpu").numpy(), rank)
    size = min(rank + max(rank, _LEAST_OVERSAMPLED), *exact.shape)
    probe = np.random.default_rng(seed).standard_normal((exact.shape[1], size), np.float32)
    found = exact @ tc.tensor(probe, device=exact.device)
    for _ in range(_ITERATIONS):
        found = exact @ _even(exact.t() @ _even(found))
    basis, _ = np.linalg.qr(_finite(found))
    rows = _finite(exact.t() @ tc.tensor(basis, device=exact.device)).T
    u, s, vt = wide_svd(rows)
    return balanced(basis @ u, s, vt, rank)


def _even(columns: Tensor) -> Tensor:
    """Return a matrix with the same column space and nearly orthonormal columns.

    Only a small matrix leaves the device: a QR decomposition in numpy would take longer than the
    products with the weight on a GPU. The columns need not be exactly orthonormal, because `pissa`
    orthonormalises the last basis by a QR decomposition.
    """
    gram = _finite(columns.t() @ columns).astype(np.float64)
    values, vectors = np.linalg.eigh(gram)
    values = np.maximum(values, max(_SMALLEST * values[-1], np.finfo(np.float32).tiny))
    return columns @ tc.tensor(
        (vectors / np.sqrt(values)).astype(np.float32), device=columns.device
    )


def _finite(tensor: Tensor) -> Matrix:
    """Return the values of a tensor, which must be finite."""
    values = tensor.to("cpu").numpy()
    require_finite(values)
    return values
