"""LoRA and DoRA layers against peft's results (`tests/golden/peft/make_peft.py`)."""

import math
from pathlib import Path

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle.nn import functional

GOLDEN = tc.load_file(Path(__file__).parents[1] / "golden" / "peft" / "peft.safetensors")
# (rank, alpha) of the first and of the second layer of each case. In "pattern", peft takes those
# of the second layer from `rank_pattern` and `alpha_pattern`.
SIZES = {
    "lora": [(3, 2), (3, 2)],
    "rslora": [(3, 2), (3, 2)],
    "dora": [(3, 2), (3, 2)],
    "dora_rslora": [(3, 2), (3, 2)],
    "pattern": [(3, 2), (2, 5)],
}
# The names of a layer's parameters, in the order of `get_vars`. LoRA has only the first two.
SUFFIXES = ["lora_A.weight", "lora_B.weight", "lora_magnitude_vector.weight"]


class Adapted:
    """The two layers of a case with tanh between them, with peft's starting values."""

    def __init__(self, case: str) -> None:
        kind = tc.nn.DoRALinear if "dora" in case else tc.nn.LoRALinear
        self.layers = {}
        self.parameters = {}
        for name, (rank, alpha) in zip(("first", "second"), SIZES[case], strict=True):
            layer = kind(
                GOLDEN[f"base.{name}.weight"],
                rank,
                alpha,
                bias=GOLDEN[f"base.{name}.bias"],
                rslora="rslora" in case,
            )
            self.layers[name] = layer
            for suffix, var in zip(SUFFIXES, layer.get_vars(), strict=False):
                var.set(GOLDEN[f"{case}.start.{name}.{suffix}"])
                self.parameters[f"{name}.{suffix}"] = var

    def __call__(self, x: tc.Tensor) -> tc.Tensor:
        return self.layers["second"](self.layers["first"](x).tanh())


@pytest.mark.parametrize("case", SIZES)
def test_results_gradients_and_merged_weights_equal_those_of_peft(case: str) -> None:
    model = Adapted(case)
    x = tc.Var(GOLDEN["x"])
    y = model(x)
    np.testing.assert_allclose(y.numpy(), GOLDEN[f"{case}.output"].numpy(), rtol=1e-5, atol=1e-6)
    loss = functional.mse_loss(y, GOLDEN["target"])
    loss.backward()
    assert math.isclose(loss.item(), GOLDEN[f"{case}.loss"].item(), rel_tol=1e-6)
    found = {f"grad.{name}": var.grad for name, var in model.parameters.items()} | {
        "grad_input": x.grad
    }
    for name, gradient in found.items():
        expected = GOLDEN[f"{case}.{name}"].numpy()
        np.testing.assert_allclose(
            gradient.numpy(), expected, atol=2e-6 * np.abs(expected).max(), rtol=1e-4, err_msg=name
        )
    for name, layer in model.layers.items():
        expected = GOLDEN[f"{case}.merged.{name}"].numpy()
        np.testing.assert_allclose(layer.merge().numpy(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", SIZES)
def test_five_steps_of_adamw_equal_those_of_peft(case: str) -> None:
    model = Adapted(case)
    optimizer = tc.optim.AdamW(list(model.parameters.values()), lr=1e-2, weight_decay=0.01)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = functional.mse_loss(model(GOLDEN["x"]), GOLDEN["target"])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(losses, GOLDEN[f"{case}.losses"].numpy(), rtol=1e-5)
    for name, var in model.parameters.items():
        expected = GOLDEN[f"{case}.final.{name}"].numpy()
        np.testing.assert_allclose(
            var.detach().numpy(), expected, rtol=1e-4, atol=1e-5, err_msg=name
        )
