"""Reductions and functions along a dimension, compared with numpy."""

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.testing import assert_close

VALUES = np.random.default_rng(0).standard_normal((3, 4, 5))
T = tc.tensor(VALUES)
DIMS = [None, 0, 1, -1, (0, 2), [1, 2], (0, 1, 2)]


def axis(dim):
    """Return the `axis` of numpy, which cannot be a list."""
    return tuple(dim) if isinstance(dim, (list, tuple)) else dim


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min"])
def test_reductions_equal_those_of_numpy(name, dim, keepdim):
    expected = getattr(np, name)(VALUES, axis=axis(dim), keepdims=keepdim)
    assert_close(getattr(T, name)(dim=dim, keepdim=keepdim), expected)


@pytest.mark.parametrize("dim", DIMS)
def test_variance_equals_that_of_numpy(dim):
    assert_close(T.var(dim), np.var(VALUES, axis=axis(dim), ddof=1))
    assert_close(T.var(dim, correction=0), np.var(VALUES, axis=axis(dim)))
    assert_close(T.var(dim, keepdim=True), np.var(VALUES, axis=axis(dim), ddof=1, keepdims=True))


@pytest.mark.parametrize("dim", DIMS)
def test_logsumexp_equals_its_definition(dim):
    assert_close(T.logsumexp(dim), np.log(np.exp(VALUES).sum(axis=axis(dim))))
    # e^1000 is infinite in f64, so a plain sum of exponentials would overflow.
    assert_close((T + 1000).logsumexp(dim), np.log(np.exp(VALUES).sum(axis=axis(dim))) + 1000)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_functions_along_one_dimension_equal_numpy(dim):
    exp = np.exp(VALUES)
    assert_close(T.softmax(dim), exp / exp.sum(axis=dim, keepdims=True))
    assert_close(T.log_softmax(dim=dim), np.log(exp / exp.sum(axis=dim, keepdims=True)))
    assert_close(T.cumsum(dim), np.cumsum(VALUES, axis=dim))
    np.testing.assert_array_equal(T.argmax(dim).numpy(), VALUES.argmax(axis=dim))
    np.testing.assert_array_equal(
        T.argmax(dim, keepdim=True).numpy(), VALUES.argmax(axis=dim, keepdims=True)
    )


def test_argmax_without_dim_is_over_all_elements():
    assert T.argmax().item() == VALUES.argmax()
    assert T.argmax(keepdim=True).shape == (1, 1, 1)


def test_f16_and_bf16_are_summed_in_f32():
    # Both sums are representable. Adding ones in bf16 would stop at 256, in f16 at 2048.
    assert tc.ones(132_096, dtype="bf16").sum().item() == 132_096
    assert tc.ones(40_000, dtype="f16").sum().item() == 40_000


@pytest.mark.parametrize("dtype", ["u8", "u32", "i64"])
def test_sums_of_integers_are_i64(dtype):
    values = np.arange(600).reshape(2, 300) % 200
    t = tc.tensor(values, dtype=dtype)
    assert t.sum().dtype == "i64"
    assert t.sum().item() == values.sum()
    np.testing.assert_array_equal(t.sum(1).numpy(), values.sum(1))
    np.testing.assert_array_equal(t.sum(0, keepdim=True).numpy(), values.sum(0, keepdims=True))
    assert (t > 100).sum().item() == (values > 100).sum()


def test_accuracy_can_be_written_as_in_torch():
    logits, labels = tc.tensor([[1.0, 3.0], [2.0, 1.0], [0.0, 1.0]]), tc.tensor([1, 1, 1])
    assert logits.argmax(1).dtype == "i64"
    assert_close((logits.argmax(1) == labels).float().mean(), 2 / 3)


def test_max_divides_its_gradient_among_equal_maxima_but_with_a_dim_gives_it_to_the_first():
    for reduce, expected in ((lambda x: x.max(), [0, 0.5, 0.5]), (lambda x: x.max(0), [0, 1, 0])):
        x = tc.Var([1.0, 2.0, 2.0])
        reduce(x).backward()
        assert x.grad.tolist() == expected


def test_empty_tensors_can_be_reduced():
    empty = tc.zeros(0, 3)
    assert empty.sum().item() == 0
    assert empty.sum(0).tolist() == [0, 0, 0]
    assert empty.sum(1).shape == (0,)
    assert np.isnan(empty.mean().item())
    assert empty.softmax(-1).shape == (0, 3)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: T.sum(3),
            tc.IndexOutOfRangeError,
            "sum: dimension 3 is out of range; expected -3 to 2",
        ),
        (lambda: T.mean((0, 0)), tc.ArgumentError, "mean: dimension 0 was given twice"),
        (lambda: T.sum((1, -2)), tc.ArgumentError, "sum: dimension -2 was given twice"),
        (lambda: T.softmax(-4), tc.IndexOutOfRangeError, "softmax: dimension -4 is out of range"),
        (lambda: tc.tensor(1.0).softmax(0), tc.IndexOutOfRangeError, "without dimensions has none"),
        (lambda: tc.tensor([1]).mean(), tc.DTypeError, "mean"),
        (lambda: tc.zeros(0).max(), tc.Error, "max"),
        (lambda: tc.zeros(0).argmax(), tc.Error, "argmax"),
    ],
)
def test_wrong_arguments_are_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_abs_neg_max_and_min_take_integers():
    x = np.array([[3, -7, 7], [-9, 0, 5]])
    t = tc.tensor(x)
    assert (t.max().item(), t.min().item()) == (7, -9)
    assert t.max(1).tolist() == x.max(1).tolist()
    assert t.min(0, keepdim=True).tolist() == x.min(0, keepdims=True).tolist()
    assert abs(t).tolist() == np.abs(x).tolist()
    assert (-t).tolist() == (-x).tolist()
    assert tc.tensor([3, 1], dtype="u32").max().dtype == "u32"
    with pytest.raises(tc.DTypeError, match=r"neg: found a u32 tensor.*to\("):
        -tc.tensor([1], dtype="u32")
