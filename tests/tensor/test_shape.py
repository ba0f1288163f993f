"""Views, joins and splits, compared with numpy."""

import numpy as np
import pytest

import trainable_candle as tc

VALUES = np.arange(24.0).reshape(2, 3, 4)
T = tc.tensor(VALUES)


def assert_equal(t, expected):
    assert t.shape == expected.shape
    np.testing.assert_array_equal(t.numpy(), expected)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda t: t.reshape(6, 4), lambda a: a.reshape(6, 4)),
        (lambda t: t.reshape((4, -1)), lambda a: a.reshape(4, -1)),
        (lambda t: t.reshape([-1]), lambda a: a.reshape(-1)),
        (lambda t: t.reshape(-1), lambda a: a.reshape(-1)),
        (lambda t: t.view(1, 24, 1), lambda a: a.reshape(1, 24, 1)),
        (lambda t: t.T.reshape(24), lambda a: a.T.reshape(24)),
        (lambda t: t.flatten(), lambda a: a.reshape(24)),
        (lambda t: t.flatten(1), lambda a: a.reshape(2, 12)),
        (lambda t: t.flatten(0, 1), lambda a: a.reshape(6, 4)),
        (lambda t: t.permute(2, 0, 1), lambda a: a.transpose(2, 0, 1)),
        (lambda t: t.permute((-1, 0, 1)), lambda a: a.transpose(2, 0, 1)),
        (lambda t: t.transpose(0, -1), lambda a: a.swapaxes(0, -1)),
        (lambda t: t.T, lambda a: a.T),
        (lambda t: t.unsqueeze(0), lambda a: a[None]),
        (lambda t: t.unsqueeze(-1), lambda a: a[..., None]),
        (lambda t: t.unsqueeze(1).squeeze(), lambda a: a),
        (lambda t: t.unsqueeze(1).squeeze(1), lambda a: a),
        # As in torch, a dimension of another size than 1 stays.
        (lambda t: t.squeeze(0), lambda a: a),
        (lambda t: t[:1, :1].squeeze((0, 1)), lambda a: a[0, 0]),
        (lambda t: t.broadcast_to(5, 2, 3, 4), lambda a: np.broadcast_to(a, (5, 2, 3, 4))),
        (lambda t: t[:, :1].expand(-1, 7, -1), lambda a: np.broadcast_to(a[:, :1], (2, 7, 4))),
        (lambda t: t[:, :1].expand(9, -1, 7, 4), lambda a: np.broadcast_to(a[:, :1], (9, 2, 7, 4))),
        (lambda t: t.narrow(-1, 1, 2), lambda a: a[..., 1:3]),
        (lambda t: tc.cat([t, t, t[:, :1]], 1), lambda a: np.concatenate([a, a, a[:, :1]], 1)),
        (lambda t: tc.cat((t, t), dim=-1), lambda a: np.concatenate([a, a], -1)),
        (lambda t: tc.stack([t, t], 1), lambda a: np.stack([a, a], 1)),
        (lambda t: tc.stack([t, t], -1), lambda a: np.stack([a, a], -1)),
        (lambda t: t[:0].reshape(0, 5), lambda a: a[:0].reshape(0, 5)),
    ],
)
def test_views_and_joins_equal_those_of_numpy(ours, theirs):
    assert_equal(ours(T), theirs(VALUES))


def test_chunk_and_split_equal_numpy():
    for parts, expected in [
        (T.chunk(2, -1), np.split(VALUES, 2, -1)),
        (T.chunk(2, 1), [VALUES[:, :2], VALUES[:, 2:]]),
        (T.split(3, 2), [VALUES[..., :3], VALUES[..., 3:]]),
        (T.split([1, 0, 2], 1), [VALUES[:, :1], VALUES[:, 1:1], VALUES[:, 1:]]),
        (T.split(5), [VALUES]),
    ]:
        assert len(parts) == len(expected)
        for part, array in zip(parts, expected, strict=True):
            assert_equal(part, array)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: T.reshape(5, 5),
            tc.ShapeError,
            r"reshape: 24 elements of shape \[2, 3, 4\] do not fill shape \[5, 5\]",
        ),
        (lambda: T.reshape(-1, -1), tc.ShapeError, "reshape: only one size can be -1"),
        (
            lambda: T.reshape(-1, 7),
            tc.ShapeError,
            r"reshape: 24 elements do not fill shape \[-1, 7\]",
        ),
        # With a size of 0, no size in place of -1 gives 24 elements.
        (lambda: T.reshape(-1, 0), tc.ShapeError, "reshape"),
        (lambda: T.reshape(-2, 12), tc.ShapeError, "reshape: negative size -2"),
        (lambda: T.reshape("a"), TypeError, "reshape: shape is 'a', expected an integer or a seq"),
        (lambda: T.permute(0, 1), tc.ShapeError, r"permute: \[0, 1\] is not a permutation"),
        (
            lambda: T.permute(0, 1, 3),
            tc.IndexOutOfRangeError,
            "permute: dimension 3 is out of range",
        ),
        (lambda: T.transpose(0, 3), tc.IndexOutOfRangeError, "transpose: dimension 3"),
        (lambda: T.unsqueeze(5), tc.IndexOutOfRangeError, "unsqueeze: dimension 5"),
        (lambda: T.squeeze(3), tc.IndexOutOfRangeError, "squeeze: dimension 3"),
        (
            lambda: T.broadcast_to(2, 3, 5),
            tc.ShapeError,
            r"broadcast_to: shape \[2, 3, 4\] cannot be broadcast to \[2, 3, 5\]",
        ),
        (lambda: T.expand(-1, 2, 3, 4), tc.ShapeError, "expand: negative size -1"),
        (
            lambda: T.narrow(0, 1, 5),
            tc.IndexOutOfRangeError,
            "narrow: range 1..6 is outside dimension 0 of size 2",
        ),
        (lambda: T.flatten(2, 0), tc.ArgumentError, "flatten: start_dim 2 comes after end_dim 0"),
        (lambda: T.chunk(0), tc.ArgumentError, "chunk: the number of chunks must be at least 1"),
        (lambda: T.split(0), tc.ArgumentError, "split: the size of a part must be at least 1"),
        (
            lambda: T.split([1, 3], 1),
            tc.ShapeError,
            "split: lengths .* add up to 4, dimension 1 has size 3",
        ),
        (lambda: tc.cat([]), tc.ArgumentError, "cat: expected at least one tensor"),
        (lambda: tc.stack([]), tc.ArgumentError, "expected at least one tensor"),
        (lambda: tc.cat([T, T[:1]], 1), tc.ShapeError, r"cat: tensor 1 has shape \[1, 3, 4\]"),
        (lambda: tc.cat([T, T.to("f32")]), tc.DTypeError, "cat: tensor 1 is f32, the first is f64"),
        (lambda: tc.stack([T, T[:1]]), tc.ShapeError, "stack: tensor 1 has shape"),
        (lambda: tc.cat([T, 1.0]), TypeError, "Tensor"),
    ],
)
def test_wrong_arguments_are_errors(call, error, text):
    with pytest.raises(error, match=text):
        call()
