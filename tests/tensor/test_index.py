"""Indexing, compared with numpy."""

import numpy as np
import pytest

import trainable_candle as tc

VALUES = np.random.default_rng(0).standard_normal((4, 5, 6))
T = tc.tensor(VALUES)
MASK = VALUES[:, 0, 0] > 0


@pytest.mark.parametrize(
    "index",
    [
        0,
        -1,
        slice(None),
        slice(1, 3),
        slice(None, None, 2),
        slice(None, None, -1),
        slice(10, 1, -3),
        slice(3, 1),
        slice(-2, None),
        slice(100, 200),
        ...,
        None,
        (),
        (0, 1, 2),
        (-1, -1, -1),
        (slice(None), 2),
        (..., 2),
        (..., slice(1, None, 2)),
        (None, 0, ..., None),
        (0, ..., 1),
        (slice(1, 2), None, slice(None), 3),
        np.int64(2),
        (slice(None), np.int64(-1)),
        [0, 2, 2],
        np.array([[0, 1], [3, 3]]),
        (slice(None), [4, 0]),
        (..., [-1, 0]),
        [],
        (0, [1, 2]),
        MASK,
        VALUES > 0,
        (slice(None), VALUES[0, :, 0] > 0),
        np.array(2),
    ],
    ids=str,
)
def test_indexing_equals_that_of_numpy(index):
    expected = VALUES[index]
    result = T[index]
    assert result.shape == np.shape(expected)
    np.testing.assert_array_equal(result.numpy(), expected)


def test_an_integer_before_a_tensor_index_selects_first():
    # In VALUES[0, :, [1, 2]], numpy moves the list's dimension to the front. torch and this library
    # leave it last.
    np.testing.assert_array_equal(T[0, :, [1, 2]].numpy(), VALUES[0][:, [1, 2]])


def test_tensors_can_be_indices():
    ids = np.array([[3, 0], [-1, 1]])
    np.testing.assert_array_equal(T[tc.tensor(ids)].numpy(), VALUES[ids])
    np.testing.assert_array_equal(T[tc.tensor([1, 2], dtype="u32")].numpy(), VALUES[[1, 2]])
    np.testing.assert_array_equal(T[T > 0].numpy(), VALUES[VALUES > 0])
    np.testing.assert_array_equal(T[:, tc.tensor([0, 2])].numpy(), VALUES[:, [0, 2]])


@pytest.mark.parametrize("dtype", ["u8", "u32", "i64", "bf16"])
def test_tensors_of_every_dtype_can_be_indexed(dtype):
    values = np.arange(12).reshape(3, 4)
    t = tc.tensor(values, dtype=dtype)
    for index in (1, slice(None, None, -1), [2, 0], (..., [1, 1]), values > 5):
        assert t[index].dtype == dtype
        assert t[index].tolist() == values[index].tolist()


def test_index_select_gather_and_embedding_equal_numpy():
    ids = np.array([2, 0, 2])
    np.testing.assert_array_equal(T.index_select(1, tc.tensor(ids)).numpy(), VALUES[:, ids])
    positions = np.random.default_rng(1).integers(0, 5, (4, 3, 6))
    np.testing.assert_array_equal(
        T.gather(1, tc.tensor(positions)).numpy(), np.take_along_axis(VALUES, positions, 1)
    )
    table = T[0]
    np.testing.assert_array_equal(table.embedding(tc.tensor([[0, 4]])).numpy(), VALUES[0][[[0, 4]]])


def test_gradients_are_added_where_values_were_read():
    for index in (1, slice(None, None, -2), [0, 0, 3], MASK, (..., None, 2), (slice(1, 3), [1, 1])):
        v = tc.Var(VALUES)
        weights = np.random.default_rng(2).standard_normal(VALUES[index].shape)
        (v[index] * tc.tensor(weights)).sum().backward()
        expected = np.zeros_like(VALUES)
        np.add.at(expected, index, weights)
        np.testing.assert_allclose(v.grad.numpy(), expected)


@pytest.mark.parametrize("index", [MASK, MASK.tolist(), [0, 2]], ids=["mask", "list", "positions"])
def test_an_index_in_host_memory_is_copied_to_the_device_of_the_tensor(
    device: str, index: object
) -> None:
    np.testing.assert_array_equal(T.to(device)[index].numpy(), VALUES[index])


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        (4, tc.IndexOutOfRangeError, "index: position 4 is out of range for dimension 0 of size 4"),
        (
            (0, -6),
            tc.IndexOutOfRangeError,
            "index: position -6 is out of range for dimension 1 of size 5",
        ),
        (
            (0, 0, 0, 0),
            tc.IndexOutOfRangeError,
            "index: the index covers 4 dimensions, but the tensor has 3",
        ),
        ((..., ...), tc.IndexOutOfRangeError, "index: found more than one `...`"),
        ("a", tc.IndexOutOfRangeError, "index: cannot index with str"),
        (1.0, tc.IndexOutOfRangeError, "index: cannot index with float"),
        (True, tc.IndexOutOfRangeError, "index: cannot index with bool"),
        (slice(None, None, 0), ValueError, "slice step cannot be zero"),
        (
            [0, 9],
            tc.IndexOutOfRangeError,
            "index: position 9 is out of range for a dimension of size 4",
        ),
        (np.array([0.5]), tc.DTypeError, "index: cannot index with a f64 tensor"),
        (([0], [1]), tc.ArgumentError, "index: found more than one tensor"),
        (np.array([True, False]), tc.IndexOutOfRangeError, "index: the mask has shape"),
    ],
)
def test_wrong_indices_are_errors(index, error, text):
    with pytest.raises(error, match=text):
        _ = T[index]
    assert issubclass(tc.IndexOutOfRangeError, IndexError)


def test_wrong_arguments_of_selections_are_errors():
    with pytest.raises(tc.IndexOutOfRangeError, match="index_select"):
        T.index_select(0, tc.tensor([4]))
    with pytest.raises(tc.DTypeError, match="index_select"):
        T.index_select(0, tc.tensor([0.5]))
    with pytest.raises(tc.IndexOutOfRangeError, match="gather"):
        T.gather(0, tc.tensor(np.full((1, 1, 1), 7)))
    with pytest.raises(tc.IndexOutOfRangeError, match="embedding"):
        T[0].embedding(tc.tensor([5]))
