"""Captured steps equal eager steps bit by bit, even if the state changes between replays.

`tc.cuda.capture` records a step as a CUDA graph at its second call, or at its third if the step
computes gradients of variables outside an adapter. Later calls replay the graph. Eager steps run
without a graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.gpu


class Training:
    """Training of an adapter's factors and a bf16 variable, with eager or captured steps."""

    def __init__(self, base: Path, *, captured: bool) -> None:
        tc.manual_seed(0)
        model = tc.models.DigitsTransformer.from_pretrained(base, device="cuda")
        adapter = model.add_adapter(tc.LoraConfig(r=2, target_modules=["to_q"]))
        self.factors = list(adapter.parameters())
        for factor in self.factors:
            factor.set(tc.randn(factor.shape, device="cuda"))
        self.bf16_var = tc.Var(tc.randn(300, dtype="bf16", device="cuda"))
        groups: list[dict[str, Any]] = [
            {"params": self.factors},
            {"params": [self.bf16_var], "lr": 0.03},
        ]
        self.opt = tc.optim.AdamW(groups, lr=0.01)
        self.ema = tc.optim.EMA(adapter, decay=0.9)
        self.inputs = [tc.randn(300, dtype="bf16", device="cuda") for _ in range(24)]
        self.step = tc.cuda.capture(self.train, [self.inputs[0]]) if captured else self.train
        self.states: dict[str, tc.Tensor] = {}
        self.averages: dict[str, tc.Tensor] = {}

    def train(self, x: tc.Tensor) -> tc.Tensor:
        loss = (self.bf16_var * x).to("f32").sum()
        for factor in self.factors:
            loss = loss + (factor * factor).sum()
        loss.backward()
        norm = tc.optim.clip_grad_norm_([*self.factors, self.bf16_var], 10.0)
        self.opt.step(if_finite=norm)
        self.ema.update()
        self.opt.zero_grad()
        return loss

    def set_bf16_var(self, value: float) -> None:
        self.bf16_var.set(tc.full(300, value, dtype="bf16", device="cuda"))

    def save(self) -> None:
        self.states, self.averages = self.opt.state_dict(), self.ema.state_dict()

    def change_rate(self) -> None:
        self.opt.lr = 0.02

    def swap_averages(self) -> None:
        # The adapter has the averages inside of the block, and its own parameters again after it.
        with self.ema:
            pass

    def step_on_one_factor(self) -> None:
        (self.factors[0] * 3.0).sum().backward()
        self.opt.step()
        self.opt.zero_grad()

    def run(self) -> dict[str, Any]:
        """Take 24 steps; return their losses and the final state (parameters, optimizer, EMA).

        Before nine of the steps, code outside the step writes or reads the state.
        """
        changes: dict[int, Callable[[], None]] = {
            1: lambda: self.set_bf16_var(1.0),
            4: self.save,
            7: lambda: self.opt.load_state_dict(self.states),
            8: self.change_rate,
            10: lambda: self.set_bf16_var(0.3),
            12: lambda: self.ema.load_state_dict(self.averages),
            14: self.swap_averages,
            16: self.step_on_one_factor,
            20: lambda: self.opt.load_state_dict(self.states),
        }
        losses = []
        for call, x in enumerate(self.inputs):
            if call in changes:
                changes[call]()
            losses.append(self.step(x).item())
        if isinstance(self.step, tc.cuda.Captured):
            assert self.step.is_recorded
        state = {f"factor {i}": factor.detach() for i, factor in enumerate(self.factors)}
        state |= {"bf16_var": self.bf16_var.detach().to("f32"), **self.opt.state_dict()}
        state |= {f"ema {name}": tensor for name, tensor in self.ema.state_dict().items()}
        return {"losses": losses, **{n: tensor.to("cpu").numpy() for n, tensor in state.items()}}


def test_captured_steps_with_changes_between_them_have_the_bits_of_eager_steps(
    digits_base: Path,
) -> None:
    expected = Training(digits_base, captured=False).run()
    found = Training(digits_base, captured=True).run()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_only_a_finite_loss_changes_the_parameters() -> None:
    weight = tc.Var(tc.ones(3, device="cuda"))
    opt = tc.optim.SGD([weight], lr=0.5)
    for added, expected in ((float("inf"), 1.0), (float("nan"), 1.0), (0.0, 0.5)):
        loss = weight.sum() + added
        loss.backward()
        # The gradients are finite, whatever the loss. So the step also has to check the loss.
        norm = tc.optim.clip_grad_norm_([weight], 100.0)
        opt.step(if_finite=tc.stack([loss.detach().to("f64"), norm]).sum())
        opt.zero_grad()
        assert weight.to("cpu").tolist() == [expected] * 3
