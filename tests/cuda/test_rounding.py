"""Stochastic rounding: CUDA calls on a simulated GPU, and values on a real GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc

# For each call in `tc.optim`: the kernel that updates all variables, and the number of its launches
# in a step. ROUNDED stands for `stochastic_rounding=True`. The variables have 512 elements each. By
# default this is too few for 8-bit states; AdamW8bit then updates them with `small_adam_*`.
KERNELS = {
    "SGD(parameters, lr=0.1, momentum=0.9, ROUNDED)": {"sgd_rounded_bf16": 1},
    "AdamW([{'params': parameters[:5]}, {'params': parameters[5:], 'lr': 0.2}], ROUNDED)": {
        "adam_rounded_bf16": 1
    },
    "Lion(parameters, ROUNDED)": {"lion_rounded_bf16": 1},
    "AdamW8bit(parameters, ROUNDED)": {"small_adam_rounded_bf16": 1},
    "AdamW8bit(parameters, min_8bit_size=1, ROUNDED)": {"adam_8bit_rounded_bf16": 1},
    "Lion8bit(parameters, min_8bit_size=1, ROUNDED)": {"lion_8bit_rounded_bf16": 1},
}

# The test replaces OPTIMIZER (by a key of KERNELS), CAPTURE (by the function that takes a step) and
# BYTES (by the size of all states).
TRAIN = """
    tc.manual_seed(2**63 + 1)
    parameters = [tc.Var(tc.randn(64, 8, dtype="bf16", device="cuda")) for _ in range(6)]
    opt = tc.optim.OPTIMIZER
    tc.manual_seed(0)

    def train(x):
        for var in parameters:
            x = x @ (var @ var.t())
        x.sum().backward()
        opt.step(if_finite=tc.optim.clip_grad_norm_(parameters, 1.0))
        opt.zero_grad()
        return x

    x = tc.randn(32, 64, dtype="bf16", device="cuda")
    step = CAPTURE
    for number in range(4):
        mark(f"step-{number}")
        step(x)
        opt.lr = 0.1 / (number + 1)
    mark("end")
    states = opt.state_dict()
    # The seed is that of the first `manual_seed`, as an i64.
    assert states["seed"].item() == -(2**63) + 1 and "0.master" not in states
    assert opt.state_bytes == BYTES, opt.state_bytes
    opt.load_state_dict(states)
    step(x)
