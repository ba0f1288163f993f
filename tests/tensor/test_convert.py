"""Tensors become numpy arrays, lists, numbers, text and pickles; dtypes and devices change."""

import copy
import pickle

import numpy as np
import pytest

import trainable_candle as tc


@pytest.mark.parametrize(
    ("dtype", "numpy_dtype"),
    [
        ("f32", "float32"),
        ("f64", "float64"),
        ("f16", "float16"),
        ("u8", "uint8"),
        ("u32", "uint32"),
        ("i64", "int64"),
    ],
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3, 4)])
def test_values_survive_a_round_trip_through_numpy(dtype, numpy_dtype, shape):
    values = (np.arange(np.prod(shape, dtype=int)) % 7).reshape(shape)
    t = tc.tensor(values, dtype=dtype)
    array = t.numpy()
    assert array.shape == shape
    assert array.dtype.name == numpy_dtype
    np.testing.assert_array_equal(array, values)
    assert t.tolist() == values.tolist()


def test_numpy_returns_a_writable_copy():
    t = tc.zeros(3)
    array = t.numpy()
    array[0] = 1
    assert t.tolist() == [0, 0, 0]


def test_numpy_arrays_of_views_have_their_values():
    t = tc.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(t.T.numpy(), np.arange(6).reshape(2, 3).T)
    np.testing.assert_array_equal(t[:, 1].numpy(), [1, 4])
    np.testing.assert_array_equal(tc.ones(1).expand(4).numpy(), np.ones(4))


def test_the_error_for_bf16_says_to_convert_it_first():
    with pytest.raises(
        tc.DTypeError, match=r'numpy: numpy has no bf16; convert with .to\("f32"\) first'
    ):
        tc.ones(2, dtype="bf16").numpy()
    assert tc.ones(2, dtype="bf16").tolist() == [1, 1]


