"""The functions of `nn.functional` against numpy, and fused ones against separate operations."""

import math

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.nn import functional as F
from trainable_candle.testing import assert_close

RNG = np.random.default_rng(0)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def normalised(x, axes, eps):
    mean, var = x.mean(axes, keepdims=True), x.var(axes, keepdims=True)
    return (x - mean) / np.sqrt(var + eps)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5), (0, 5)])
def test_linear_equals_numpy(shape):
    x, w, b = RNG.standard_normal(shape), RNG.standard_normal((4, 5)), RNG.standard_normal(4)
    assert_close(F.linear(tc.tensor(x), tc.tensor(w)), x @ w.T)
    assert_close(F.linear(tc.tensor(x), tc.tensor(w), bias=tc.tensor(b)), x @ w.T + b)


def convolved(x, w, b, stride, padding, dilation, groups):
    """Compute a convolution in loops. All shapes are torch's, with the channels first."""
    x = np.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    batch, _, height, width = x.shape
    out, per_group, kh, kw = w.shape
    oh = (height - dilation[0] * (kh - 1) - 1) // stride[0] + 1
    ow = (width - dilation[1] * (kw - 1) - 1) // stride[1] + 1
    y = np.zeros((batch, out, oh, ow))
    for o in range(out):
        channel = o // (out // groups) * per_group  # the first input channel of the group
        for i in range(oh):
            for j in range(ow):
                rows = i * stride[0] + dilation[0] * np.arange(kh)
                columns = j * stride[1] + dilation[1] * np.arange(kw)
                window = x[:, channel : channel + per_group][:, :, rows][:, :, :, columns]
                y[:, o, i, j] = (window * w[o]).sum((1, 2, 3)) + b[o]
    return y


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1},
        {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)},
        {"groups": 2},
        {"groups": 4, "padding": 1},
    ],
)
def test_conv2d_equals_loops(options):
    groups = options.get("groups", 1)
    x, w, b = (
        RNG.standard_normal((2, 4, 7, 6)),
        RNG.standard_normal((8, 4 // groups, 3, 2)),
        RNG.standard_normal(8),
    )
    pairs = {k: v if isinstance(v, tuple) else (v, v) for k, v in options.items() if k != "groups"}
    defaults = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}
    expected = convolved(x, w, b, **{**defaults, **pairs}, groups=groups)
    tx, tw, tb = (tc.tensor(a) for a in (x, w, b))
    assert_close(F.conv2d(tx, tw, tb, **options), expected)
    assert_close(F.conv2d(tx, tw, **options), expected - b[None, :, None, None])
    channels_last = F.conv2d(
        tx.permute(0, 2, 3, 1), tw.permute(0, 2, 3, 1), tb, channels_last=True, **options
    )
    assert_close(channels_last, expected.transpose(0, 2, 3, 1))


def test_layer_norm_and_rms_norm_equal_numpy():
    x, w, b = (
        RNG.standard_normal((2, 3, 4, 6)),
        RNG.standard_normal((4, 6)),
        RNG.standard_normal((4, 6)),
    )
    t = tc.tensor(x)
    assert_close(
        F.layer_norm(t, (4, 6), tc.tensor(w), tc.tensor(b)), normalised(x, (2, 3), 1e-5) * w + b
    )
    assert_close(F.layer_norm(t, 6, eps=1e-3), normalised(x, 3, 1e-3))
    rms = np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    assert_close(F.rms_norm(t, (6,), tc.tensor(w[0])), x / rms * w[0])


def test_add_layer_norm_equals_a_sum_and_a_norm():
    x, residual, w, b = (RNG.standard_normal(shape) for shape in ((2, 3, 6), (2, 3, 6), (6,), (6,)))
    total, normed = F.add_layer_norm(
        tc.tensor(x), tc.tensor(residual), 6, tc.tensor(w), tc.tensor(b), eps=1e-3
    )
    assert_close(total, x + residual)
    assert_close(normed, normalised(x + residual, 2, 1e-3) * w + b)


def test_modulated_layer_norm_equals_numpy():
    x, scale, shift = (RNG.standard_normal(shape) for shape in ((2, 3, 5, 6), (2, 6), (2, 6)))
    y = F.modulated_layer_norm(tc.tensor(x), tc.tensor(scale), tc.tensor(shift))
    expected = normalised(x, 3, 1e-6) * (1 + scale[:, None, None]) + shift[:, None, None]
    assert_close(y, expected)


def test_group_norm_equals_numpy():
    x, w, b = RNG.standard_normal((2, 6, 3, 4)), RNG.standard_normal(6), RNG.standard_normal(6)
    grouped = normalised(x.reshape(2, 3, -1), 2, 1e-5).reshape(x.shape)
    expected = grouped * w[:, None, None] + b[:, None, None]
    t, tw, tb = tc.tensor(x), tc.tensor(w), tc.tensor(b)
    assert_close(F.group_norm(t, 3, tw, tb), expected)
    channels_last = F.group_norm(t.permute(0, 2, 3, 1), 3, tw, tb, channels_last=True)
    assert_close(channels_last, expected.transpose(0, 2, 3, 1))
    flat = RNG.standard_normal((5, 6))
    assert_close(
        F.group_norm(tc.tensor(flat), 2), normalised(flat.reshape(5, 2, 3), 2, 1e-5).reshape(5, 6)
    )


@pytest.mark.parametrize("masking", ["none", "causal", "boolean", "additive"])
def test_attention_equals_numpy(masking):
    q, k, v = (RNG.standard_normal(shape) for shape in ((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)))
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(4)
    options = {}
    if masking == "causal":
        scores = np.where(np.tril(np.ones((5, 7))), scores, -np.inf)
        options = {"is_causal": True}
    elif masking == "boolean":
        mask = RNG.random((5, 7)) < 0.7
        mask[:, 0] = True  # every query sees at least one key
        scores = np.where(mask, scores, -np.inf)
        options = {"attn_mask": tc.tensor(mask)}
    elif masking == "additive":
        mask = RNG.standard_normal((2, 1, 5, 7))
        scores = scores + mask
        options = {"attn_mask": tc.tensor(mask)}
    tensors = [tc.tensor(a) for a in (q, k, v)]
    assert_close(F.scaled_dot_product_attention(*tensors, **options), softmax(scores) @ v)


def test_attention_uses_the_given_scale():
    q, k, v = (RNG.standard_normal((3, 4)) for _ in range(3))
    result = F.scaled_dot_product_attention(tc.tensor(q), tc.tensor(k), tc.tensor(v), scale=0.3)
    assert_close(result, softmax(0.3 * q @ k.T) @ v)


def test_dropout_zeroes_and_scales_elements():
    tc.manual_seed(0)
    x = tc.Var(tc.ones(20_000))
    y = F.dropout(x, 0.25)
    values = y.detach().numpy()
    assert set(np.round(np.unique(values), 5)) == {0, np.float32(np.round(4 / 3, 5))}
    assert abs((values == 0).mean() - 0.25) < 0.02
    y.sum().backward()
    # The inputs are ones, so the gradient has the values of the result.
    np.testing.assert_array_equal(x.grad.numpy(), values)
    np.testing.assert_array_equal(
        F.dropout(x, 0.25, training=False).detach().numpy(), np.ones(20_000)
    )
    np.testing.assert_array_equal(F.dropout(x, 0.0).detach().numpy(), np.ones(20_000))
    with pytest.raises(tc.ArgumentError, match="dropout"):
        F.dropout(x, 1.5)


def test_embedding_equals_numpy():
    table, ids = RNG.standard_normal((7, 3)), np.array([[0, 6, 3], [3, 3, 1]])
    weight = tc.Var(table)
    y = F.embedding(tc.tensor(ids), weight)
    assert_close(y.detach(), table[ids])
    y.sum().backward()
    assert_close(weight.grad, np.bincount(ids.ravel(), minlength=7)[:, None] * np.ones(3))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_equals_numpy(interleaved):
    x, angles = RNG.standard_normal((2, 5, 6)), RNG.standard_normal((5, 3))
    cos, sin = np.cos(angles), np.sin(angles)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :3], x[..., 3:])
    rotated = (a * cos - b * sin, a * sin + b * cos)
    expected = (
        np.stack(rotated, -1).reshape(x.shape) if interleaved else np.concatenate(rotated, -1)
    )
    assert_close(
        F.rope(tc.tensor(x), tc.tensor(cos), tc.tensor(sin), interleaved=interleaved), expected
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_rms_norm_rope_equals_a_norm_and_a_rotation(interleaved):
    x, w, angles = (
        RNG.standard_normal((2, 5, 6)),
        RNG.standard_normal(6),
        RNG.standard_normal((5, 3)),
    )
    cos, sin = np.cos(angles), np.sin(angles)
    normalised_x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3)

    def rotated(x):
        """Rotate pairs of elements: neighbours, or else one from each half."""
        a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :3], x[..., 3:])
        parts = (a * cos - b * sin, a * sin + b * cos)
        return np.stack(parts, -1).reshape(x.shape) if interleaved else np.concatenate(parts, -1)

    tables = tc.tensor(cos), tc.tensor(sin)
    vx, vw = tc.Var(x), tc.Var(w)
    y = F.rms_norm_rope(vx, vw, *tables, interleaved=interleaved, eps=1e-3)
    assert_close(y.detach(), rotated(normalised_x * w))
    without_weight = F.rms_norm_rope(tc.tensor(x), None, *tables, interleaved, 1e-3)
    assert_close(without_weight, rotated(normalised_x))
    # Rotations keep lengths, so the gradient of the sum of squares does not depend on the angles.
    (y * y).sum().backward()
    assert_close(vw.grad, (2 * w * normalised_x**2).sum((0, 1)))
    u = 2 * w**2 * normalised_x  # the gradient of the normalised values
    rstd = normalised_x / x  # the reciprocal of the root mean square
    along_x = normalised_x * (u * normalised_x).mean(-1, keepdims=True)
    assert_close(vx.grad, rstd * (u - along_x))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_regression_losses_equal_numpy(reduction):
    a, b = RNG.standard_normal((3, 4)) * 2, RNG.standard_normal((3, 4))
    d, delta = np.abs(a - b), 0.7
    huber = np.where(d <= delta, 0.5 * d**2, delta * (d - delta / 2))
    reduce = {"mean": np.mean, "sum": np.sum, "none": np.asarray}[reduction]
    ta, tb = tc.tensor(a), tc.tensor(b)
    assert_close(F.mse_loss(ta, tb, reduction), reduce(d**2))
    assert_close(F.l1_loss(ta, tb, reduction=reduction), reduce(d))
    assert_close(F.huber_loss(ta, tb, reduction=reduction, delta=delta), reduce(huber))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_equals_numpy(reduction, smoothing):
    logits, targets = RNG.standard_normal((2, 4, 5)), RNG.integers(0, 5, (2, 4))
    targets[0, 1] = -100  # ignored
    is_counted = targets != -100
    log_p = np.log(softmax(logits))
    picked = np.take_along_axis(log_p, np.where(is_counted, targets, 0)[..., None], -1)[..., 0]
    losses = np.where(is_counted, -(1 - smoothing) * picked - smoothing * log_p.mean(-1), 0)
    mean = losses.sum() / is_counted.sum()
    expected = {"mean": mean, "sum": losses.sum(), "none": losses}[reduction]
    result = F.cross_entropy(
        tc.tensor(logits), tc.tensor(targets), reduction=reduction, label_smoothing=smoothing
    )
    assert_close(result, expected)


