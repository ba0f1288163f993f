"""Operators on masks, the u8 tensors that comparisons return."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc

X = np.array([-1.0, 0.0, 0.5, 2.0], dtype=np.float32)
OPERATORS = (operator.and_, operator.or_, operator.xor)


@pytest.mark.parametrize("op", OPERATORS)
def test_operators_on_masks_equal_those_of_numpy(op: Callable[[Any, Any], Any]) -> None:
    x = tc.tensor(X)
    np.testing.assert_array_equal(op(x > 0, x < 1).numpy(), op(X > 0, X < 1))
    np.testing.assert_array_equal(op(x > 0, True).numpy(), op(X > 0, True))
    np.testing.assert_array_equal((~(x > 0)).numpy(), ~(X > 0))


@pytest.mark.parametrize("op", OPERATORS)
@pytest.mark.parametrize("values", [[6, 3], [0.5, 0.0]])
def test_operators_on_masks_reject_operands_that_are_no_masks(
    op: Callable[[Any, Any], Any], values: list[float]
) -> None:
    numbers, mask = tc.tensor(values), tc.tensor(values) > 0
    # Of Python's values, only True and False are masks, so 3 is none.
    for left, right in ((numbers, mask), (mask, numbers), (mask, 3)):
        with pytest.raises(tc.DTypeError, match=r"expected a mask .* `x != 0`"):
            op(left, right)
    with pytest.raises(tc.DTypeError, match="invert: found"):
        operator.invert(numbers)
