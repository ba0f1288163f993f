"""Captured steps equal eager steps bit by bit, also if the state is changed between replays."""

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
        self.short = tc.Var(tc.randn(300, dtype="bf16", device="cuda"))
        groups: list[dict[str, Any]] = [
            {"params": self.factors},
            {"params": [self.short], "lr": 0.03},
        ]
        self.opt = tc.optim.AdamW(groups, lr=0.01)
        self.ema = tc.optim.EMA(adapter, decay=0.9)
        self.inputs = [tc.randn(300, dtype="bf16", device="cuda") for _ in range(24)]
        self.step = tc.cuda.capture(self.train, [self.inputs[0]]) if captured else self.train
        self.states: dict[str, tc.Tensor] = {}
        self.averages: dict[str, tc.Tensor] = {}

    def train(self, x: tc.Tensor) -> tc.Tensor:
        loss = (self.short * x).to("f32").sum()
        for factor in self.factors:
            loss = loss + (factor * factor).sum()
        loss.backward()
        norm = tc.optim.clip_grad_norm_([*self.factors, self.short], 10.0)
        self.opt.step(if_finite=norm)
        self.ema.update()
        self.opt.zero_grad()
        return loss

    def set(self, value: float) -> None:
        self.short.set(tc.full(300, value, dtype="bf16", device="cuda"))

    def save(self) -> None:
        self.states, self.averages = self.opt.state_dict(), self.ema.state_dict()

    def rate(self) -> None:
        self.opt.lr = 0.02

    def swap(self) -> None:
        with self.ema:
            pass

    def part(self) -> None:
        (self.factors[0] * 3.0).sum().backward()
        self.opt.step()
        self.opt.zero_grad()

    def run(self) -> dict[str, Any]:
        """The losses and the final state (parameters, optimizer, EMA) of 24 steps.

        Before nine of the steps, code outside the step writes or reads the state.
        """
        changes: dict[int, Callable[[], None]] = {
            1: lambda: self.set(1.0),
            4: self.save,
            7: lambda: self.opt.load_state_dict(self.states),
            8: self.rate,
            10: lambda: self.set(0.3),
            12: lambda: self.ema.load_state_dict(self.averages),
            14: self.swap,
            16: self.part,
            20: lambda: self.opt.load_state_dict(self.states),
        }
        losses = []
        for call, x in enumerate(self.inputs):
            if call in changes:
                changes[call]()
            losses.append(self.step(x).item())
        if isinstance(self.step, tc.cuda.Captured):
            assert self.step.is_recorded
        left = {f"factor {i}": factor.detach() for i, factor in enumerate(self.factors)}
        left |= {"short": self.short.detach().to("f32"), **self.opt.state_dict()}
        left |= {f"ema {name}": tensor for name, tensor in self.ema.state_dict().items()}
        return {"losses": losses, **{n: tensor.to("cpu").numpy() for n, tensor in left.items()}}


def test_changes_between_replays_have_the_bits_of_eager_steps(digits_base: Path) -> None:
    expected = Training(digits_base, captured=False).run()
    found = Training(digits_base, captured=True).run()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_an_infinite_loss_leaves_the_parameters_as_they_were() -> None:
    weight = tc.Var(tc.ones(3, device="cuda"))
    opt = tc.optim.SGD([weight], lr=0.5)
    for added, expected in ((float("inf"), 1.0), (float("nan"), 1.0), (0.0, 0.5)):
        loss = weight.sum() + added
        loss.backward()
        norm = tc.optim.clip_grad_norm_([weight], 100.0)
        opt.step(if_finite=tc.stack([loss.detach().to("f64"), norm]).sum())
        opt.zero_grad()
        assert weight.to("cpu").tolist() == [expected] * 3
