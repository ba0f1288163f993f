"""Initial values: moments and bounds of random values; identities, constants, orthogonality."""

import math
from collections.abc import Callable

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.nn import init

# The weight of a convolution: (output channels, input channels, kernel height, kernel width).
SHAPE = (128, 64, 3, 3)
FAN_IN, FAN_OUT = 64 * 9, 128 * 9


@pytest.mark.parametrize(
    ("fill", "std", "bound"),
    [
        (lambda v: init.uniform_(v, -2, 2), 2 / math.sqrt(3), 2.0),
        (lambda v: init.normal_(v, 0, 0.5), 0.5, None),
        (
            init.xavier_uniform_,
            math.sqrt(2 / (FAN_IN + FAN_OUT)),
            math.sqrt(6 / (FAN_IN + FAN_OUT)),
        ),
        (lambda v: init.xavier_normal_(v, gain=3), 3 * math.sqrt(2 / (FAN_IN + FAN_OUT)), None),
        # By default: fan_in, and the leaky ReLU of slope 0, whose gain is sqrt(2).
        (init.kaiming_uniform_, math.sqrt(2 / FAN_IN), math.sqrt(6 / FAN_IN)),
        (
            lambda v: init.kaiming_normal_(v, mode="fan_out", nonlinearity="relu"),
            math.sqrt(2 / FAN_OUT),
            None,
        ),
        # By default, the standard deviation is 1 before truncation at -2 and 2, and the variance
        # 0.7737 after it.
        (init.trunc_normal_, math.sqrt(0.7737), 2.0),
    ],
    ids=[
        "uniform",
        "normal",
        "xavier_uniform",
        "xavier_normal",
        "kaiming_uniform",
        "kaiming_normal",
        "trunc_normal",
    ],
)
def test_random_initial_values_have_their_moments(
    fill: Callable[[tc.Var], tc.Var], std: float, bound: float | None
) -> None:
    v = tc.Var(tc.zeros(SHAPE))
    tc.manual_seed(0)
    assert fill(v) is v
    values = v.numpy()
    # At most five standard errors of the mean.
    assert abs(values.mean()) < 5 * std / math.sqrt(values.size)
    assert values.std() == pytest.approx(std, rel=0.01)
    if bound is not None:
        assert np.abs(values).max() <= bound


def test_orthogonal_identity_and_constant_values_are_as_defined() -> None:
    v = tc.Var(tc.zeros(4, 6, dtype="f64"))
    q = init.orthogonal_(v, gain=2.0).numpy()  # four orthogonal rows of length 2
    np.testing.assert_allclose(q @ q.T, 4 * np.eye(4), atol=1e-6)
    assert init.eye_(v).numpy().tolist() == np.eye(4, 6).tolist()
    assert init.constant_(v, 3).dtype == "f64"
    assert v.tolist() == [[3.0] * 6] * 4
    assert float(init.ones_(v).sum()) == 24
    assert float(init.zeros_(v).sum()) == 0


def test_wrong_arguments_are_reported() -> None:
    with pytest.raises(TypeError, match="normal_: found Tensor, expected a Var"):
        init.normal_(tc.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(tc.ShapeError, match=r"xavier_uniform_: the shape is .* two dimensions"):
        init.xavier_uniform_(tc.Var(tc.zeros(2)))
    with pytest.raises(tc.ArgumentError, match="nonlinearity is 'gelu', expected one of"):
        init.calculate_gain("gelu")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda v: init.normal_(v, std=-1.0), "normal_: std is -1.0, expected at least 0"),
        (lambda v: init.trunc_normal_(v, std=0.0), "trunc_normal_: std is 0.0, expected above 0"),
        (lambda v: init.uniform_(v, 1.0, 0.0), "uniform_: a is 1.0 and b is 0.0, expected"),
    ],
    ids=["normal", "trunc_normal", "uniform"],
)
def test_an_impossible_distribution_is_reported_and_changes_no_value(call, message):
    v = tc.Var(tc.zeros(3, 3))
    with pytest.raises(tc.ArgumentError, match=message):
        call(v)
    assert v.tolist() == tc.zeros(3, 3).tolist()


def test_a_uniform_distribution_may_have_one_value() -> None:
    assert init.uniform_(tc.Var(tc.zeros(2)), 0.5, 0.5).tolist() == [0.5, 0.5]
    assert tc.Var(tc.zeros(2)).uniform_(0.5, 0.5).tolist() == [0.5, 0.5]