def test_smooth_l1_loss_is_the_huber_loss_over_beta_or_the_l1_loss_if_beta_is_zero():
    a, b = (tc.tensor(RNG.standard_normal((3, 4))) for _ in range(2))
    assert_close(F.smooth_l1_loss(a, b, beta=0.3), F.huber_loss(a, b, delta=0.3).numpy() / 0.3)
    assert_close(F.smooth_l1_loss(a, b, "sum", 0), np.abs(a.numpy() - b.numpy()).sum())


def test_gated_units_and_quick_gelu_equal_numpy():
    x = RNG.standard_normal((2, 3, 10))
    h, gate = x[..., :5], x[..., 5:]
    gelu = 0.5 * gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2)))
    assert_close(F.geglu(tc.tensor(x)), h * gelu)
    assert_close(F.swiglu(tc.tensor(x)), h * gate / (1 + np.exp(-gate)))
    assert_close(F.quick_gelu(tc.tensor(x)), x / (1 + np.exp(-1.702 * x)))


def test_group_norm_silu_equals_a_norm_and_an_activation():
    x, w, b = RNG.standard_normal((2, 6, 3, 5)), RNG.standard_normal(6), RNG.standard_normal(6)
    y = F.group_norm(tc.tensor(x), 3, tc.tensor(w), tc.tensor(b)).silu()
    fused = F.group_norm_silu(tc.tensor(x), 3, tc.tensor(w), tc.tensor(b))
    assert_close(fused, y.numpy())
    channels_last = tc.tensor(x.transpose(0, 2, 3, 1))
    fused = F.group_norm_silu(channels_last, 3, tc.tensor(w), tc.tensor(b), channels_last=True)
    assert_close(fused, y.numpy().transpose(0, 2, 3, 1))


