"""Test the registry of optimizers, and the classes, stubs and document that must agree with it.

Compare the steps of CAME with those of its authors' code.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import optim
from trainable_candle.testing import assert_close

if TYPE_CHECKING:
    from collections.abc import Callable

ALL_KINDS: list[Callable[..., optim.Optimizer]] = list(optim.KINDS.values())
GOLDEN = Path(__file__).parents[1] / "golden" / "optim"


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_each_class_documents_its_hyper_parameters_and_accepts_their_defaults(
    kind: Callable[..., optim.Optimizer],
) -> None:
    signature = inspect.signature(kind)
    defaults = {n: p.default for n, p in signature.parameters.items() if n != "params"}
    assert kind.__doc__ is not None
    assert all(f"{name}: " in kind.__doc__ for name in defaults)
    start = np.linspace(-1, 1, 24).reshape(4, 6)
    results = []
    for given in ({}, defaults):
        x = tc.Var(tc.tensor(start, dtype="f32"))
        optimizer = kind([x], **given)
        x.grad = tc.tensor(start, dtype="f32") * 3.0 + 1.0
        optimizer.step()
        results.append(x.detach().numpy())
        assert repr(optimizer).startswith(f"{kind.__name__}(24 parameters, lr=")
    np.testing.assert_array_equal(results[0], results[1])
    assert not np.array_equal(results[0], start.astype(np.float32))


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_wrong_arguments_are_reported(kind: Callable[..., optim.Optimizer]) -> None:
    x = tc.Var([1.0])
    with pytest.raises(TypeError, match=f"{kind.__name__}: .*'speed'"):
        kind([x], speed=1)
    with pytest.raises(TypeError, match=f"{kind.__name__}: lr is 'fast', expected a number"):
        kind([x], lr="fast")
    with pytest.raises(tc.ArgumentError, match=f"{kind.__name__}: found lr -1"):
        kind([x], lr=-1)


def test_an_unknown_kind_is_an_error() -> None:
    # The message lists the kinds in the order of the registry.
    with pytest.raises(tc.ArgumentError, match='"Ada", expected one of AdamW8bit, '):
        optim.Optimizer("Ada", [tc.Var([1.0])], {})


def test_the_stubs_and_the_list_of_features_name_every_optimizer() -> None:
    root = Path(__file__).parents[2]
    stub = root / "python" / "trainable_candle" / "optim" / "kinds.pyi"
    classes = [n.name for n in ast.parse(stub.read_text()).body if isinstance(n, ast.ClassDef)]
    assert classes == [kind.__name__ for kind in ALL_KINDS]
    # The list names AdamW and says that it has an 8-bit form; it does not name AdamW8bit.
    features = (root / "docs" / "features.md").read_text()
    assert [name for name in classes if name.removesuffix("8bit") not in features] == []


@pytest.mark.parametrize(
    ("case", "options"),
    [
        ("default", {"lr": 0.01}),
        (
            "options",
            {
                "lr": 0.1,
                "eps": (1e-3, 1e-2),
                "clip_threshold": 0.5,
                "betas": (0.8, 0.9, 0.95),
                "weight_decay": 0.1,
            },
        ),
    ],
)
def test_steps_of_came_equal_those_of_its_authors(case: str, options: dict[str, Any]) -> None:
    golden = tc.load_file(GOLDEN / "came.safetensors")
    # `p0` to `p2` are the initial values; `default.p0` and the like are the values after six steps.
    variables = [tc.Var(golden[f"p{i}"]) for i in range(3)]
    optimizer = optim.CAME(variables, **options)
    for step in range(6):
        for i, variable in enumerate(variables):
            variable.grad = golden[f"grad{i}.{step}"]
        optimizer.step()
    for i, variable in enumerate(variables):
        assert_close(variable.detach(), golden[f"{case}.p{i}"].numpy())
