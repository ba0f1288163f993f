"""Functions composed of the core's operations, against numpy and, where it is installed, torch."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.errors import ArgumentError, DTypeError
from trainable_candle.nn import functional as F

RNG = np.random.default_rng(0)
X = RNG.standard_normal((2, 3, 4))
Y = RNG.standard_normal((2, 3, 4))
POINTS = np.array([-2.5, -1.5, -0.5, -1e-6, 0.0, 1e-6, 0.3, 0.5, 1.5, 2.5, 1e9])


def t(array: Any) -> tc.Tensor:
    return tc.tensor(np.asarray(array))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sign", np.sign),
        ("floor", np.floor),
        ("ceil", np.ceil),
        ("round", np.round),
        ("log1p", lambda x: np.log1p(np.abs(x))),
        ("erf", np.vectorize(math.erf)),
        ("isnan", np.isnan),
        ("isfinite", np.isfinite),
    ],
)
def test_elementwise_functions_equal_those_of_numpy(
    name: str, expected: Callable[..., Any]
) -> None:
    x = np.append(POINTS, [np.nan, np.inf]) if name.startswith("is") else POINTS
    given = np.abs(x) if name == "log1p" else x
    found = getattr(t(given), name)().numpy()
    np.testing.assert_allclose(found, expected(x), rtol=1e-12, atol=2e-15)


@pytest.mark.parametrize(("dtype", "bits"), [("f32", 23), ("f64", 52)])
def test_rounding_is_exact_up_to_the_largest_halves(dtype: str, bits: int) -> None:
    kind = {"f32": np.float32, "f64": np.float64}[dtype]
    # From 2^(bits - 1) to 2^bits, neighbouring numbers differ by 1/2. Above, all are integers.
    halves = 2.0 ** (bits - 1) + np.array([0.5, 1.0, 1.5])
    # The number just below 0.5 must round to 0, but plus 0.5 it is 1 in floating point.
    x = np.concatenate([halves, -halves, [np.nextafter(kind(0.5), kind(0)), 2.0**bits + 1]])
    x = x.astype(kind)
    for name in ("floor", "ceil", "round"):
        np.testing.assert_array_equal(getattr(t(x), name)().numpy(), getattr(np, name)(x))


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (lambda x: x.norm(), np.linalg.norm(X)),
        (lambda x: x.norm(1, 1), np.abs(X).sum(1)),
        (lambda x: x.norm(math.inf, -1, keepdim=True), np.abs(X).max(-1, keepdims=True)),
        (lambda x: x.std(), X.std(ddof=1)),
        (lambda x: x.prod(), X.prod()),
        (lambda x: x.prod(1, keepdim=True), X.prod(1, keepdims=True)),
        (lambda x: x.argmin(1), X.argmin(1)),
        (lambda x: x.sort(1).values, np.sort(X, 1)),
        (lambda x: x.argsort(-1, descending=True), np.argsort(-X, -1)),
        (lambda x: x.topk(2, 1).values, -np.sort(-X, 1)[:, :2]),
        (lambda x: x.topk(2, largest=False).indices, np.argsort(X, -1)[..., :2]),
        (lambda x: x.repeat(2, 1, 1, 3), np.tile(X, (2, 1, 1, 3))),
        (lambda x: x.tile(2), np.tile(X, 2)),
        (lambda x: x.repeat_interleave(3, 1), np.repeat(X, 3, 1)),
        (lambda x: x.flip(0, 2), np.flip(X, (0, 2))),
        (lambda x: x.roll(-1, 1), np.roll(X, -1, 1)),
        (lambda x: x.roll(5), np.roll(X, 5)),
        (lambda x: x.tril(-1), np.tril(X, -1)),
        (lambda x: x.triu(1), np.triu(X, 1)),
        (lambda x: x.mT, X.swapaxes(-1, -2)),
        (lambda x: (x > 0) & (x < 1), (X > 0) & (X < 1)),
        (lambda x: (x > 0) | ~(x < 1), (X > 0) | ~(X < 1)),
        (lambda x: (x > 0).any(1), (X > 0).any(1)),
        (lambda x: (x > -1).all((0, 2)), (X > -1).all((0, 2))),
        (lambda x: x // 0.7, X // 0.7),
        (lambda x: x % 0.7, X % 0.7),
        (lambda x: x.masked_fill(x > 0, 2.0), np.where(X > 0, 2, X)),
        (lambda x: tc.einsum("bij,bkj->bik", x, t(Y)), np.einsum("bij,bkj->bik", X, Y)),
        (lambda x: tc.einsum("abc->ca", x), np.einsum("abc->ca", X)),
        (lambda x: tc.einsum("abc,abc", x, t(Y)), np.einsum("abc,abc", X, Y)),
        # Three operands; one of them is zero, so that the result is known.
        (
            lambda x: tc.einsum("abc,dc,db->ad", x, t(Y[0]), t(np.zeros((3, 3)))),
            np.zeros((2, 3)),
        ),
        (
            lambda x: F.pad(x, (1, 2, -1, 0), value=3),
            np.pad(X[:, 1:], [(0, 0), (0, 0), (1, 2)], constant_values=3),
        ),
        (lambda _: F.one_hot(tc.tensor([2, 0])), np.eye(3)[[2, 0]]),
        (F.normalize, X / np.linalg.norm(X, axis=1, keepdims=True)),
        (F.softplus, np.log1p(np.exp(X))),
        (F.elu, np.where(X > 0, X, np.expm1(X))),
        (lambda x: F.leaky_relu(x, 0.1), np.where(X > 0, X, 0.1 * X)),
    ],
)
def test_results_equal_those_of_numpy(
    found: Callable[[tc.Tensor], tc.Tensor], expected: Any
) -> None:
    np.testing.assert_allclose(found(t(X)).numpy(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.norm(),
        lambda x: x.prod(1),
        lambda x: x.erf(),
        lambda x: (x * x).log1p(),
        lambda x: x.sort(1).values,
        lambda x: x.tril(),
        lambda x: x.flip(1).roll(1, 0),
        lambda x: x.scatter(1, t(np.zeros((2, 1, 4), np.int64)), x * 2),
        lambda x: tc.einsum("bij,bkj->bik", x, x * x),
        lambda x: F.pad(x, (1, -1)),
        lambda x: F.max_pool2d(x, 2, 1),
        lambda x: F.cosine_similarity(x, x * x),
        lambda x: F.binary_cross_entropy_with_logits(x, t(Y).sigmoid()),
    ],
)
def test_gradients_are_those_of_finite_differences(function: Callable[..., tc.Tensor]) -> None:
    tc.gradcheck(function, [t(X)])


def test_functional_equals_that_of_torch() -> None:
    torch = pytest.importorskip("torch")
    f = torch.nn.functional
    image, kernel = RNG.standard_normal((2, 3, 7, 6)), RNG.standard_normal((4, 3, 3))
    probabilities = RNG.dirichlet(np.ones(4), (2, 3))

    def check(ours: tc.Tensor, theirs: Any) -> None:
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-6, atol=1e-7)

    # Of each pair of inputs, the first is this library's tensor and the second is torch's.
    a, b = t(image), torch.from_numpy(image)
    for pool in ("max_pool2d", "avg_pool2d"):
        # Kernel size 3, stride 2, padding 1; then only a kernel size.
        check(getattr(F, pool)(a, 3, 2, 1), getattr(f, pool)(b, 3, 2, 1))
        check(getattr(F, pool)(a, (2, 3)), getattr(f, pool)(b, (2, 3)))
    check(F.interpolate(a, (10, 3)), f.interpolate(b, (10, 3)))
    check(F.interpolate(a, scale_factor=2.0), f.interpolate(b, scale_factor=2.0))
    x, y = t(image[:, :, 0]), torch.from_numpy(image[:, :, 0])
    check(
        F.conv1d(x, t(kernel), stride=2, padding=1),
        f.conv1d(y, torch.from_numpy(kernel), stride=2, padding=1),
    )
    p, q = t(probabilities), torch.from_numpy(probabilities)
    for reduction in ("batchmean", "sum", "none"):
        check(F.kl_div(t(X), p, reduction), f.kl_div(torch.from_numpy(X), q, reduction=reduction))
    check(
        F.binary_cross_entropy_with_logits(t(X * 100), p),
        f.binary_cross_entropy_with_logits(torch.from_numpy(X * 100), q),
    )


def test_variables_change_in_place() -> None:
    v = tc.Var(tc.zeros(2, 3))
    v[0, 1] = 5
    v[:, 2] = tc.tensor([7.0, 8.0])
    v[v > 7] = -1
    assert v.tolist() == [[0, 5, 7], [0, 0, -1]]
    v.add_(1.0).mul_(2).sub_(v, alpha=0.5)
    assert v.tolist() == [[1, 6, 8], [1, 1, 0]]
    v.fill_(3)
    v.copy_(v.data * 2)
    assert v.tolist() == [[6] * 3] * 2
    v.zero_()
    assert not bool(v.any())


def test_random_numbers_follow_the_seed() -> None:
    weights = tc.tensor([[0.0, 1.0, 3.0], [5.0, 0.0, 0.0]])
    tc.manual_seed(1)
    first = (tc.randperm(20).tolist(), tc.multinomial(weights, 4000, replacement=True).numpy())
    tc.manual_seed(1)
    assert tc.randperm(20).tolist() == first[0]
    assert sorted(first[0]) == list(range(20))
    assert (first[1][1] == 0).all()
    # The row's weights are 0, 1 and 3.
    assert (first[1][0] == 2).mean() == pytest.approx(0.75, abs=0.03)
    assert sorted(tc.multinomial(weights[0], 2).tolist()) == [1, 2]
    with pytest.raises(ArgumentError, match="fewer than 2 weights of a row are above 0"):
        tc.multinomial(weights, 2)
    assert abs(float(tc.normal(3.0, 2.0, (4000,)).mean()) - 3) < 0.15
    assert tc.linspace(0, 1, 5).tolist() == [0, 0.25, 0.5, 0.75, 1]


@pytest.mark.parametrize(
    ("equation", "message"),
    [("ii->i", "a label twice"), ("ab", "does not fit the shape"), ("a,b", "has 2 operands")],
)
def test_equations_that_do_not_fit_are_reported(equation: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        tc.einsum(equation, t(X) if equation == "ab" else t(np.ones((3, 3))))


@pytest.mark.parametrize("dtype", ["u8", "u32", "i64"])
def test_one_hot_finds_the_number_of_classes(dtype: str) -> None:
    assert F.one_hot(tc.tensor([1, 0], dtype=dtype)).tolist() == [[0, 1], [1, 0]]


def test_classes_of_one_hot_are_integers() -> None:
    with pytest.raises(DTypeError, match=r"one_hot: the dtype is f32, expected .* `.to\("):
        F.one_hot(tc.tensor([0.0, 1.7]), 2)


@pytest.mark.parametrize("p", [0.5, 1, 2, 3, math.inf])
def test_the_derivative_of_a_norm_is_0_where_torch_has_0(p: float) -> None:
    zeros = tc.Var(np.zeros((2, 3)))
    zeros.norm(p, 1).sum().backward()
    assert zeros.grad.tolist() == [[0.0] * 3] * 2
    # One element of the vector is not 0: its derivative is 1.
    one = tc.Var([0.0, 2.0])
    one.norm(p).backward()
    assert one.grad.tolist() == pytest.approx([0.0, 1.0])


def test_the_smallest_of_large_integers_is_found() -> None:
    # The two integers of each row are equal after a conversion to f64.
    x = tc.tensor(np.array([[2**53 + 1, 2**53], [-(2**62), -(2**62) - 1]]))
    assert x.argmin(1).tolist() == [1, 1]
    assert x.argmin(0, keepdim=True).tolist() == [[1, 1]]
    assert x.argmin(keepdim=True).tolist() == [[3]]
    assert (x.argmin().item(), x.argmin().dtype) == (3, "i64")
    with pytest.raises(tc.IndexOutOfRangeError):
        x.argmin(2)


def test_an_empty_index_scatters_nothing() -> None:
    x = tc.Var([1.0, 2.0])
    index = tc.zeros((0,), dtype="i64")
    for source in (tc.zeros((3,)), 5.0):
        assert x.scatter(0, index, source).tolist() == [1.0, 2.0]


def test_errors_about_dimensions_name_the_method() -> None:
    for name in ("sort", "argsort"):
        with pytest.raises(ArgumentError, match=f"^{name}: dimension 2 is out of range"):
            getattr(tc.zeros((2,)), name)(2)
