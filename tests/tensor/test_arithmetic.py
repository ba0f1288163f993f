"""Operators and elementwise functions, compared with numpy."""

import math
import operator

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.testing import assert_close

ARITHMETIC = [operator.add, operator.sub, operator.mul, operator.truediv, operator.pow]
COMPARISONS = [operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge]
SHAPES = [
    ((3, 4), (3, 4)),
    ((3, 4), (4,)),
    ((3, 1), (1, 4)),
    ((2, 1, 4), (3, 1)),
    ((), (3,)),
    ((), ()),
    ((0, 4), (4,)),
    ((1,), (0,)),
]


def draw(rng, shape, dtype="float64"):
    return rng.uniform(0.5, 2.0, shape).astype(dtype)


@pytest.mark.parametrize("op", ARITHMETIC + COMPARISONS)
@pytest.mark.parametrize("shapes", SHAPES)
def test_two_operands_are_broadcast(op, shapes):
    rng = np.random.default_rng(0)
    # Rounded numbers, so that some operands are equal. Some exponents and divisors are exactly 1.
    a, b = (draw(rng, shape).round(1) for shape in shapes)
    b = np.where(rng.random(b.shape) < 0.3, 1.0, b)
    assert_close(op(tc.tensor(a), tc.tensor(b)), op(a, b))


@pytest.mark.parametrize("op", ARITHMETIC + COMPARISONS)
@pytest.mark.parametrize("number", [2, 0.5, np.float32(1.5), np.int64(3), True])
def test_operators_take_numbers_on_either_side(op, number):
    a = draw(np.random.default_rng(1), (3, 4))
    t = tc.tensor(a)
    assert_close(op(t, number), op(a, float(number)))
    assert_close(op(number, t), op(float(number), a))
    assert op(t, number).dtype == (tc.float64 if op in ARITHMETIC else tc.uint8)


@pytest.mark.parametrize("op", [*ARITHMETIC, operator.lt])
def test_operators_take_arrays_on_either_side(op):
    rng = np.random.default_rng(2)
    a, b = draw(rng, (3, 4)), draw(rng, (4,))
    for result in (op(tc.tensor(a), b), op(a, tc.tensor(b))):
        assert isinstance(result, tc.Tensor)
        assert_close(result, op(a, b))


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_an_operator_with_a_number_keeps_the_dtype(dtype):
    t = tc.ones(2, dtype=dtype)
    for result in (t + 1.5, 2 * t, t / 3, 1 - t, t**2, -t, abs(t), +t):
        assert result.dtype == dtype


def test_division_by_a_number_rounds_once():
    # A product with the rounded reciprocal would round twice.
    a = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    np.testing.assert_array_equal((tc.tensor(a) / 3.0).numpy(), a / np.float32(3))


def test_operators_on_integers_equal_those_of_numpy():
    a, b = np.array([5, -2, 7]), np.array([2, 3, -4])
    for op in (operator.add, operator.sub, operator.mul):
        result = op(tc.tensor(a), tc.tensor(b))
        assert result.dtype == "i64"
        np.testing.assert_array_equal(result.numpy(), op(a, b))
        np.testing.assert_array_equal(op(tc.tensor(a), 2).numpy(), op(a, 2))
        np.testing.assert_array_equal(op(2, tc.tensor(a)).numpy(), op(2, a))
    np.testing.assert_array_equal((tc.tensor(a) == 5).numpy(), a == 5)
    # As in torch, a floating-point number turns integers into f32.
    np.testing.assert_array_equal((tc.tensor(a) + 0.5).numpy(), (a + 0.5).astype(np.float32))


@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((3, 4), (4, 2)),
        ((4,), (4, 2)),
        ((3, 4), (4,)),
        ((4,), (4,)),
        ((2, 3, 4), (4, 5)),
        ((2, 1, 3, 4), (5, 4, 2)),
        ((0, 4), (4, 2)),
        ((3, 0), (0, 2)),
    ],
)
def test_matmul_equals_that_of_numpy(a_shape, b_shape):
    rng = np.random.default_rng(4)
    a, b = rng.standard_normal(a_shape), rng.standard_normal(b_shape)
    assert_close(tc.tensor(a) @ tc.tensor(b), a @ b)
    assert_close(tc.tensor(a).matmul(tc.tensor(b)), a @ b)
    assert_close(a @ tc.tensor(b), a @ b)


@pytest.mark.parametrize(
    "name", ["exp", "log", "sqrt", "abs", "sin", "cos", "tanh", "square", "reciprocal"]
)
@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16"])
def test_functions_equal_those_of_numpy(name, dtype):
    a = np.random.default_rng(5).uniform(0.1, 3.0, (3, 37))
    t = tc.tensor(a, dtype=dtype)
    expected = getattr(np, name)(t.to("f64").numpy())
    assert_close(getattr(t, name)(), expected)


