"""Every optimizer on a GPU against the same optimizer on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import trainable_candle as tc

pytestmark = pytest.mark.gpu

SHAPES = [(16, 300), (300, 16), (40, 8, 3, 3), (1, 5), (70, 65), (9,), (1,)]
"""A wide and a tall factor, a convolution, a row, a matrix and two vectors.

Both sides of the (70, 65) matrix are longer than Muon's tile.
"""

# Each optimizer is tested with its defaults, and with each of these sets of options.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "adafactor": [{"maximize": True, "weight_decay": 0.1}],
    "came": [{"weight_decay": 0.1}],
    "muon": [{"nesterov": False}, {"match_rms_adamw": True, "ns_steps": 3}],
    "adamwschedulefree": [{"warmup_steps": 3, "weight_decay": 0.1, "r": 0.5}],
    "prodigy": [
        {"slice_p": 3, "betas": (0.0, 0.99), "decouple": False, "weight_decay": 0.1},
        {"use_bias_correction": True, "safeguard_warmup": True, "d0": 1e-4, "growth_rate": 1.5},
    ],
}
CASES = [
    pytest.param(kind, options, id=f"{kind}: {', '.join(options) or 'defaults'}")
    for kind in tc.optim.KINDS
    for options in [{}, *OPTIONS.get(kind, [])]
]


def variables(dtype: str, device: str) -> list[tc.Var]:
    rng = np.random.default_rng(0)
    starts = [rng.standard_normal(shape) for shape in SHAPES]
    return [tc.Var(tc.tensor(start, dtype=dtype).to(device)) for start in starts]


def take_three_steps(optimizer: tc.optim.Optimizer, parameters: list[tc.Var], start: int) -> None:
    """Take three steps. The gradients depend on the numbers of the steps, from `start` on."""
    for step in range(start, start + 3):
        rng = np.random.default_rng(step)
        for index, parameter in enumerate(parameters):
            gradient = rng.standard_normal(SHAPES[index])
            # Parameter 1 has a gradient only in every other step.
            if index != 1 or step % 2:
                parameter.grad = tc.tensor(gradient, dtype=parameter.dtype).to(parameter.device)
        optimizer.step()
        optimizer.zero_grad()
        # `zero_grad` has removed each gradient or set it to 0.
        assert all(p.grad is None or not p.grad.to("f32").abs().max().item() for p in parameters)


def values(parameters: list[tc.Var]) -> list[np.ndarray]:
    return [p.detach().to("cpu").to("f32").numpy() for p in parameters]


def assert_near(found: list[np.ndarray], expected: list[np.ndarray], dtype: str) -> None:
    atol = {"f32": 2e-5, "bf16": 2e-2, "f16": 3e-3}[dtype]
    for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(ours, theirs, atol=atol, rtol=atol, err_msg=f"variable {index}")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_steps_of_each_optimizer_are_near_those_of_the_cpu(
    kind: str, options: dict[str, Any], dtype: str
) -> None:
    # The learning rates of Prodigy's groups must be equal, but some may be 0. The cases with
    # options test that, too.
    second_rate_is_zero = kind == "prodigy" and bool(options)
    runs = []
    for device in ("cpu", "cuda"):
        parameters = variables(dtype, device)
        groups: list[dict[str, Any]] = [{"params": parameters[:3]}, {"params": parameters[3:]}]
        if second_rate_is_zero:
            groups[1]["lr"] = 0.0
        lr = 1.0 if kind == "prodigy" else 0.01
        optimizer = tc.optim.KINDS[kind](groups, lr=lr, **options)
        take_three_steps(optimizer, parameters, 0)
        runs.append((optimizer, parameters))
    (on_cpu, expected), (on_gpu, found) = runs
    assert_near(values(found), values(expected), dtype)
    # Each optimizer loads the states of the other one. Both then continue.
    cpu_states, gpu_states = on_cpu.state_dict(), on_gpu.state_dict()
    # If the learning rate of the second group is 0, the GPU counts the steps of that group's
    # variables, but the CPU does not. Then the GPU has more states.
    assert cpu_states.keys() <= gpu_states.keys()
    assert second_rate_is_zero or cpu_states.keys() == gpu_states.keys()
    on_cpu.load_state_dict(gpu_states)
    on_gpu.load_state_dict(cpu_states)
    for optimizer, parameters in runs:
        take_three_steps(optimizer, parameters, 3)
    assert_near(values(found), values(expected), dtype)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_averages_of_schedule_free_are_near_those_of_the_cpu(dtype: str) -> None:
    results = []
    for device in ("cpu", "cuda"):
        parameters = variables(dtype, device)
        optimizer = tc.optim.AdamWScheduleFree(parameters, lr=0.01)
        take_three_steps(optimizer, parameters, 0)
        trained = values(parameters)
        optimizer.eval()
        averages = values(parameters)
        optimizer.train()
        for after, before in zip(values(parameters), trained, strict=True):
            np.testing.assert_array_equal(after, before)
        take_three_steps(optimizer, parameters, 3)
        results.append((averages, values(parameters)))
    on_cpu, on_gpu = results
    # Compare the averages, then the parameters after three more steps.
    for found, expected in zip(on_gpu, on_cpu, strict=True):
        assert_near(found, expected, dtype)


@pytest.mark.parametrize("kind", tc.optim.KINDS)
def test_captured_steps_have_the_bits_of_eager_ones(kind: str) -> None:
    results = []
    for captured in (False, True):
        rng = np.random.default_rng(0)
        base, down, up = (rng.standard_normal(shape) / 8 for shape in ((96, 64), (8, 64), (96, 8)))
        weight = tc.tensor(base, dtype="bf16", device="cuda")
        layer = tc.nn.LoRALinear(weight, rank=8, alpha=8.0)
        for parameter, value in zip(layer.parameters(), (down, up), strict=True):
            parameter.set(tc.tensor(value, dtype="f32", device="cuda"))
        optimizer = tc.optim.KINDS[kind](layer.parameters(), lr=0.01)

        def train(x: tc.Tensor, layer: Any = layer, optimizer: Any = optimizer) -> tc.Tensor:
            loss = (layer(x).to("f32") ** 2).mean()
            loss.backward()
            optimizer.step(if_finite=tc.optim.clip_grad_norm_(layer.parameters(), 0.5))
            optimizer.zero_grad()
            return loss

        batches = [tc.tensor(rng.standard_normal((40, 64)), dtype="bf16") for _ in range(6)]
        batches = [batch.to("cuda") for batch in batches]
        # `capture` takes no step: `batches[0]` only gives the shape and dtype of all inputs.
        step = tc.cuda.capture(train, [batches[0]]) if captured else train
        for number, batch in enumerate(batches):
            optimizer.lr = 0.01 / (number + 1)
            step(batch)
        results.append(values(layer.parameters()))
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", tc.optim.KINDS)
def test_a_step_with_an_infinite_gradient_changes_nothing(kind: str) -> None:
    parameters = variables("f32", "cuda")
    optimizer = tc.optim.KINDS[kind](parameters, lr=0.01)
    take_three_steps(optimizer, parameters, 0)
    before, states_before = values(parameters), optimizer.state_dict()
    for parameter in parameters:
        parameter.grad = tc.ones(*parameter.shape, device="cuda") * float("inf")
    optimizer.step(if_finite=tc.optim.clip_grad_norm_(parameters, 1.0))
    for after, expected in zip(values(parameters), before, strict=True):
        np.testing.assert_array_equal(after, expected)
    states_after = optimizer.state_dict()
    for name, state in states_before.items():
        np.testing.assert_array_equal(states_after[name].numpy(), state.numpy(), err_msg=name)
