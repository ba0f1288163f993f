"""Muon against torch's, and schedule-free AdamW against that of the package schedulefree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import optim
from trainable_candle.testing import assert_close

GOLDEN = Path(__file__).parents[1] / "golden" / "optim"
STEPS = 6

MUON: dict[str, dict[str, Any]] = {
    "muon": {"lr": 0.02, "match_rms_adamw": True},
    "muon_options": {
        "lr": 0.05,
        "weight_decay": 0.3,
        "momentum": 0.8,
        "nesterov": False,
        "ns_coefficients": (2.0, -1.5, 0.5),
        "ns_steps": 7,
    },
}
SCHEDULE_FREE: dict[str, dict[str, Any]] = {
    "schedule_free": {"lr": 0.05},
    "schedule_free_options": {
        "lr": 0.1,
        "betas": (0.8, 0.95),
        "eps": 1e-3,
        "weight_decay": 0.2,
        "warmup_steps": 3,
        "r": 0.5,
        "weight_lr_power": 1.0,
    },
}


@pytest.fixture(scope="module")
def golden() -> dict[str, tc.Tensor]:
    """Return initial values `pN`, gradients `gradN.STEP` and results of `make_averaged.py`.

    The results are `CASE.pN`, the parameters after the last step, and `CASE.evalN`, their averages.
    Parameter 2 is a vector. Parameters 0 and 1 are matrices, and parameter 3 has three dimensions.
    """
    return tc.load_file(GOLDEN / "averaged.safetensors")


def take_steps(
    optimizer: optim.Optimizer, variables: dict[int, tc.Var], golden: dict[str, tc.Tensor]
) -> None:
    """Take a step with each golden gradient. A key of `variables` is the index of a parameter."""
    for step in range(STEPS):
        for i, variable in variables.items():
            variable.grad = golden[f"grad{i}.{step}"].to(variable.dtype)
        optimizer.step()


@pytest.mark.parametrize("case", MUON)
def test_muon_equals_that_of_torch(case: str, golden: dict[str, tc.Tensor]) -> None:
    # Torch's Muon takes no vectors. It got parameter 3 as a matrix, (6, 6).
    variables = {i: tc.Var(golden[f"p{i}"]) for i in (0, 1, 3)}
    take_steps(optim.Muon(variables.values(), **MUON[case]), variables, golden)
    for i, variable in variables.items():
        assert_close(variable.detach(), golden[f"{case}.p{i}"].numpy())


def test_muon_makes_the_update_of_a_matrix_of_any_shape_orthogonal() -> None:
    rng = np.random.default_rng(3)
    for rows, columns in [(3, 40), (40, 3), (17, 33)]:
        x = tc.Var(tc.zeros(rows, columns))
        # With these coefficients, the Newton-Schulz iteration converges to an orthogonal matrix.
        optimizer = optim.Muon(
            [x],
            lr=1.0,
            weight_decay=0.0,
            ns_coefficients=(1.875, -1.25, 0.375),
            ns_steps=30,
        )
        x.grad = tc.tensor(rng.standard_normal((rows, columns)).astype(np.float32))
        optimizer.step()
        # Muon multiplies the update of a matrix with more rows than columns by this root.
        update = -x.detach().numpy() / max(1.0, (rows / columns) ** 0.5)
        singular = np.linalg.svd(update, compute_uv=False)
        np.testing.assert_allclose(singular, 1.0, atol=2e-3)


def test_muon_updates_a_vector_as_adamw_does(golden: dict[str, tc.Tensor]) -> None:
    options = {"lr": 0.02, "weight_decay": 0.1}
    muon, adamw = tc.Var(golden["p2"]), tc.Var(golden["p2"])
    take_steps(optim.Muon([muon], **options), {2: muon}, golden)
    take_steps(optim.AdamW([adamw], **options), {2: adamw}, golden)
    assert_close(muon.detach(), adamw.detach().numpy())


@pytest.mark.parametrize("case", SCHEDULE_FREE)
def test_schedule_free_adamw_equals_that_of_its_authors(
    case: str, golden: dict[str, tc.Tensor]
) -> None:
    variables = {i: tc.Var(golden[f"p{i}"]) for i in range(4)}
    optimizer = optim.AdamWScheduleFree(variables.values(), **SCHEDULE_FREE[case])
    assert optimizer.averages  # `eval` replaces the values of variables by averages
    take_steps(optimizer, variables, golden)
    for i, variable in variables.items():
        assert_close(variable.detach(), golden[f"{case}.p{i}"].numpy())
    optimizer.eval()
    for i, variable in variables.items():
        assert_close(variable.detach(), golden[f"{case}.eval{i}"].numpy())
    optimizer.train()
    for i, variable in variables.items():
        assert_close(variable.detach(), golden[f"{case}.p{i}"].numpy())


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_using_the_averages_between_steps_does_not_change_the_training(
    dtype: str, golden: dict[str, tc.Tensor]
) -> None:
    results = []  # without and with the averages in use between steps
    for uses_averages in (False, True):
        variables = {i: tc.Var(golden[f"p{i}"].to(dtype)) for i in range(4)}
        optimizer = optim.AdamWScheduleFree(variables.values(), lr=0.01)
        for _ in range(3):
            take_steps(optimizer, variables, golden)
            if uses_averages:
                # The second `eval` and the second `train` have no effect.
                optimizer.eval()
                optimizer.eval()
                optimizer.train()
                optimizer.train()
        results.append([variable.detach().to("f32").numpy() for variable in variables.values()])
    for plain, interrupted in zip(*results, strict=True):
        np.testing.assert_array_equal(plain, interrupted)


def test_a_step_and_loading_a_state_are_errors_while_variables_hold_averages(
    golden: dict[str, tc.Tensor],
) -> None:
    x = tc.Var(golden["p2"])
    optimizer = optim.AdamWScheduleFree([x], lr=0.01)
    take_steps(optimizer, {2: x}, golden)
    state = optimizer.state_dict()
    optimizer.eval()
    with pytest.raises(tc.ArgumentError, match=r"step\(\) found the averages .* call train\(\)"):
        optimizer.step()
    with pytest.raises(tc.ArgumentError, match=r"load_state_dict.* call train"):
        optimizer.load_state_dict(state)
    optimizer.train()
    optimizer.load_state_dict(state)


def test_eval_does_not_change_variables_of_other_optimizers(golden: dict[str, tc.Tensor]) -> None:
    x = tc.Var(golden["p2"])
    optimizer = optim.AdamW([x], lr=0.01)
    take_steps(optimizer, {2: x}, golden)
    before = x.detach().numpy()
    assert not optimizer.averages
    optimizer.eval()
    np.testing.assert_array_equal(x.detach().numpy(), before)
    optimizer.train()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (optim.Muon, {"momentum": 1.0}, "momentum 1, expected at least 0 and less than 1"),
        (optim.Muon, {"eps": 0.0}, "eps 0, expected a number above 0"),
        (optim.Muon, {"ns_steps": 100}, "ns_steps 100, expected less than 100"),
        (optim.AdamWScheduleFree, {"betas": (0.0, 0.9)}, r"betas\[0\] 0, expected .* above 0"),
        (optim.AdamWScheduleFree, {"r": -1.0}, "r -1, expected a number of at least 0"),
    ],
)
def test_wrong_numbers_are_reported(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(tc.ArgumentError, match=message):
        kind([tc.Var([1.0])], lr=0.1, **options)
