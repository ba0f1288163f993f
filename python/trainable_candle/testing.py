"""Compares tensors in tests."""

from typing import Any

import numpy as np
import numpy.typing as npt

from trainable_candle._core import Tensor

__all__ = ["TOLERANCES", "assert_close"]

TOLERANCES: dict[str, tuple[float, float]] = {
    "f64": (1e-9, 1e-11),
    "f32": (1e-5, 1e-6),
    "f16": (2e-3, 1e-4),
    "bf16": (1.6e-2, 1e-4),
}
"""Relative and absolute tolerance by dtype, for comparison with other implementations."""


def _as_array(value: Any) -> npt.NDArray[Any]:
    """Convert a value to an array; a bf16 tensor becomes f32, because numpy has no bf16."""
    if not isinstance(value, Tensor):
        return np.asarray(value)
    tensor = value.detach()
    return tensor.to("f32").numpy() if tensor.dtype == "bf16" else tensor.numpy()


def assert_close(
    actual: Tensor, expected: Any, *, rtol: float | None = None, atol: float | None = None
) -> None:
    """Assert that a tensor has the shape and, within tolerance, the values of `expected`.

        tc.testing.assert_close(tc.ones(2) * 3, [3.0, 3.0])

    Args:
        actual: The tensor.
        expected: A tensor of the same dtype, an array, a number, or nested lists of numbers.
        rtol: Relative tolerance; by default the first number in `TOLERANCES` for the dtype of
            `actual`, or 0 if `TOLERANCES` lacks the dtype.
        atol: Absolute tolerance; by default the second number there, or 0.

    Raises:
        AssertionError: If the dtypes or shapes differ, or values differ by more than the tolerance.
            The message shows the two dtypes, the two shapes or the largest difference of values.
    """
    if isinstance(expected, Tensor) and actual.dtype != expected.dtype:
        raise AssertionError(f"dtypes differ: {actual.dtype} and {expected.dtype}")
    default_rtol, default_atol = TOLERANCES.get(str(actual.dtype), (0.0, 0.0))
    reference = _as_array(expected)
    if tuple(actual.shape) != reference.shape:
        raise AssertionError(f"shapes differ: {tuple(actual.shape)} and {reference.shape}")
    np.testing.assert_allclose(
        _as_array(actual),
        reference,
        rtol=default_rtol if rtol is None else rtol,
        atol=default_atol if atol is None else atol,
    )
