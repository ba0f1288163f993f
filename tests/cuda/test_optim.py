"""CUDA calls of optimizers and of LoRA's gradients, on a simulated GPU that does not compute.

The simulated libraries log the calls of a script, in which `mark(NAME)` divides the log: `after`
returns the calls from a mark to the next one. `waits` are calls that make the host wait, and calls
of the kind "refused" are those that failed. Tests with the marker `gpu` compare values on a real
GPU.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc

# The arguments of `LoRALinear` are the frozen weight, the rank and alpha.
TRAIN = """
    import numpy as np

    tc.manual_seed(0)
    rng = np.random.default_rng(0)
    bases = [tc.randn(64, 64, dtype="bf16", device="cuda") for _ in range(6)]
    layers = [tc.nn.LoRALinear(base, 8, 8.0) for base in bases]
    parameters = [var for layer in layers for var in layer.parameters()]
    opt = OPTIMIZER
    scaler = tc.optim.GradScaler()
    x = tc.tensor(rng.standard_normal((32, 64)), dtype="bf16", device="cuda")
    for step in range(4):
        mark(f"step-{step}")
        y = x
        for layer in layers:
            y = layer(y)
        loss = y.sum()
        UPDATE
        opt.zero_grad()
    mark("end")
    assert opt.state_dict()["step"].shape == (12,)  # two factors of each layer
    mark("after")
