"""`VariableEMA`: moving averages of any variables."""

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.optim import VariableEMA


@pytest.mark.parametrize("warmup", [False, True])
def test_averages_equal_the_recursive_definition_and_are_in_use_only_inside_with(
    warmup: bool,
) -> None:
    values = np.random.default_rng(0).standard_normal((6, 3)).astype(np.float32)
    v = tc.Var(tc.tensor(values[0]))
    ema = VariableEMA([v], decay=0.5, warmup=warmup)
    expected = values[0].astype(np.float64)
    for step, value in enumerate(values[1:]):
        v.set(tc.tensor(value))
        ema.update()
        decay = min(0.5, (1 + step) / (10 + step)) if warmup else 0.5
        expected = expected * decay + value * (1 - decay)
    np.testing.assert_allclose(ema.averages[0].numpy(), expected, rtol=1e-5)
    with ema:
        np.testing.assert_allclose(v.numpy(), expected, rtol=1e-5)
        with pytest.raises(tc.ArgumentError, match="leave the `with`"):
            ema.update()
    assert v.tolist() == values[-1].tolist()


def test_the_error_of_ema_without_an_adapter_names_variable_ema() -> None:
    v = tc.Var(tc.zeros(3))
    with pytest.raises(
        TypeError, match=r"found a list, expected the adapter .* optim\.VariableEMA"
    ):
        tc.optim.EMA([v])  # type: ignore[arg-type]


def test_bf16_variables_have_f32_averages_and_only_a_state_that_fits_is_loaded() -> None:
    model = {"a": tc.Var(tc.ones(2, dtype="bf16")), "b": tc.Var(tc.zeros(1))}
    ema = VariableEMA(model, decay=0.999, warmup=False)
    model["a"].set(tc.full((2,), 2.0, dtype="bf16"))
    for _ in range(3):
        ema.update()
    # Three updates, each by a thousandth of the distance to 2, would round to 1 in bf16.
    assert ema.averages[0].tolist() == pytest.approx([2 - 0.999**3] * 2)
    other = VariableEMA(model)
    other.load_state_dict(ema.state_dict())
    assert other.averages[0].tolist() == ema.averages[0].tolist()
    assert other.updates == 3
    with pytest.raises(tc.ShapeError, match=r"0\.average has shape"):
        VariableEMA([tc.Var(tc.ones(3)), model["b"]]).load_state_dict(ema.state_dict())
    # The state has two variables.
    with pytest.raises(tc.ConfigError, match="missing or not expected"):
        VariableEMA([model["b"]]).load_state_dict(ema.state_dict())


def test_wrong_arguments_are_reported() -> None:
    with pytest.raises(TypeError, match="variable 0 is Tensor, expected a Var"):
        VariableEMA([tc.ones(2)])  # type: ignore[list-item]
    with pytest.raises(tc.ArgumentError, match="decay is 1, expected"):
        VariableEMA([tc.Var(tc.ones(2))], decay=1)
    with pytest.raises(tc.ArgumentError, match="at least one variable"):
        VariableEMA([])