def test_upsample_nearest2d_copies_the_elements_that_torch_copies():
    x = RNG.standard_normal((2, 3, 4, 5))
    doubled = x.repeat(2, axis=2).repeat(2, axis=3)
    assert_close(F.upsample_nearest2d(tc.tensor(x), scale_factor=2), doubled)
    assert_close(F.upsample_nearest2d(tc.tensor(x), (8, 10)), doubled)
    channels_last = F.upsample_nearest2d(
        tc.tensor(x.transpose(0, 2, 3, 1)), scale_factor=(2, 2), channels_last=True
    )
    assert_close(channels_last, doubled.transpose(0, 2, 3, 1))
    # The rows and columns that torch's interpolate(..., size=(7, 3), mode="nearest") copies.
    rows, columns = [0, 0, 1, 1, 2, 2, 3], [0, 1, 3]
    assert_close(F.upsample_nearest2d(tc.tensor(x), (7, 3)), x[:, :, rows][..., columns])


def test_activations_equal_the_methods_of_tensors():
    x = tc.tensor(RNG.standard_normal((3, 4)))
    for function, expected in (
        (F.relu, x.relu()),
        (F.gelu, x.gelu()),
        (F.silu, x.silu()),
        (F.sigmoid, x.sigmoid()),
        (F.tanh, x.tanh()),
        (F.softmax, x.softmax(-1)),
        (F.log_softmax, x.log_softmax(-1)),
    ):
        np.testing.assert_array_equal(function(x).numpy(), expected.numpy())