"""


@pytest.mark.parametrize("capture", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("optimizer", KERNELS)
def test_a_step_is_one_launch_without_master_values(
    cuda: Any, optimizer: str, capture: bool
) -> None:
    count = 6 * 64 * 8  # elements of all variables
    # Each moment of an element is in bf16, also with AdamW8bit if the variables are small. With
    # `min_8bit_size=1`, the states are in 8 bits: a moment has a code of 1 byte for each element,
    # and an f32 scale for each 256 elements. `element_bytes` is for the optimizers without 8-bit
    # states; each of its keys is the beginning of a key of KERNELS.
    element_bytes = {"AdamW(": 4, "SGD": 2, "Lion(": 2, "AdamW8bit(parameters, R": 4}
    matching = [n for prefix, n in element_bytes.items() if optimizer.startswith(prefix)]
    eight_bit_bytes = (2 if "Adam" in optimizer else 1) * (count + 4 * count // 256)
    code = TRAIN.replace("OPTIMIZER", optimizer.replace("ROUNDED", "stochastic_rounding=True"))
    code = code.replace("CAPTURE", "tc.cuda.capture(train, [x])" if capture else "train")
    state_bytes = matching[0] * count if matching else eight_bit_bytes
    run = cuda.run(code.replace("BYTES", str(state_bytes)))
    # The simulated driver has rejected no call.
    assert run.of("refused") == []
    step = run.after("step-3")
    assert step.waits == []
    # The step allocates no memory and loads no module.
    assert step.of("grow", "shrink", "alloc", "alloc-pinned", "module") == []
    launches = Counter(step.launches)
    if capture:
        # The update is in the graph. Outside of the graph, one launch for each group of parameters
        # sets the new learning rate.
        assert launches["optim_configure"] == (2 if "params" in optimizer else 1)
    else:
        for kernel, times in KERNELS[optimizer].items():
            assert launches[kernel] == times, launches
        # No kernel updates or copies master values: f32 copies of the bf16 variables.
        assert not any("_f32" in name for name in launches), launches


# The optimizers that can round stochastically.
OPTIMIZERS = ("AdamW8bit", "Adam8bit", "AdamW", "Adam", "Lion8bit", "Lion", "SGD")


def train_adapter(
    device: str, kind: str, *, captured: bool = False
) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
    """The parameters and the optimizer's states after eight steps.

    After five steps, a new optimizer with new variables takes over the values and the states.
    """
    rng = np.random.default_rng(0)
    weight = tc.tensor(rng.standard_normal((96, 64)) / 8, dtype="bf16", device=device)
    initial_values = [rng.standard_normal(shape) / 8 for shape in ((8, 64), (96, 8))]
    options: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
    if "8bit" in kind:
        options["min_8bit_size"] = 513  # only the second variable has 8-bit states
    batches = [tc.tensor(rng.standard_normal((40, 64)), dtype="bf16") for _ in range(8)]
    make = getattr(tc.optim, kind)

    def make_training(values: list[Any]) -> tuple[list[tc.Var], Any, Any]:
        parameters = [tc.Var(tc.tensor(v, dtype="bf16", device=device)) for v in values]
        optimizer = make(parameters, lr=1e-3, stochastic_rounding=True, **options)

        def train(x: tc.Tensor) -> tc.Tensor:
            loss = ((x @ (parameters[1] @ parameters[0] + weight).t()).to("f32") ** 2).mean()
            loss.backward()
            optimizer.step(if_finite=tc.optim.clip_grad_norm_(parameters, 0.5))
            optimizer.zero_grad()
            return loss

        first = batches[0].to(device)
        return parameters, optimizer, tc.cuda.capture(train, [first]) if captured else train

    tc.manual_seed(7)
    parameters, optimizer, step = make_training(initial_values)
    for number, batch in enumerate(batches):
        if number == 5:
            states = optimizer.state_dict()
            values = [var.detach().to("cpu").to("f32").numpy() for var in parameters]
            tc.manual_seed(8)
            parameters, optimizer, step = make_training(values)
            if captured:
                # Run the captured function once before the states are loaded, and then restore the
                # parameters: the graph, which is recorded later, must use the loaded states.
                step(batches[0].to(device))
                for var, value in zip(parameters, values, strict=True):
                    var.set(tc.tensor(value, dtype="bf16", device=device))
            optimizer.load_state_dict(states)
        optimizer.lr = 1e-3 / (number + 1)
        step(batch.to(device))
    values = [var.detach().to("cpu").to("f32").numpy() for var in parameters]
    return values, {k: v.to("f64").numpy() for k, v in optimizer.state_dict().items()}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_captured_steps_have_the_bits_of_eager_ones_after_resuming_too(kind: str) -> None:
    (eager, eager_states), (captured, captured_states) = (
        train_adapter("cuda", kind, captured=captured) for captured in (False, True)
    )
    for found, expected in zip(captured, eager, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert captured_states.keys() == eager_states.keys()
    for name, state in eager_states.items():
        np.testing.assert_array_equal(captured_states[name], state, err_msg=name)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_steps_on_given_gradients_have_the_bits_of_the_cpu(kind: str) -> None:
    shapes = [(5, 7), (300,), (4099,), (1,), (64, 65)]
    results = []
    for device in ("cpu", "cuda"):
        tc.manual_seed(2**50 + 9)
        rng = np.random.default_rng(1)
        parameters = [
            tc.Var(tc.tensor(rng.standard_normal(shape), dtype="bf16", device=device))
            for shape in shapes
        ]
        groups = [{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.1}]
        optimizer = getattr(tc.optim, kind)(groups, lr=1e-3, stochastic_rounding=True)
        for number in range(4):
            for index, var in enumerate(parameters):
                gradient = tc.tensor(rng.standard_normal(var.shape), dtype="bf16", device=device)
                # Variable 1 has a gradient only in every other step.
                if index != 1 or number % 2:
                    var.grad = gradient
            optimizer.step()
            optimizer.zero_grad()
        results.append([var.detach().to("cpu").to("f32").numpy() for var in parameters])
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.gpu
def test_small_updates_take_effect_on_average() -> None:
    count, steps, update = 1 << 20, 256, 2.0**-11
    tc.manual_seed(0)
    var = tc.Var(tc.ones(count, dtype="bf16", device="cuda"))
    optimizer = tc.optim.SGD([var], lr=update, stochastic_rounding=True)
    for _ in range(steps):
        var.grad = tc.ones(count, dtype="bf16", device="cuda")
        optimizer.step()
    mean = var.detach().to("f64").mean().item()
    # bf16 numbers just below 1 are 2⁻⁸ apart, so the rounding error of a step has a standard
    # deviation of at most 2⁻⁹. Each value sums the errors of `steps` steps. The tolerance is six
    # standard deviations of the mean over `count` values.
    assert abs(mean - (1 - steps * update)) < 6 * 2.0**-9 * (steps / count) ** 0.5
