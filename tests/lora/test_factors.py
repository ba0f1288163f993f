"""Low-rank factors of matrices against full singular value decompositions."""

import numpy as np
import pytest

from trainable_candle.errors import NonFiniteError
from trainable_candle.lora import Factors, approximate, truncate

RNG = np.random.default_rng(0)


def nearest(matrix: np.ndarray, rank: int) -> np.ndarray:
    """Compute the nearest matrix of a rank by a full singular value decomposition."""
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


def product(factors: Factors) -> np.ndarray:
    return factors.up.astype(np.float64) @ factors.down


def decaying(rows: int, columns: int) -> np.ndarray:
    """Make a matrix whose singular values n^-1.5 decrease like those of a weight's change."""
    u, _ = np.linalg.qr(RNG.standard_normal((rows, rows)))
    v, _ = np.linalg.qr(RNG.standard_normal((columns, columns)))
    size = min(rows, columns)
    return (u[:, :size] / (1 + np.arange(size)) ** 1.5) @ v[:size]


def test_truncated_factors_have_the_nearest_product_and_equal_norms() -> None:
    factors = Factors(RNG.standard_normal((30, 8)), RNG.standard_normal((8, 20)))
    matrix = factors.up @ factors.down
    for rank in (1, 3, 8):
        cut = truncate(factors, rank)
        assert cut.rank == rank
        np.testing.assert_allclose(product(cut), nearest(matrix, rank), atol=2e-6)
    cut = truncate(factors, 3)
    assert np.linalg.norm(cut.up) == pytest.approx(np.linalg.norm(cut.down), rel=1e-5)


def test_the_rank_follows_from_the_kept_share_of_squared_singular_values() -> None:
    down = np.eye(3, 5) * np.array([[3.0], [2.0], [1.0]])
    factors = Factors(np.eye(4, 3), down)
    # The squared singular values are 9, 4 and 1; their sum is 14. The ranks 1, 2 and 3 keep 9/14,
    # 13/14 and 14/14 of it.
    for keep, rank in ((0.6, 1), (0.7, 2), (0.93, 3), (1.0, 3)):
        assert truncate(factors, 3, keep).rank == rank


# `approximate` uses a random matrix if the shorter side is more than four times the rank. The rank
# is 8 here, so the first two shapes use one.
@pytest.mark.parametrize("shape", [(200, 150), (40, 300), (16, 16)])
def test_approximate_finds_nearly_the_nearest_product(shape: tuple[int, int]) -> None:
    matrix = decaying(*shape)
    found = approximate(matrix, 8)
    assert found.rank == 8
    least_error = np.linalg.norm(matrix - nearest(matrix, 8))
    assert np.linalg.norm(matrix - product(found)) <= 1.001 * least_error


def test_non_finite_values_are_an_error() -> None:
    with pytest.raises(NonFiniteError, match="svd: a value is NaN or infinite"):
        approximate(np.full((2, 2), np.nan), 1)
