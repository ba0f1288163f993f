"""Tensors are made from Python data, numpy arrays, shapes, ranges and random numbers."""

import array

import numpy as np
import pytest

import trainable_candle as tc


@pytest.mark.parametrize(
    ("data", "dtype", "shape"),
    [
        (1, "i64", ()),
        (1.5, "f32", ()),
        (True, "u8", ()),
        ([1, 2, 3], "i64", (3,)),
        ([1, 2.5], "f32", (2,)),
        ([True, False], "u8", (2,)),
        ([np.bool_(True), False], "u8", (2,)),
        ([[1.0, 2.0], [3.0, 4.0]], "f32", (2, 2)),
        (((1, 2), (3, 4), (5, 6)), "i64", (3, 2)),
        ([], "f32", (0,)),
        ([[], []], "f32", (2, 0)),
        (np.float32(2.5), "f32", ()),
        (np.int64(7), "i64", ()),
        ([np.float32(1), np.float32(2)], "f32", (2,)),
        (range(4), "i64", (4,)),
        (array.array("d", [1.0, 2.0]), "f64", (2,)),
        ([np.ones(3), np.zeros(3)], "f64", (2, 3)),
    ],
)
def test_dtype_and_shape_are_inferred(data, dtype, shape):
    t = tc.tensor(data)
    assert t.dtype == dtype
    assert t.shape == shape
    np.testing.assert_array_equal(t.numpy(), np.asarray(data, dtype=t.numpy().dtype))


@pytest.mark.parametrize(
    ("numpy_dtype", "dtype"),
    [
        ("bool", "u8"),
        ("int8", "i64"),
        ("int16", "i64"),
        ("int32", "i64"),
        ("int64", "i64"),
        ("uint8", "u8"),
        ("uint16", "u32"),
        ("uint32", "u32"),
        ("float16", "f16"),
        ("float32", "f32"),
        ("float64", "f64"),
        (">i4", "i64"),
        (">f4", "f32"),
        (">f8", "f64"),
    ],
)
def test_arrays_keep_their_values(numpy_dtype, dtype):
    # The values are 0 and 1, because a bool has no others.
    values = np.random.default_rng(0).integers(0, 2, (3, 4)).astype(numpy_dtype)
    t = tc.tensor(values)
    assert t.dtype == dtype
    np.testing.assert_array_equal(t.numpy(), values)


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.T,
        lambda a: a[::-1],
        lambda a: a[:, ::2],
        lambda a: a[1:3, 1:],
        lambda a: np.broadcast_to(a[0], (5, 6)),
        lambda a: a[0, 0],
        lambda a: a[:0],
        np.asfortranarray,
        lambda a: a.reshape(2, 3, 2, 2).transpose(3, 1, 0, 2),
        lambda a: np.frombuffer(b"x" + a.tobytes(), dtype=np.uint8)[1:].view(a.dtype),
    ],
    ids=[
        "transposed",
        "reversed",
        "every second column",
        "slices",
        "broadcast",
        "one element",
        "empty",
        "Fortran order",
        "permuted",
        "unaligned",
    ],
)
def test_strided_and_unaligned_arrays_keep_their_values(view):
    values = view(np.arange(24.0).reshape(4, 6))
    np.testing.assert_array_equal(tc.tensor(values).numpy(), values)


def test_read_only_arrays_are_read():
    values = np.arange(3.0)
    values.flags.writeable = False
    np.testing.assert_array_equal(tc.tensor(values).numpy(), values)


def test_tensor_copies_its_data():
    values = np.zeros(3, dtype=np.float32)
    t = tc.tensor(values)
    values[0] = 1
    assert t.tolist() == [0, 0, 0]
    v = tc.Var(t)
    copy = tc.tensor(v)
    v.set(tc.ones(3))
    assert copy.tolist() == [0, 0, 0]
    assert not copy.requires_grad


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16", "i64", "u32", "u8"])
def test_data_is_converted_to_the_requested_dtype(dtype):
    for data in ([1, 2, 3], [1.0, 2.0, 3.0], np.array([1, 2, 3]), tc.tensor([1, 2, 3])):
        t = tc.tensor(data, dtype=dtype)
        assert t.dtype == dtype
        assert t.tolist() == [1, 2, 3]


def test_large_integers_are_exact():
    assert tc.tensor([2**62 + 1]).tolist() == [2**62 + 1]
    assert tc.tensor(-(2**63)).item() == -(2**63)


