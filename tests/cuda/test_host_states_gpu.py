"""On a GPU, optimizer steps compute the same bits with states in host memory as in GPU memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trainable_candle as tc

from .test_host_states import MORE

pytestmark = pytest.mark.gpu

ROUNDED = ["adamw8bit", "adam8bit", "adamw", "adam", "lion8bit", "lion", "sgd"]
"""The optimizers that can round bf16 variables stochastically."""
CASES = [(kind, dtype) for kind in tc.optim.KINDS for dtype in ("f32", "bf16")]
CASES += [(kind, "rounded") for kind in ROUNDED]


class Run:
    """Trains a LoRA layer. `states` says where the optimizer's states are: "device" or "host"."""

    def __init__(self, kind: str, dtype: str, states: str, *, captured: bool) -> None:
        rng = np.random.default_rng(0)
        shapes = [(8, 700), (300, 8), (520,)]
        starts = [rng.standard_normal(shape) / 8 for shape in shapes]
        stored = "f32" if dtype == "f32" else "bf16"
        self.vars = [tc.Var(tc.tensor(s, dtype=stored, device="cuda")) for s in starts]
        rounding = {"stochastic_rounding": True} if dtype == "rounded" else {}
        tc.manual_seed(5)
        self.optimizer = tc.optim.KINDS[kind](
            self.vars, lr=0.01, states=states, **rounding, **MORE.get(kind, {})
        )
        batches = [tc.tensor(rng.standard_normal((40, 700)), dtype=stored) for _ in range(8)]
        self.batches = [batch.to("cuda") for batch in batches]
        self.step: Any = tc.cuda.capture(self.train, [self.batches[0]]) if captured else self.train

    def train(self, x: tc.Tensor) -> tc.Tensor:
        down, up, scale = self.vars
        hidden = (x @ down.transpose(0, 1)) @ up.transpose(0, 1)
        loss = (hidden.to("f32") ** 2).mean() + (scale.to("f32") ** 2).mean()
        loss.backward()
        self.optimizer.step(if_finite=tc.optim.clip_grad_norm_(self.vars, 0.5))
        self.optimizer.zero_grad()
        return loss

    def take(self, first: int, last: int) -> None:
        for number in range(first, last):
            self.optimizer.lr = 0.01 / (number + 1)
            self.step(self.batches[number])

    def values(self) -> dict[str, np.ndarray]:
        found = {f"var {i}": var.detach() for i, var in enumerate(self.vars)}
        found |= self.optimizer.state_dict()
        bits = {"f32": np.uint32, "f64": np.uint64}
        return {
            name: value.to("cpu").to("f32").numpy().view(np.uint32)
            if str(value.dtype) == "bf16"
            else value.to("cpu").numpy().view(bits.get(str(value.dtype)))
            if str(value.dtype) in bits
            else value.to("cpu").numpy()
            for name, value in found.items()
        }


def same(found: Run, expected: Run) -> None:
    ours, theirs = found.values(), expected.values()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value, err_msg=name)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_states_on_the_host_have_the_bits_of_those_on_the_gpu(
    kind: str, dtype: str, *, captured: bool
) -> None:
    expected = Run(kind, dtype, "device", captured=False)
    found = Run(kind, dtype, "host", captured=captured)
    for run in (expected, found):
        run.take(0, 5)
    same(found, expected)
    # Each run loads the other's states and continues. A captured step must use the loaded states.
    saved = expected.optimizer.state_dict(), found.optimizer.state_dict()
    expected.optimizer.load_state_dict(saved[1])
    found.optimizer.load_state_dict(saved[0])
    for run in (expected, found):
        run.take(5, 8)
    same(found, expected)


def test_averages_with_states_on_the_host_have_the_bits_of_those_on_the_gpu() -> None:
    runs = [Run("adamwschedulefree", "f32", place, captured=False) for place in ("device", "host")]
    for run in runs:
        run.take(0, 4)
        run.optimizer.eval()
    same(*runs)
    for run in runs:
        run.optimizer.train()
        run.take(4, 6)
    same(*runs)


def test_gpu_memory_has_no_states() -> None:
    held = []
    for place in ("device", "host"):
        var = tc.Var(tc.zeros(1 << 22, device="cuda"))
        var.grad = tc.ones(1 << 22, device="cuda")
        tc.cuda.synchronize()
        before = tc.cuda.memory_stats()["allocated"]
        optimizer = tc.optim.AdamW([var], lr=0.1, states=place)
        optimizer.step()
        held.append(tc.cuda.memory_stats()["allocated"] - before)
        assert optimizer.state_bytes == 8 << 22
        del optimizer, var
    assert held[0] - held[1] >= 8 << 22
    assert held[1] < 1 << 20
