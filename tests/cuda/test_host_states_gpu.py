"""On a GPU, optimizer steps compute the same bits with states in host memory as in GPU memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trainable_candle as tc

# With these arguments, every optimizer has states, and 8-bit optimizers store all states as codes.
from .test_host_states import EXTRA_ARGUMENTS

pytestmark = pytest.mark.gpu

ROUNDED = ["adamw8bit", "adam8bit", "adamw", "adam", "lion8bit", "lion", "sgd"]
"""The optimizers that can round bf16 variables stochastically."""
CASES = [(kind, storage) for kind in tc.optim.KINDS for storage in ("f32", "bf16")]
CASES += [(kind, "rounded") for kind in ROUNDED]


class Run:
    """Trains two LoRA factors and a vector.

    `kind` names the optimizer. `storage` is the dtype of the variables; "rounded" is bf16 with
    stochastic rounding. `states` says where the optimizer's states are: "device" or "host". If
    `captured`, the steps run as a CUDA graph. All runs of a kind and a storage start with the same
    variables and random numbers.
    """

    def __init__(self, kind: str, storage: str, states: str, *, captured: bool) -> None:
        rng = np.random.default_rng(0)
        shapes = [(8, 700), (300, 8), (520,)]
        starts = [rng.standard_normal(shape) / 8 for shape in shapes]
        dtype = "f32" if storage == "f32" else "bf16"
        self.vars = [tc.Var(tc.tensor(s, dtype=dtype, device="cuda")) for s in starts]
        rounding = {"stochastic_rounding": True} if storage == "rounded" else {}
        tc.manual_seed(5)  # the optimizer rounds with the seed that it finds when it is made
        self.optimizer = tc.optim.KINDS[kind](
            self.vars, lr=0.01, states=states, **rounding, **EXTRA_ARGUMENTS.get(kind, {})
        )
        batches = [tc.tensor(rng.standard_normal((40, 700)), dtype=dtype) for _ in range(8)]
        self.batches = [batch.to("cuda") for batch in batches]
        self.step: Any = tc.cuda.capture(self.train, [self.batches[0]]) if captured else self.train

    def train(self, x: tc.Tensor) -> tc.Tensor:
        down, up, scale = self.vars
        hidden = (x @ down.transpose(0, 1)) @ up.transpose(0, 1)
        loss = (hidden.to("f32") ** 2).mean() + (scale.to("f32") ** 2).mean()
        loss.backward()
        # Clips the gradients' norm to 0.5; takes the step only if the norm is finite.
        self.optimizer.step(if_finite=tc.optim.clip_grad_norm_(self.vars, 0.5))
        self.optimizer.zero_grad()
        return loss

    def take_steps(self, start: int, stop: int) -> None:
        for number in range(start, stop):
            self.optimizer.lr = 0.01 / (number + 1)
            self.step(self.batches[number])

    def bits(self) -> dict[str, np.ndarray]:
        """The bits of the variables and of the optimizer's states."""
        tensors = {f"var {i}": var.detach() for i, var in enumerate(self.vars)}
        tensors |= self.optimizer.state_dict()
        return {name: bits_of(tensor) for name, tensor in tensors.items()}


def bits_of(tensor: tc.Tensor) -> np.ndarray:
    """The bits of floats, as integers; other values as they are. bf16 is converted to f32 first."""
    tensor = tensor.to("cpu")
    if str(tensor.dtype) == "bf16":
        tensor = tensor.to("f32")
    array = tensor.numpy()
    integer = {"f32": np.uint32, "f64": np.uint64}.get(str(tensor.dtype))
    return array if integer is None else array.view(integer)


def assert_same_bits(found: Run, expected: Run) -> None:
    found_bits, expected_bits = found.bits(), expected.bits()
    assert found_bits.keys() == expected_bits.keys()
    for name, value in expected_bits.items():
        np.testing.assert_array_equal(found_bits[name], value, err_msg=name)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize(("kind", "storage"), CASES)
def test_states_on_the_host_have_the_bits_of_those_on_the_gpu(
    kind: str, storage: str, *, captured: bool
) -> None:
    expected = Run(kind, storage, "device", captured=False)
    found = Run(kind, storage, "host", captured=captured)
    for run in (expected, found):
        run.take_steps(0, 5)
    assert_same_bits(found, expected)
    # Each run loads the other's states and continues. A captured step must use the loaded states.
    saved = expected.optimizer.state_dict(), found.optimizer.state_dict()
    expected.optimizer.load_state_dict(saved[1])
    found.optimizer.load_state_dict(saved[0])
    for run in (expected, found):
        run.take_steps(5, 8)
    assert_same_bits(found, expected)


def test_averages_with_states_on_the_host_have_the_bits_of_those_with_states_on_the_gpu() -> None:
    # This optimizer averages the variables; the averages are computed from its states.
    kind = "adamwschedulefree"
    runs = [Run(kind, "f32", states, captured=False) for states in ("device", "host")]
    expected, found = runs
    for run in runs:
        run.take_steps(0, 4)
        run.optimizer.eval()  # puts the averages into the variables
    assert_same_bits(found, expected)
    for run in runs:
        run.optimizer.train()
        run.take_steps(4, 6)
    assert_same_bits(found, expected)


def test_states_on_the_host_take_no_gpu_memory() -> None:
    growth = []
    for states in ("device", "host"):
        var = tc.Var(tc.zeros(1 << 22, device="cuda"))
        var.grad = tc.ones(1 << 22, device="cuda")
        tc.cuda.synchronize()
        before = tc.cuda.memory_stats()["allocated"]
        optimizer = tc.optim.AdamW([var], lr=0.1, states=states)
        optimizer.step()
        growth.append(tc.cuda.memory_stats()["allocated"] - before)
        assert optimizer.state_bytes == 8 << 22  # two f32 moments of each value
        del optimizer, var
    on_device, on_host = growth
    assert on_device - on_host >= 8 << 22
    assert on_host < 1 << 20  # some small buffers
