"""Low-rank approximations of matrices, by singular value decompositions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from trainable_candle.errors import NonFiniteError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Matrix = npt.NDArray[np.floating[Any]]

_OVERSAMPLED: Final = 16
"""The number of columns that the random matrix of `approximate` has in addition to the rank."""
_ITERATIONS: Final = 4
"""The number of power iterations of `approximate`."""
EXACT_RATIO: Final = 4
"""If a matrix's shorter side is at most this many times the rank, no random matrix is used."""


@dataclass(frozen=True)
class Factors:
    """A change of a weight as a product, `up @ down`."""

    up: Matrix
    """The matrix (out, rank)."""
    down: Matrix
    """The matrix (rank, in). A convolution's `in` is input channels times kernel elements."""

    @property
    def rank(self) -> int:
        """The number of columns of `up` and of rows of `down`."""
        return int(self.down.shape[0])

    def scaled(self, scale: float) -> Factors:
        """Return the change times a number."""
        return Factors(self.up * self.up.dtype.type(scale), self.down)


def joined(parts: Sequence[Factors]) -> Factors:
    """Return the exact sum of several changes of one weight; its rank is the sum of their ranks."""
    return Factors(
        np.concatenate([part.up for part in parts], 1),
        np.concatenate([part.down for part in parts], 0),
    )


def truncate(factors: Factors, rank: int, keep: float = 1.0) -> Factors:
    """Return the nearest change of a lower rank (Eckart and Young), without computing `up @ down`.

    Args:
        factors: the change.
        rank: the highest rank of the result, at least 1.
        keep: a fraction, above 0 and at most 1. The result has the lowest rank at which it keeps
            this fraction of the squared norm of the nearest change of rank `rank`. With 1, the
            result has rank `rank`, or the smallest of `out`, `in` and the rank of `factors` if that
            is less.

    Raises:
        NonFiniteError: a value is not a finite number.
    """
    require_finite(factors.up, factors.down)
    left, left_triangle = np.linalg.qr(factors.up.astype(np.float64))
    right, right_triangle = np.linalg.qr(factors.down.T.astype(np.float64))
    u, s, vt = np.linalg.svd(left_triangle @ right_triangle.T)
    return balanced(left @ u, s, vt @ right.T, rank, keep)


def approximate(matrix: Matrix, rank: int, keep: float = 1.0, seed: int = 0) -> Factors:
    """Return the product of at most rank `rank` that is nearest to `matrix`.

    For large matrices the result is approximate: a randomized range finder with power iterations
    decomposes them (Halko, Martinsson and Tropp 2011, arXiv:0909.4061). If the singular values
    decay, as they do for changes of weights by training, the error is close to that of a full
    decomposition.

    Args:
        matrix: the matrix (out, in).
        rank: the highest rank of the result, at least 1.
        keep: see `truncate`.
        seed: the seed of the random matrix.

    Raises:
        NonFiniteError: a value is not a finite number.
    """
    require_finite(matrix)
    matrix = matrix.astype(np.float32)
    if min(matrix.shape) <= EXACT_RATIO * rank:
        u, s, vt = np.linalg.svd(matrix.astype(np.float64), full_matrices=False)
        return balanced(u, s, vt, rank, keep)
    size = min(rank + _OVERSAMPLED, *matrix.shape)
    probe = np.random.default_rng(seed).standard_normal((matrix.shape[1], size), np.float32)
    column_basis, _ = np.linalg.qr(matrix @ probe)  # a basis of a part of the column space
    for _ in range(_ITERATIONS):
        row_basis, _ = np.linalg.qr(matrix.T @ column_basis)
        column_basis, _ = np.linalg.qr(matrix @ row_basis)
    u, s, vt = wide_svd(column_basis.T @ matrix)
    return balanced(column_basis @ u, s, vt, rank, keep)


def wide_svd(rows: Matrix) -> tuple[Matrix, Matrix, Matrix]:
    """Return the singular value decomposition, in f64, of a matrix with few rows and many columns.

    A QR decomposition of the transposed matrix leaves a small square matrix to decompose. LAPACK's
    decomposition of the wide matrix takes about ten times as long.
    """
    right, square = np.linalg.qr(rows.T.astype(np.float64))
    u, s, vt = np.linalg.svd(square.T)
    return u, s, vt @ right.T


def balanced(u: Matrix, s: Matrix, vt: Matrix, rank: int, keep: float = 1.0) -> Factors:
    """Return the part of u @ diag(s) @ vt with the largest singular values, as factors in f32.

    The square root of each singular value scales its column of `up` and its row of `down`.

    Args:
        u: (out, n) or more columns, orthonormal.
        s: the n singular values, in descending order.
        vt: (n, in) or more rows, orthonormal.
        rank: see `truncate`.
        keep: see `truncate`.
    """
    rank = min(rank, len(s))
    squared_norms = np.cumsum(s[:rank] ** 2)  # of the nearest changes of rank 1, 2, ...
    if keep < 1 and squared_norms[-1] > 0:
        rank = min(rank, int(np.searchsorted(squared_norms, keep * squared_norms[-1])) + 1)
    roots = np.sqrt(s[:rank])
    up, down = u[:, :rank] * roots, roots[:, None] * vt[:rank]
    return Factors(up.astype(np.float32), down.astype(np.float32))


def require_finite(*matrices: Matrix) -> None:
    """Check that all values are finite numbers.

    Raises:
        NonFiniteError: a value is NaN or infinite.
    """
    if not all(np.isfinite(matrix).all() for matrix in matrices):
        raise NonFiniteError("svd: a value is NaN or infinite; the file or the model is damaged")