def test_objects_with_the_array_protocol_are_read():
    class Holder:
        def __array__(self, dtype=None, copy=None):
            return np.arange(3.0)

    assert tc.tensor(Holder()).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (
            [[1, 2], [3]],
            tc.ShapeError,
            "ragged: found a sequence of 1 at depth 1, expected a sequence of 2",
        ),
        ([1, [2]], tc.ShapeError, "tensor: nested lists are ragged"),
        ([[1], 2], tc.ShapeError, "tensor: nested lists are ragged: found a number at depth 1"),
        ([[], [1]], tc.ShapeError, "tensor: nested lists are ragged"),
        ([[], 1], tc.ShapeError, "tensor: nested lists are ragged"),
        ("abc", tc.DTypeError, "tensor: cannot make a tensor of str"),
        (["a"], tc.DTypeError, "tensor: cannot make a tensor of str"),
        (None, tc.DTypeError, "tensor: cannot make a tensor of NoneType"),
        ([None], tc.DTypeError, "tensor: cannot make a tensor of NoneType"),
        ({"a": 1}, tc.DTypeError, "tensor: cannot make a tensor of dict"),
        (1j, tc.DTypeError, "complex"),
        (
            np.array([1j]),
            tc.DTypeError,
            "tensor: no tensor dtype can represent an array of dtype complex128",
        ),
        (
            np.array([1], dtype=np.uint64),
            tc.DTypeError,
            "tensor: no tensor dtype can represent an array of dtype uint64",
        ),
        (
            np.array(["a"]),
            tc.DTypeError,
            "tensor: no tensor dtype can represent an array of dtype <U1",
        ),
        (
            np.array([object()]),
            tc.DTypeError,
            "tensor: no tensor dtype can represent an array of dtype object",
        ),
        ([2**64], tc.ArgumentError, "is outside the range of i64"),
        ([np.uint64(2**63)], tc.ArgumentError, "tensor: 9223372036854775808 is outside the range"),
        ([tc.ones(2)], tc.ArgumentError, r"join tensors with stack\(\) or cat\(\)"),
    ],
)
def test_wrong_data_is_an_error(data, error, text):
    with pytest.raises(error, match=text):
        tc.tensor(data)


def test_a_list_that_contains_itself_is_an_error():
    data = []
    data.append(data)
    with pytest.raises(tc.ShapeError, match="nested deeper"):
        tc.tensor(data)


def test_integers_must_fit_their_dtype():
    with pytest.raises(tc.ArgumentError, match="tensor: 256 is outside the range of u8"):
        tc.tensor([1, 256], dtype="u8")
    with pytest.raises(tc.ArgumentError, match="tensor: -1 is outside the range of u32"):
        tc.tensor(-1, dtype="u32")
    # Floats are truncated towards 0 first.
    assert tc.tensor([-0.9, 255.9], dtype="u8").tolist() == [0, 255]
    assert tc.tensor([-(2.0**63)], dtype="i64").tolist() == [-(2**63)]


@pytest.mark.parametrize("dtype", ["u8", "u32", "i64"])
@pytest.mark.parametrize(
    ("number", "text"),
    [(float("nan"), "NaN"), (-float("inf"), "-inf"), (2.0**63, "9.223372036854776e18")],
)
def test_floats_must_fit_an_integer_dtype(number: float, text: str, dtype: str) -> None:
    with pytest.raises(tc.ArgumentError, match=f"tensor: {text} is outside the range of {dtype}"):
        tc.tensor([1.0, number], dtype=dtype)


def test_filled_tensors_have_the_given_shape_number_and_dtype():
    assert tc.zeros(2, 3).shape == (2, 3)
    assert tc.zeros((2, 3)).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert tc.zeros([2]).dtype == "f32"
    assert tc.zeros(()).shape == ()
    assert tc.zeros(0, 3).tolist() == []
    assert tc.ones(2, dtype="bf16").tolist() == [1, 1]
    assert tc.full((2,), 2.5).tolist() == [2.5, 2.5]
    assert tc.full((2,), 7).dtype == "i64"
    assert tc.full(3, 7, dtype="f16").shape == (3,)
    like = tc.ones(2, 3, dtype="f64")
    for make in (tc.zeros_like, tc.ones_like, tc.empty_like):
        assert make(like).shape == (2, 3)
        assert make(like).dtype == "f64"
        assert make(like, dtype="u8").dtype == "u8"
    assert tc.ones_like(like).tolist() == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.parametrize(
    "arguments", [(5,), (0,), (2, 5), (5, 2), (0, 10, 3), (10, 0, -3), (0, 1, 0.3), (0.5, 3)]
)
def test_arange_equals_that_of_numpy(arguments):
    t = tc.arange(*arguments)
    expected = np.arange(*arguments)
    assert t.dtype == ("i64" if expected.dtype.kind == "i" else "f32")
    np.testing.assert_allclose(t.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [
        # Most of these numbers are not exact in f64, and some steps overflow an i64 after the end.
        (2**53 + 1, 2**53 + 4),
        (2**62 + 7, 2**62, -3),
        (2**63 - 3, 2**63 - 1, 2**62),
        (-(2**63), 2**63 - 1, 2**62 + 1),
        (2**63 - 1, -(2**63), -(2**63)),
        (2**53 + 1, 2**53 + 1),
        (2**53 + 4, 2**53 + 1),
    ],
)
def test_arange_of_integers_is_exact(arguments: tuple[int, ...]) -> None:
    assert tc.arange(*arguments).tolist() == list(range(*arguments))


