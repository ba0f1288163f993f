"""Low-rank factors of matrices against full singular value decompositions."""

import numpy as np
import pytest

from trainable_candle.errors import NonFiniteError
from trainable_candle.lora import Factors, approximate, truncate

RNG = np.random.default_rng(0)


def best(matrix: np.ndarray, rank: int) -> np.ndarray:
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return (u[:, :rank] * s[:rank]) @ vt[:rank]


def product(factors: Factors) -> np.ndarray:
    return factors.up.astype(np.float64) @ factors.down


def falling(rows: int, columns: int) -> np.ndarray:
    """A matrix whose singular values decrease like those of the change of a trained weight."""
    u, _ = np.linalg.qr(RNG.standard_normal((rows, rows)))
    v, _ = np.linalg.qr(RNG.standard_normal((columns, columns)))
    size = min(rows, columns)
    return (u[:, :size] / (1 + np.arange(size)) ** 1.5) @ v[:size]


def test_truncated_factors_have_the_nearest_product_of_their_rank() -> None:
    factors = Factors(RNG.standard_normal((30, 8)), RNG.standard_normal((8, 20)))
    whole = factors.up @ factors.down
    for rank in (1, 3, 8):
        cut = truncate(factors, rank)
        assert cut.rank == rank
        np.testing.assert_allclose(product(cut), best(whole, rank), atol=2e-6)
    # Both factors have the same norm.
    cut = truncate(factors, 3)
    assert np.linalg.norm(cut.up) == pytest.approx(np.linalg.norm(cut.down), rel=1e-5)


def test_the_rank_follows_from_the_kept_share_of_squared_singular_values() -> None:
    down = np.eye(3, 5) * np.array([[3.0], [2.0], [1.0]])
    factors = Factors(np.eye(4, 3), down)
    # The squared singular values are 9, 4 and 1. Ranks 1, 2 and 3 keep 9/14, 13/14 and all of their
    # sum.
    for keep, rank in ((0.6, 1), (0.7, 2), (0.93, 3), (1.0, 3)):
        assert truncate(factors, 3, keep).rank == rank


@pytest.mark.parametrize("shape", [(200, 150), (40, 300), (16, 16)])
def test_the_factors_of_a_difference_are_nearly_optimal(shape: tuple[int, int]) -> None:
    matrix = falling(*shape)
    found = approximate(matrix, 8)
    assert found.rank == 8
    least = np.linalg.norm(matrix - best(matrix, 8))
    assert np.linalg.norm(matrix - product(found)) <= 1.001 * least


def test_non_finite_values_are_an_error() -> None:
    with pytest.raises(NonFiniteError, match="svd: a value is NaN or infinite"):
        approximate(np.full((2, 2), np.nan), 1)