"""

CLIPPED = """loss.backward()
        norm = tc.optim.clip_grad_norm_(parameters, 1.0)
        opt.step(if_finite=norm)
        opt.lr = 0.1 / (step + 1)
        assert norm.device == "cuda:0" and norm.dtype == "f64" and norm.shape == ()"""

SCALED = """scaler.scale(loss).backward()
        assert scaler.step(opt) is None
        scaler.update()"""

# For each optimizer, kernels with the number of their launches in a step, which is 1 whatever the
# number of variables.
OPTIMIZERS = {
    "SGD(parameters, lr=0.1, momentum=0.9)": {"sgd_prepare": 1, "sgd_step_f32_bf16": 1},
    "Adam(parameters, lr=0.1)": {"adam_prepare": 1, "adam_step_f32_bf16": 1},
    "AdamW([{'params': parameters[:5]}, {'params': parameters[5:], 'lr': 0.2}], lr=0.1)": {
        "adamw_prepare": 1,
        "adam_step_f32_bf16": 1,
    },
    "Lion(parameters, lr=0.1)": {"lion_prepare": 1, "lion_step_f32_bf16": 1},
    # The variables have 512 elements each. By default this is too few for 8-bit states, and
    # `small_adam_*` updates them; `min_8bit_size=1` gives them 8-bit states.
    "AdamW8bit(parameters, lr=0.1)": {
        "adam_8bit_prepare": 1,
        "small_adam_step_f32_bf16": 1,
    },
    "AdamW8bit(parameters, lr=0.1, min_8bit_size=1)": {
        "adam_8bit_prepare": 1,
        "adam_8bit_step_f32_bf16": 1,
    },
    "Lion8bit(parameters, lr=0.1, min_8bit_size=1)": {
        "lion_prepare": 1,
        "lion_8bit_step_f32_bf16": 1,
    },
    # In the kernels of these optimizers, one block of threads updates a whole variable.
    "Adafactor(parameters, lr=0.1)": {"whole_prepare": 1, "adafactor_step_f32_bf16": 1},
    "CAME(parameters, lr=0.1)": {"whole_prepare": 1, "came_step_f32_bf16": 1},
    "Muon(parameters, lr=0.1)": {"whole_prepare": 1, "muon_step_f32_bf16": 1},
    "AdamWScheduleFree(parameters, lr=0.1)": {
        "whole_prepare": 1,
        "schedule_free_step_f32_bf16": 1,
    },
    "Prodigy(parameters, lr=0.1)": {
        "whole_prepare": 1,
        "prodigy_observe_f32_bf16": 1,
        "prodigy_estimate": 1,
        "prodigy_step_f32_bf16": 1,
    },
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_step_on_many_variables_has_few_launches(cuda: Any, optimizer: str) -> None:
    for update in (CLIPPED, SCALED):
        run = cuda.run(
            TRAIN.replace("OPTIMIZER", f"tc.optim.{optimizer}").replace("UPDATE", update)
        )
        assert run.of("refused") == []
        # The steps before have allocated the memory and loaded the kernels.
        for name in ("step-2", "step-3"):
            step = run.after(name)
            assert step.waits == []
            assert step.of("grow", "shrink", "alloc", "alloc-pinned", "module") == []
            launches = Counter(step.launches)
            expected = {"gradient_clip": 1, **OPTIMIZERS[optimizer]}
            # All gradients are in one vector: one launch sets them to 0.
            expected["fill_f32"] = 1
            if update == CLIPPED:
                groups = 2 if "params" in optimizer else 1
                expected |= {"gradient_norm_l2_f32": 1, "gradient_scale_f32": 1}
                # The learning rate has changed, so each group gets its settings again.
                expected |= {"optim_configure": groups}
            else:
                expected |= {"gradient_norm_max_f32": 1, "loss_scale_update": 1}
            for kernel, count in expected.items():
                assert launches[kernel] == count, (kernel, launches)
            # The kernels of the steps also write the variables' bf16 copies, so no cast is left.
            assert not any(kernel.startswith("copy_f32_bf16") for kernel in launches), launches


def test_lora_gradients_are_products_in_batches(cuda: Any) -> None:
    code = TRAIN.replace("OPTIMIZER", "tc.optim.AdamW(parameters, lr=0.1)")
    step = cuda.run(code.replace("UPDATE", CLIPPED)).after("step-3")
    calls = Counter((call["call"], call.fields.get("count")) for call in step.of("product"))
    # One batch of six products gives the gradients of `down` in all layers, another those of `up`.
    assert calls["cublasGemmBatchedEx", "6"] == 2, calls
    # A layer has three products in the forward pass: base, `down` and `up`. In the backward pass,
    # a layer has one product for the gradient of the output of `down`, and two products for the
    # gradient of the layer's input. The first layer's input needs no gradient.
    assert sum(calls.values()) == 2 + 6 * 3 + 6 + 5 * 2, calls
    launches = Counter(step.launches)
    assert launches["write_addresses"] == 2
    assert not any(name.startswith("scale_in_place") for name in launches), launches


def test_the_backward_pass_of_many_layers_has_four_batches_of_products(cuda: Any) -> None:
    code = """
        tc.manual_seed(0)
        downs = [tc.Var(tc.randn(8, 64, device="cuda")) for _ in range(10)]
        ups = [tc.Var(tc.randn(64, 8, device="cuda")) for _ in range(10)]
        opt = tc.optim.AdamW(downs + ups)
        xs = [tc.randn(128, 64, dtype="bf16", device="cuda") for _ in range(10)]
        for step in range(3):
            mark(f"step-{step}")
            # Inputs and outputs have 64 features: `xs` are also the gradients of the outputs.
            tc.lora_backward_(xs, xs, downs, ups, 0.5)
        mark("end")
        assert all(var.grad.dtype == "f32" for var in downs + ups)
    """
    step = cuda.run(code).after("step-2")
    assert step.waits == []
    # Each batch of ten products has a launch that writes the addresses of its matrices.
    assert Counter(step.launches) == {"write_addresses": 4}
    # Two batches give `x @ down` and `grad @ up`, two more give the gradients of the factors.
    assert [call["call"] for call in step.of("product")] == ["cublasGemmBatchedEx"] * 4


def test_a_captured_step_does_not_wait_and_follows_the_learning_rate(cuda: Any) -> None:
    code = """
        tc.manual_seed(0)
        base = tc.randn(64, 64, dtype="bf16", device="cuda")
        layer = tc.nn.LoRALinear(base, 8, 8.0)
        opt = tc.optim.AdamW8bit(layer.parameters(), lr=0.1, min_8bit_size=1)

        def train(x):
            loss = layer(x).sum()
            loss.backward()
            norm = tc.optim.clip_grad_norm_(layer.parameters(), 1.0)
            opt.step(if_finite=norm)
            opt.zero_grad()
            return loss, norm

        x = tc.randn(32, 64, dtype="bf16", device="cuda")
        step = tc.cuda.capture(train, [x])
        for number in range(6):
            mark(f"step-{number}")
            step(x)
            opt.lr = 0.1 / (number + 1)
        mark("end")
        opt.state_dict()
    """
    run = cuda.run(code)
    assert run.of("refused") == []
    step = run.after("step-5")
    assert step.waits == []
    assert Counter(step.launches)["optim_configure"] == 1


def train_adapter(
    device: str, dtype: str, *, adaptive: bool, captured: bool = False
) -> list[np.ndarray]:
    """The parameters of a LoRA layer after eight steps with a decreasing learning rate.

    The optimizer is AdamW8bit if `adaptive`, otherwise SGD.
    """
    rng = np.random.default_rng(0)
    base, down, up = (rng.standard_normal(shape) / 8 for shape in ((96, 64), (8, 64), (96, 8)))
    layer = tc.nn.LoRALinear(tc.tensor(base, dtype=dtype, device=device), 8, 8.0)
    for parameter, value in zip(layer.parameters(), (down, up), strict=True):
        parameter.set(tc.tensor(value, dtype="f32", device=device))
    opt: tc.optim.Optimizer = tc.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    if adaptive:
        opt = tc.optim.AdamW8bit(layer.parameters(), lr=0.1, min_8bit_size=1)

    def train(x: tc.Tensor) -> tc.Tensor:
        loss = (layer(x).to("f32") ** 2).mean()
        loss.backward()
        opt.step(if_finite=tc.optim.clip_grad_norm_(layer.parameters(), 0.5))
        opt.zero_grad()
        return loss

    batches = [tc.tensor(rng.standard_normal((40, 64)), dtype=dtype) for _ in range(8)]
    batches = [batch.to(device) for batch in batches]
    step = tc.cuda.capture(train, [batches[0]]) if captured else train
    for number, batch in enumerate(batches):
        opt.lr = 0.1 / (number + 1)
        step(batch)
    return [parameter.detach().to("cpu").numpy() for parameter in layer.parameters()]


@pytest.mark.gpu
def test_trained_parameters_are_near_those_of_the_cpu() -> None:
    for dtype, atol in (("f32", 1e-5), ("bf16", 2e-2)):
        on_cpu = train_adapter("cpu", dtype, adaptive=False)
        on_gpu = train_adapter("cuda", dtype, adaptive=False)
        for found, expected in zip(on_gpu, on_cpu, strict=True):
            np.testing.assert_allclose(found, expected, atol=atol)


@pytest.mark.gpu
def test_captured_steps_have_the_bits_of_eager_ones() -> None:
    for dtype in ("f32", "bf16"):
        eager = train_adapter("cuda", dtype, adaptive=True)
        captured = train_adapter("cuda", dtype, adaptive=True, captured=True)
        for found, expected in zip(captured, eager, strict=True):
            np.testing.assert_array_equal(found, expected)