def test_numpy_functions_take_tensors():
    t = tc.tensor([[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(np.asarray(t), [[1, 2], [3, 4]])
    np.testing.assert_array_equal(np.asarray(t, dtype=np.float64), [[1, 2], [3, 4]])
    np.testing.assert_allclose(t, [[1, 2], [3, 4]])
    assert np.sum(np.asarray(t)) == 10
    with pytest.raises(tc.ArgumentError, match="numpy needs a copy"):
        np.asarray(t, copy=False)


def test_a_tensor_of_one_element_is_a_number_or_an_index():
    assert tc.tensor([[2.5]]).item() == 2.5
    assert isinstance(tc.tensor(3).item(), int)
    assert float(tc.tensor(3)) == 3.0
    assert int(tc.tensor(3.7)) == 3
    assert [10, 20, 30][tc.tensor(1)] == 20
    with pytest.raises(tc.ShapeError, match=r"item: shape \[2\] has 2 elements, expected 1"):
        tc.ones(2).item()
    with pytest.raises(tc.DTypeError, match="a f32 tensor is not an index"):
        _ = [1, 2][tc.tensor(1.0)]


def test_the_error_for_a_list_as_operand_says_to_convert_it():
    with pytest.raises(tc.DTypeError, match=r"by a list, convert the list with tensor\(\)"):
        _ = tc.ones(2) * [1.0, 2.0]  # type: ignore[operator]


def test_the_truth_of_a_tensor_is_that_of_its_element():
    assert tc.tensor(1)
    assert not tc.tensor([0.0])
    with pytest.raises(tc.ShapeError, match="the truth of 2 elements"):
        bool(tc.ones(2))


def test_tensors_have_a_length_and_can_be_iterated():
    t = tc.arange(6).reshape(3, 2)
    assert len(t) == 3
    assert [row.tolist() for row in t] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(tc.ShapeError, match="len: a tensor without dimensions"):
        len(tc.tensor(1))
    with pytest.raises(tc.ShapeError, match="iter: a tensor without dimensions"):
        iter(tc.tensor(1))


@pytest.mark.parametrize(
    ("t", "text"),
    [
        (tc.tensor([1.0, 2.5]), "tensor([1. , 2.5], dtype=f32)"),
        (tc.tensor(3), "tensor(3, dtype=i64)"),
        (tc.ones(2, dtype="bf16"), "tensor([1., 1.], dtype=bf16)"),
        (tc.zeros(0, 3), "tensor([], shape=[0, 3], dtype=f32)"),
        (tc.Var([1.0]), "Var([1.], dtype=f32)"),
        (tc.Var([1.0]) * 2, "tensor([2.], dtype=f32, requires_grad=True)"),
    ],
)
def test_repr_shows_values_and_dtype(t, text):
    assert repr(t) == text
    assert str(t) == text


def test_repr_shortens_large_tensors():
    assert len(repr(tc.zeros(100, 1000))) < 1000


def test_numbers_are_formatted_as_in_torch():
    assert f"{tc.tensor(0.125)} {tc.tensor(0.125):.2f} {tc.tensor([3]):04d}" == "0.125 0.12 0003"
    assert f"{tc.tensor([3])}" == repr(tc.tensor([3]))
    with pytest.raises(tc.ShapeError, match="item"):
        f"{tc.zeros(2):.3f}"


def test_equal_tensors_are_different_keys_of_a_dict():
    a, b = tc.ones(1), tc.ones(1)
    assert len({a, b}) == 2
    assert {a: 1}[a] == 1


def test_properties_describe_the_tensor():
    t = tc.zeros(2, 3, dtype="f16")
    assert (t.shape, t.ndim, t.numel(), t.nbytes, t.device) == ((2, 3), 2, 6, 12, "cpu")
    assert not t.requires_grad
    assert t.is_leaf
    assert t.is_contiguous()
    assert not t.T.is_contiguous()
    assert t.T.contiguous().is_contiguous()


def test_tensors_are_immutable():
    with pytest.raises(TypeError, match="a Tensor does not change"):
        tc.zeros(2)[0] = 1
    with pytest.raises(AttributeError):
        tc.zeros(2).shape = (1, 2)


def test_dtypes_equal_their_names():
    assert tc.float32 == "f32" == tc.DType("float32")
    assert tc.zeros(1).dtype == tc.float32
    assert tc.zeros(1).dtype == "float32"
    assert tc.zeros(1).dtype != "f16"
    assert tc.zeros(1).dtype != "nonsense"
    assert tc.zeros(1).dtype != None  # noqa: E711 - compares with an object of another type
    assert {"f32": 1}[tc.float32] == 1
    assert str(tc.bfloat16) == f"{tc.bfloat16}" == "bf16"
    assert repr(tc.bfloat16) == 'DType("bf16")'
    assert (tc.bfloat16.itemsize, tc.bfloat16.is_floating_point) == (2, True)
    assert (tc.int64.itemsize, tc.int64.is_floating_point) == (8, False)
    assert tc.DType(np.float32) == tc.DType(np.dtype("float32")) == tc.float32
    for dtype in (tc.float32, tc.float16, tc.bfloat16, tc.float64, tc.uint8, tc.uint32, tc.int64):
        assert pickle.loads(pickle.dumps(dtype)) == copy.deepcopy(dtype) == dtype
    with pytest.raises(tc.DTypeError, match="dtype: unknown dtype"):
        tc.DType("f31")
    with pytest.raises(tc.DTypeError, match="dtype: unknown dtype"):
        tc.DType(np.complex64)


def test_to_converts_dtype_and_device():
    t = tc.tensor([1.7, 2.3])
    assert t.to("bf16").dtype == t.to(tc.bfloat16).dtype == t.to(dtype="bfloat16").dtype == "bf16"
    assert t.to("cpu").device == t.to(device="cpu").device == "cpu"
    assert t.to("cpu", dtype="f64").dtype == "f64"
    assert t.to("i64").tolist() == [1, 2]
    assert t.to("f16").float().dtype == "f32"
    with pytest.raises(
        tc.CudaUnavailableError, match="CUDA is unavailable: this build has no CUDA support"
    ):
        t.to("cuda")
    with pytest.raises(tc.DTypeError, match="dtype: unknown dtype"):
        t.to("nonsense")
    with pytest.raises(tc.ArgumentError, match="to: found two dtypes or two devices"):
        t.to("f16", dtype="f32")


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64", "u8", "u32", "i64"])
@pytest.mark.parametrize(
    "copy_of",
    [lambda t: pickle.loads(pickle.dumps(t)), copy.deepcopy],
    ids=["pickle", "deepcopy"],
)
def test_pickles_and_copies_have_the_same_values(dtype, copy_of):
    t = tc.tensor([[0, 1, 2], [3, 4, 5]], dtype=dtype).T
    back = copy_of(t)
    assert type(back) is tc.Tensor
    assert (back.dtype, back.shape, back.tolist()) == (t.dtype, t.shape, t.tolist())


def test_a_pickled_variable_has_no_gradient():
    v = tc.Var([1.0, 2.0], dtype="bf16")
    (v * v).sum().backward()
    back = pickle.loads(pickle.dumps(v))
    assert (type(back), back.dtype, back.tolist(), back.grad) == (tc.Var, "bf16", [1, 2], None)
    product = pickle.loads(pickle.dumps(v * 2.0))
    assert (type(product), product.requires_grad) == (tc.Tensor, False)
