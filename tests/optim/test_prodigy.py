"""Test Prodigy in f64 against the definition in its paper and against the package prodigyopt."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.optim import Adam, Prodigy

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = Path(__file__).parents[1] / "golden" / "optim" / "prodigyopt.safetensors"


def reference(
    params: list[np.ndarray],
    gradient: Callable[[np.ndarray], np.ndarray],
    steps: int,
    *,
    weight_decay: float = 0.0,
    d_coef: float = 1.0,
    d0: float = 1e-6,
) -> list[float]:
    """Do `steps` steps of Prodigy, algorithm 4 of arXiv:2306.06101, with AdamW's decay.

    Changes the list `params`, and returns d, the estimate of the distance to the solution, after
    each step. `gradient` computes the gradient at a parameter.
    """
    beta1, beta2 = 0.9, 0.999
    beta3 = beta2**0.5
    start = [p.copy() for p in params]
    first, second, sums = ([np.zeros_like(p) for p in params] for _ in range(3))
    d = d0
    r = 0.0
    estimates = []
    for _ in range(steps):
        gradients = [gradient(p) for p in params]
        # The parameters move by the estimate from before the step.
        step_size = d
        r *= beta3
        for i, g in enumerate(gradients):
            r += d / d0 * d * float((g * (start[i] - params[i])).sum())
            first[i] = beta1 * first[i] + (1 - beta1) * d * g
            second[i] = beta2 * second[i] + (1 - beta2) * (d * g) ** 2
            sums[i] = beta3 * sums[i] + d / d0 * d * g
        # The factors 1 - beta3 of r and of the sums in the paper, and 1 / d0 here, cancel.
        d = max(d, d_coef * r / sum(float(np.abs(s).sum()) for s in sums))
        for i, p in enumerate(params):
            # As in prodigyopt, epsilon is multiplied by the new estimate.
            direction = first[i] / (np.sqrt(second[i]) + d * 1e-8)
            params[i] = p - step_size * (weight_decay * p + direction)
        estimates.append(d)
    return estimates


@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.1, "d_coef": 2.0, "d0": 1e-3}], ids=["default", "options"]
)
def test_steps_on_a_quadratic_equal_the_definition(options: dict[str, float]) -> None:
    rng = np.random.default_rng(0)
    params = [rng.standard_normal(shape) for shape in ((5, 3), (7,))]
    variables = [tc.Var(p) for p in params]
    optimizer = Prodigy(variables, **options)
    found = []
    for _ in range(60):
        for variable in variables:
            variable.grad = variable.detach() * 3.0
        optimizer.step()
        # The first number is d.
        found.append(optimizer.state_dict()["estimate"].tolist()[0])
    expected = reference(params, lambda p: 3.0 * p, 60, **options)
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    # The estimate has grown.
    assert expected[-1] > 10 * options.get("d0", 1e-6)
    for variable, p in zip(variables, params, strict=True):
        np.testing.assert_allclose(variable.numpy(), p, rtol=1e-9, atol=1e-12)


# The keys are those of the golden file.
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "decay": {
        "lr": 0.5,
        "betas": (0.8, 0.99),
        "eps": 1e-6,
        "weight_decay": 0.1,
        "use_bias_correction": True,
        "safeguard_warmup": True,
        "d0": 1e-4,
        "d_coef": 8.0,
    },
    "coupled": {
        "betas": (0.0, 0.99),
        "beta3": 0.9,
        "weight_decay": 0.1,
        "decouple": False,
        "d0": 1e-3,
        "d_coef": 2.0,
        "growth_rate": 1.5,
        "slice_p": 3,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_steps_of_two_groups_equal_prodigyopt(case: str) -> None:
    golden = tc.load_file(GOLDEN)
    variables = [tc.Var(golden[f"p{i}"].to("f64")) for i in range(2)]
    groups = [{"params": variables[:1]}, {"params": variables[1:], "weight_decay": 0.0}]
    optimizer = Prodigy(groups, **CASES[case])
    for step in range(12):
        for index, variable in enumerate(variables):
            variable.grad = golden[f"grad{index}.{step}"].to("f64")
        optimizer.step()
    estimate = optimizer.state_dict()["estimate"].tolist()
    # In the state, the estimate of the distance comes first, and the number of steps is at index 3.
    # In the golden file, steps count from 0, so d.11 is the estimate after the last step.
    assert estimate[0] == pytest.approx(golden[f"{case}.f64.d.11"].item(), rel=1e-12)
    assert estimate[3] == 12
    for index, variable in enumerate(variables):
        expected = golden[f"{case}.f64.p{index}"].numpy()
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-12, atol=1e-12)


def test_groups_with_a_learning_rate_of_zero_do_not_change() -> None:
    x, y = tc.Var([1.0]), tc.Var([1.0])
    optimizer = Prodigy([{"params": [x]}, {"params": [y], "lr": 0.0}], d0=0.1)
    for _ in range(3):
        x.grad = y.grad = tc.ones(1)
        optimizer.step()
    assert x.item() < 1.0
    assert y.item() == 1.0


def test_wrong_arguments_groups_and_states_are_rejected() -> None:
    x, y = tc.Var([1.0]), tc.Var([1.0])
    for options, message in (
        ({"lr": -1.0}, "found lr -1"),
        ({"d0": 0.0}, "found d0 0, expected a number above 0"),
        ({"beta3": 1.0}, "found beta3 1, expected a number of at least 0 and less than 1"),
        ({"growth_rate": 0.5}, "found growth_rate 0.5"),
        ({"slice_p": 0}, "found slice_p 0"),
        ({"eps": 0.0}, "found eps 0"),
    ):
        with pytest.raises(tc.ArgumentError, match=f"Prodigy: {message}"):
            Prodigy([x], **options)
    with pytest.raises(tc.ArgumentError, match=r"learning rates 1 and 0\.1, expected the same"):
        Prodigy([{"params": [x]}, {"params": [y], "lr": 0.1}])
    with pytest.raises(tc.ArgumentError, match="group 1 has other hyper-parameters"):
        Prodigy([{"params": [x]}, {"params": [y], "d_coef": 2.0}])
    optimizer = Prodigy([{"params": [x]}, {"params": [y]}])
    optimizer.group_lrs = [1.0, 0.5]
    with pytest.raises(tc.ArgumentError, match="Prodigy: found groups with the learning rates"):
        optimizer.step()
    with pytest.raises(tc.ConfigError, match="were the states saved by Prodigy"):
        optimizer.load_state_dict(Adam([x, y]).state_dict())