def test_an_arange_that_never_ends_or_exceeds_memory_is_an_error():
    with pytest.raises(tc.ArgumentError, match="arange: from 0 to 3 by 0 is not a finite range"):
        tc.arange(0, 3, 0)
    with pytest.raises(tc.ArgumentError, match="arange: from 1 to 1e300 by 1e-300 is not a"):
        tc.arange(1, 1e300, 1e-300)
    with pytest.raises(tc.ArgumentError, match="arange"):
        tc.arange(float("inf"))
    with pytest.raises(tc.OutOfMemoryError, match="arange"):
        tc.arange(10**15)


@pytest.mark.parametrize("sizes", [(3,), (2, 4), (4, 2), (0,), (1, 1)])
def test_eye_is_the_identity(sizes):
    np.testing.assert_array_equal(tc.eye(*sizes).numpy(), np.eye(*sizes, dtype=np.float32))


def test_random_values_repeat_from_a_state_and_have_their_distributions():
    tc.manual_seed(3)
    state = tc.get_rng_state()
    first = [tc.randn(50_000).numpy(), tc.rand(50_000).numpy(), tc.randint(-3, 4, 1000).numpy()]
    tc.set_rng_state(state)
    second = [tc.randn(50_000).numpy(), tc.rand(50_000).numpy(), tc.randint(-3, 4, 1000).numpy()]
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(a, b)
    normal, uniform, integers = first
    assert abs(normal.mean()) < 0.02
    assert abs(normal.std() - 1) < 0.02
    assert abs(uniform.mean() - 0.5) < 0.01
    assert uniform.min() >= 0
    assert uniform.max() < 1
    assert set(integers) == set(range(-3, 4))
    assert not np.array_equal(normal, tc.randn(50_000).numpy())


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: tc.zeros(10**12), tc.OutOfMemoryError, "zeros: a f32 tensor of shape"),
        (lambda: tc.zeros(2**40, 2**40), tc.OutOfMemoryError, "zeros: .*than can be addressed"),
        (lambda: tc.ones(10**13), tc.OutOfMemoryError, "a f32 tensor of shape"),
        (lambda: tc.randn(10**12), tc.OutOfMemoryError, "randn: a f32 tensor of shape"),
        (lambda: tc.eye(10**7), tc.OutOfMemoryError, "eye: a f32 tensor of shape"),
        (lambda: tc.zeros(-1), tc.ShapeError, "zeros: negative size -1"),
        (
            lambda: tc.zeros(2, dtype="f8"),
            tc.DTypeError,
            'dtype: unknown dtype "f8"; expected one of f32',
        ),
        (lambda: tc.zeros(2, device="tpu"), tc.DeviceError, 'device: unknown device "tpu"'),
        (lambda: tc.zeros(2, device="cuda:x"), tc.DeviceError, "device: unknown device"),
        # These tests run with a build without CUDA; tests/cuda tests builds with CUDA.
        (
            lambda: tc.zeros(2, device="cuda"),
            tc.CudaUnavailableError,
            "this build has no CUDA support",
        ),
        (
            lambda: tc.zeros(2, device="cuda:1"),
            tc.CudaUnavailableError,
            "this build has no CUDA support",
        ),
        (lambda: tc.rand(2, dtype="i64"), tc.DTypeError, "rand: random values are floating point"),
        (lambda: tc.randint(3, 3, 2), tc.ArgumentError, "randint: the range from 3 to 3 is empty"),
    ],
)
def test_wrong_arguments_are_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()
