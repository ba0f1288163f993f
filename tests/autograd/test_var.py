"""`Var`: how to make variables, their properties, and how to set their values."""

import numpy as np
import pytest

import trainable_candle as tc


def test_a_variable_is_a_tensor():
    v = tc.Var([1.0, 2.0])
    assert isinstance(v, tc.Tensor)
    assert v.requires_grad
    assert v.is_leaf
    assert not (v * 1).is_leaf
    assert v.grad is None
    assert tc.cat([v, v]).shape == (4,)
    assert tc.stack([v, tc.ones(2)]).shape == (2, 2)
    assert (tc.ones(2) + v).requires_grad
    assert tc.where(v > 1, v, 0.0).tolist() == [0, 2]
    assert tc.zeros_like(v).tolist() == [0, 0]
    assert v[1].item() == 2


@pytest.mark.parametrize(
    "derive",
    [
        lambda t: t,
        lambda t: t.T,
        lambda t: t[1:, ::2],
        lambda t: t[:, 1],
        lambda t: t[:1].expand(5, 4),
        lambda t: t.exp() * 2,
        lambda t: t[:0],
        lambda t: t[0, 0],
    ],
    ids=["variable", "transposed", "strided", "column", "expanded", "computed", "empty", "scalar"],
)
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
def test_a_variable_can_be_made_from_any_tensor_of_floats(derive, dtype):
    source = tc.Var(np.arange(12.0).reshape(3, 4) / 10, dtype=dtype)
    t = derive(source)
    for v in (tc.Var(t), t.make_var()):
        assert v.dtype == dtype
        assert v.shape == t.shape
        assert v.is_leaf
        assert v.is_contiguous()
        np.testing.assert_array_equal(v.to("f64").numpy(), t.to("f64").numpy())
        v.sum().backward()
        assert source.grad is None
        np.testing.assert_array_equal(v.grad.to("f64").numpy(), np.ones(t.shape))


def test_a_variable_has_storage_of_its_own():
    t = tc.zeros(2)
    v, w = tc.Var(t), t.make_var()
    v.set(tc.ones(2))
    assert t.tolist() == w.tolist() == [0, 0]
    assert v.tolist() == [1, 1]
    copy = tc.Var(v)
    v.set(tc.zeros(2))
    assert copy.tolist() == [1, 1]


def test_a_variable_gets_the_given_data_dtype_and_device():
    assert tc.Var(2.0).shape == ()
    assert tc.Var([1, 2], dtype="f32").tolist() == [1, 2]
    assert tc.Var(np.ones(2)).dtype == "f64"
    assert tc.Var(tc.ones(2, dtype="f16")).dtype == "f16"
    assert tc.Var(tc.ones(2), dtype="bf16").dtype == "bf16"
    assert tc.Var([1.0], device="cpu").device == "cpu"
    # The tests run without a GPU, unless they have the marker `gpu`.
    with pytest.raises(tc.CudaUnavailableError):
        tc.Var([1.0], device="cuda")


def test_a_variable_of_integers_or_booleans_is_an_error():
    for wrong in ([1, 2], tc.tensor([1, 2]), np.array([True])):
        with pytest.raises(tc.DTypeError, match="make_var: a variable must be floating point"):
            tc.Var(wrong)
    with pytest.raises(tc.DTypeError, match="make_var"):
        tc.tensor([1]).make_var()


def test_set_replaces_the_values():
    v = tc.Var(np.zeros((2, 3), dtype=np.float32))
    v.set(tc.ones(3, 2).T)
    assert v.tolist() == [[1, 1, 1], [1, 1, 1]]
    v.set(v * 2)
    v.set(v)
    assert v.tolist() == [[2, 2, 2], [2, 2, 2]]


def test_set_rejects_a_value_of_another_shape_or_dtype():
    v = tc.Var(np.zeros((2, 3), dtype=np.float32))
    with pytest.raises(
        tc.ShapeError, match=r"set: the variable has shape \[2, 3\], the value \[3\]"
    ):
        v.set(tc.ones(3))
    with pytest.raises(
        tc.DTypeError, match=r"set: the variable is f32, the value f64; convert it with to\(\)"
    ):
        v.set(tc.ones(2, 3, dtype="f64"))


def test_set_reads_an_overlapping_view_before_it_writes():
    v = tc.Var(np.arange(9.0).reshape(3, 3))
    v.set(v.T)
    np.testing.assert_array_equal(v.numpy(), np.arange(9.0).reshape(3, 3).T)


def test_gradient_descent_reaches_the_minimum():
    x = tc.Var([5.0, -3.0])
    for _ in range(100):
        x.zero_grad()
        (x * x).sum().backward()
        x.set(x.detach() - 0.1 * x.grad)
    assert max(abs(value) for value in x.tolist()) < 1e-6
