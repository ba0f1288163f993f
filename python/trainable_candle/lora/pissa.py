"""PiSSA: a LoRA's initial factors, from a weight's largest singular values.

Meng et al. 2024, arXiv:2404.02948.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

import trainable_candle as tc
from trainable_candle.errors import ArgumentError
from trainable_candle.lora.factors import (
    EXACT_RATIO,
    approximate,
    balanced,
    require_finite,
    wide_svd,
)

if TYPE_CHECKING:
    from trainable_candle import Tensor
    from trainable_candle.lora.factors import Factors, Matrix

_ITERATIONS: Final = 16
"""The number of power iterations, as in the paper. They are more than in `approximate`, which is
for changes of weights by training: the singular values of weights decay more slowly."""
_LEAST_OVERSAMPLED: Final = 16
"""The least number of columns that the random matrix has in addition to the rank."""
_SMALLEST: Final = 1e-6
"""Smaller eigenvalues of a Gram matrix, as fractions of the largest, are rounding errors of f32."""


def pissa(weight: Tensor, rank: int, seed: int = 0) -> Factors:
    """Find the product B A of rank `rank` that is nearest to a weight W = U S Vᵀ.

    B is U sqrt(S) and A is sqrt(S) Vᵀ for the largest singular values, as in peft's
    `init_lora_weights="pissa"`. For large weights the result is approximate: a randomized range
    finder decomposes them (Halko, Martinsson and Tropp 2011, arXiv:0909.4061). The finder's matrix
    products run on the weight's device.

    ```python
    weight = tc.randn(64, 128)
    factors = tc.lora.pissa(weight, 8)
    rest = weight - tc.tensor(factors.up) @ tc.tensor(factors.down)  # what stays frozen
    assert rest.square().sum().item() < weight.square().sum().item()
    ```

    Args:
        weight: W, (out, in), floating point.
        rank: the rank of B A, at least 1; at most the smaller side of W is used.
        seed: the seed of the range finder's random matrix.

    Returns:
        The factors: `up` is B, `down` is A.

    Raises:
        ArgumentError: the rank is below 1.
        NonFiniteError: a value is not a finite number.
    """
    if rank < 1:
        raise ArgumentError(f"pissa: rank is {rank}, expected at least 1")
    matrix = weight.detach().to("f32")
    rank = min(rank, *matrix.shape)
    if min(matrix.shape) <= EXACT_RATIO * rank:
        # For so small a matrix, `approximate` computes a full decomposition.
        return approximate(matrix.to("cpu").numpy(), rank)
    size = min(rank + max(rank, _LEAST_OVERSAMPLED), *matrix.shape)
    probe = np.random.default_rng(seed).standard_normal((matrix.shape[1], size), np.float32)
    columns = matrix @ tc.tensor(probe, device=matrix.device)
    for _ in range(_ITERATIONS):
        columns = matrix @ _orthonormalised(matrix.t() @ _orthonormalised(columns))
    basis, _ = np.linalg.qr(_finite(columns))
    rows = _finite(matrix.t() @ tc.tensor(basis, device=matrix.device)).T
    # W is nearly basis @ rows.
    u, s, vt = wide_svd(rows)
    return balanced(basis @ u, s, vt, rank)


def _orthonormalised(columns: Tensor) -> Tensor:
    """Return a matrix with the same column space and nearly orthonormal columns.

    Only the small Gram matrix leaves the device. A QR decomposition in numpy would take longer than
    the products with the weight on a GPU. The columns need not be exactly orthonormal, because
    `pissa` orthonormalises those of its last iteration by a QR decomposition.

    Raises:
        NonFiniteError: a value of the Gram matrix is not a finite number.
    """
    gram = _finite(columns.t() @ columns).astype(np.float64)
    values, vectors = np.linalg.eigh(gram)
    values = np.maximum(values, max(_SMALLEST * values[-1], np.finfo(np.float32).tiny))
    return columns @ tc.tensor(
        (vectors / np.sqrt(values)).astype(np.float32), device=columns.device
    )


def _finite(tensor: Tensor) -> Matrix:
    """Return the values of a tensor as an array.

    Raises:
        NonFiniteError: a value is not a finite number.
    """
    values = tensor.to("cpu").numpy()
    require_finite(values)
    return values