def test_activations_equal_their_formulas():
    a = np.random.default_rng(6).standard_normal((4, 9))
    t = tc.tensor(a)
    sigmoid = 1 / (1 + np.exp(-a))
    assert_close(t.sigmoid(), sigmoid)
    assert_close(t.silu(), a * sigmoid)
    assert_close(t.relu(), np.maximum(a, 0))
    assert_close(t.neg(), -a)
    erf = np.vectorize(math.erf)
    assert_close(t.gelu(), a * 0.5 * (1 + erf(a / np.sqrt(2))))
    tanh_gelu = 0.5 * a * (1 + np.tanh(np.sqrt(2 / np.pi) * (a + 0.044715 * a**3)))
    assert_close(t.gelu("tanh"), tanh_gelu)
    assert_close(t.gelu(approximate="tanh"), tanh_gelu)
    with pytest.raises(
        tc.ArgumentError, match='gelu: approximate is "fast"; expected "none" or "tanh"'
    ):
        t.gelu("fast")


def test_maximum_minimum_and_clamp_equal_those_of_numpy():
    a = np.array([-2.0, 0.0, 1.0, np.nan])
    t = tc.tensor(a)
    assert_close(t.maximum(tc.zeros(4, dtype="f64")), np.maximum(a, 0))
    assert_close(t.minimum(0), np.minimum(a, 0))
    assert_close(t.clamp(-1, 0.5), np.clip(a, -1, 0.5))
    assert_close(t.clamp(min=-1), np.clip(a, -1, None))
    assert_close(t.clamp(max=0), np.clip(a, None, 0))
    with pytest.raises(tc.ArgumentError, match="clamp: found no limits"):
        t.clamp()
    with pytest.raises(
        tc.ArgumentError, match="clamp: the lower limit is 1, expected at most the upper limit 0"
    ):
        t.clamp(1, 0)
    with pytest.raises(tc.ArgumentError, match="clamp: the lower limit is NaN, expected a number"):
        t.clamp(float("nan"), 1)
    with pytest.raises(tc.ArgumentError, match="clamp: the upper limit is NaN, expected a number"):
        t.clamp(max=float("nan"))


def test_where_equals_that_of_numpy():
    rng = np.random.default_rng(7)
    a, b = rng.standard_normal((3, 4)), rng.standard_normal(4)
    mask = a > 0
    condition = tc.tensor(a) > 0
    assert_close(tc.where(condition, tc.tensor(a), tc.tensor(b)), np.where(mask, a, b))
    assert_close(tc.where(condition, tc.tensor(a), 0.0), np.where(mask, a, 0.0))
    assert_close(tc.where(condition, -1, tc.tensor(b)), np.where(mask, -1, b))
    assert_close(tc.where(condition, 1.0, 0.0), np.where(mask, 1.0, 0.0))
    with pytest.raises(tc.DTypeError, match="where: the mask is f64, expected u8"):
        tc.where(tc.tensor(a), tc.tensor(a), 0.0)


def test_augmented_assignment_makes_a_new_tensor():
    t = original = tc.ones(2)
    t += 1
    assert t.tolist() == [2, 2]
    assert original.tolist() == [1, 1]


@pytest.mark.parametrize("op", [operator.add, operator.mul, operator.matmul, operator.lt])
@pytest.mark.parametrize("other", ["a", None, [1.0], object()])
def test_operands_of_other_types_are_errors(op, other):
    with pytest.raises(TypeError):
        op(tc.ones(1), other)
    with pytest.raises(TypeError):
        op(other, tc.ones(1))


def test_equality_with_other_types_is_false():
    assert (tc.ones(1) == "a") is False
    assert (tc.ones(1) != None) is True  # noqa: E711 - the operator is what is tested


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: tc.ones(2) + tc.ones(3),
            tc.ShapeError,
            r"add: shapes \[2\] and \[3\] do not broadcast",
        ),
        (
            lambda: tc.ones(2) + np.ones(2),
            tc.DTypeError,
            r"add: dtypes f32 and f64 differ; convert one with to\(\)",
        ),
        (lambda: tc.ones(2, 3) @ tc.ones(2, 3), tc.ShapeError, "matmul: .*2, 3"),
        (lambda: tc.ones(2) @ 3.0, tc.ShapeError, "matmul: a number is not a matrix"),
        (
            lambda: tc.ones(2, 3) @ tc.ones(3, 2, dtype="f16"),
            tc.DTypeError,
            "matmul: dtypes f32 and f16 differ",
        ),
        (
            lambda: tc.tensor([1, 2]).exp(),
            tc.DTypeError,
            "exp: expected a floating point tensor, found i64",
        ),
        (lambda: pow(tc.ones(1), 2, 3), tc.ArgumentError, "pow: a third argument"),
    ],
)
def test_wrong_operands_are_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()