@pytest.mark.parametrize(
    ("call", "error", "text"),
    # `x` is a tensor of the shape (2, 4).
    [
        (
            lambda x: F.layer_norm(x, 5),
            tc.ShapeError,
            r"layer_norm: the input has shape \[2, 4\], which does not end in",
        ),
        (lambda x: F.layer_norm(x, ()), tc.ShapeError, "layer_norm"),
        (lambda x: F.layer_norm(x, 4, tc.ones(3)), tc.ShapeError, "layer_norm"),
        (
            lambda x: F.add_layer_norm(x, tc.ones(4), 4),
            tc.ShapeError,
            r"add_layer_norm: x has shape \[2, 4\], the residual \[4\]",
        ),
        (
            lambda x: F.add_layer_norm(x, tc.ones(2, 4, dtype="f16"), 4),
            tc.DTypeError,
            "add_layer_norm: dtypes f32 and f16 differ",
        ),
        (
            lambda x: F.modulated_layer_norm(x, tc.ones(4), tc.ones(2, 4)),
            tc.ShapeError,
            r"modulated_layer_norm: the scale has shape \[4\], expected \[2, 4\]",
        ),
        (lambda x: F.rms_norm(x, (2, 4)), tc.ArgumentError, "rms_norm: normalized_shape has"),
        (lambda x: F.group_norm(x, 3), tc.Error, "group_norm"),
        (lambda x: F.conv2d(x, x), tc.ShapeError, "conv2d: the input has shape"),
        (lambda _: F.conv2d(tc.ones(1, 1, 2, 2), tc.ones(1, 1, 3, 3)), tc.ShapeError, "conv2d"),
        (
            lambda _: F.conv2d(tc.ones(1, 1, 2, 2), tc.ones(1, 1, 1, 1), stride=0),
            tc.ArgumentError,
            "conv2d",
        ),
        (lambda x: F.scaled_dot_product_attention(x, tc.ones(2, 5), x), tc.ShapeError, "attention"),
        (lambda x: F.mse_loss(x, tc.ones(3)), tc.ShapeError, "mse_loss"),
        (lambda x: F.mse_loss(x, x, "avg"), tc.ArgumentError, 'reduction is "avg"'),
        (lambda x: F.huber_loss(x, x, delta=0), tc.ArgumentError, "huber_loss: delta is 0"),
        (lambda x: F.smooth_l1_loss(x, x, beta=-1), tc.ArgumentError, "smooth_l1_loss: beta is -1"),
        (lambda _: F.geglu(tc.ones(2, 3)), tc.ShapeError, "geglu: the input has shape"),
        (lambda _: F.swiglu(tc.ones(1)), tc.ShapeError, "swiglu: the input has shape"),
        (lambda x: F.group_norm_silu(x, 3), tc.ArgumentError, "group_norm_silu: 4 channels"),
        (lambda x: F.upsample_nearest2d(x, 2), tc.ShapeError, "upsample_nearest2d"),
        (
            lambda _: F.upsample_nearest2d(tc.ones(1, 1, 2, 2)),
            tc.ArgumentError,
            "upsample_nearest2d",
        ),
        (lambda x: F.cross_entropy(x, tc.tensor([0, 9])), tc.IndexOutOfRangeError, "cross_entropy"),
        (lambda x: F.cross_entropy(x, tc.tensor([0.0, 1.0])), tc.DTypeError, "cross_entropy"),
        (
            lambda x: F.rms_norm_rope(x, tc.ones(3), tc.ones(2, 2), tc.ones(2, 2)),
            tc.ShapeError,
            r"rms_norm_rope: the weight has shape \[3\]",
        ),
        (
            lambda x: F.rms_norm_rope(x, None, tc.ones(2, 4), tc.ones(2, 2)),
            tc.ShapeError,
            r"rms_norm_rope: cos has shape \[2, 4\]",
        ),
        (
            lambda x: F.rms_norm_rope(x, tc.ones(4, dtype="f64"), tc.ones(2, 2), tc.ones(2, 2)),
            tc.DTypeError,
            "rms_norm_rope: the weight is f64",
        ),
        (
            lambda x: F.rms_norm_rope(x, None, tc.ones(2, 2), tc.ones(2, 2, dtype="i64")),
            tc.DTypeError,
            "rms_norm_rope: sin is i64",
        ),
        (
            lambda x: F.rms_norm_rope(x, None, tc.Var(tc.ones(2, 2)), tc.ones(2, 2)),
            tc.NoBackwardError,
            "rms_norm_rope",
        ),
        (lambda x: F.embedding(tc.tensor([0.5]), x), tc.DTypeError, "embedding"),
    ],
)
def test_wrong_arguments_are_errors(call, error, text):
    x = tc.ones(2, 4)
    with pytest.raises(error, match=text):
        call(x)


@pytest.mark.parametrize("frozen", ["nothing", "states", "weight"])
def test_linear_cross_entropy_has_the_value_and_gradients_of_separate_operations(
    frozen: str,
) -> None:
    rng = np.random.default_rng(5)
    values = {"states": rng.standard_normal((9, 8)), "weight": rng.standard_normal((30, 8))}
    ids = tc.tensor(rng.integers(0, 30, 9))
    results = []
    for separate in (False, True):
        operands = {
            name: tc.tensor(v) if name == frozen else tc.Var(v) for name, v in values.items()
        }
        states, weight = operands["states"], operands["weight"]
        if separate:
            loss = F.cross_entropy(states @ weight.T, ids, reduction="sum")
        else:
            loss = F.linear_cross_entropy(states, weight, ids)  # the sum over the rows of `states`
        trained = [operand for name, operand in operands.items() if name != frozen]
        results.append([loss.item(), *(gradient.numpy() for gradient in tc.grad(loss, trained))])
    for fused, expected in zip(*results, strict=True):
        np.testing.assert_allclose(fused, expected, rtol=1e-10, atol=1e-12)
