"""Tests that need a real GPU: run `pytest -m gpu tests/cuda` on a machine that has a GPU."""

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc

pytestmark = pytest.mark.gpu
F = tc.nn.functional


def train(device: str, dtype: str) -> list[float]:
    """The losses of 20 steps of gradient descent on a network of two layers."""
    generator = np.random.default_rng(0)
    shapes = ((32, 64), (32, 16), (256, 64), (16, 256))
    x, target, first_weight, second_weight = (generator.standard_normal(shape) for shape in shapes)
    weights = [tc.Var(w / 8, dtype=dtype, device=device) for w in (first_weight, second_weight)]
    x, target = (tc.tensor(a, dtype=dtype, device=device) for a in (x, target))
    losses = []
    for _ in range(20):
        loss = F.mse_loss(F.linear(F.linear(x, weights[0]).relu(), weights[1]), target)
        loss.backward()
        for weight in weights:
            weight.set(weight.detach() - weight.grad * 0.05)
            weight.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("dtype", "rtol"), [("f64", 1e-12), ("f32", 1e-4), ("bf16", 5e-2)])
def test_losses_are_near_those_on_the_cpu(dtype: str, rtol: float) -> None:
    on_cpu, on_gpu = train("cpu", dtype), train("cuda", dtype)
    assert on_cpu[-1] < 0.9 * on_cpu[0]
    np.testing.assert_allclose(on_gpu, on_cpu, rtol=rtol)


def test_values_of_every_dtype_are_copied_to_the_gpu_and_back() -> None:
    for dtype in ("f32", "f64", "f16", "bf16", "u8", "u32", "i64"):
        assert tc.ones((2, 3), dtype=dtype, device="cuda").to("cpu").tolist() == [[1] * 3] * 2
        values = tc.tensor([[1, 2, 3], [4, 5, 6]], dtype=dtype)
        assert values.to("cuda").T.contiguous().to("cpu").tolist() == values.T.tolist()


def test_a_process_goes_on_after_an_error_of_full_memory() -> None:
    total = tc.cuda.memory_stats()["total"]
    before = tc.cuda.memory_stats()["allocated"]
    with pytest.raises(tc.OutOfMemoryError, match="zeros: a tensor of shape"):
        tc.zeros((total,), dtype="u8", device="cuda")  # as many bytes as the GPU has
    small = tc.ones((1 << 20,), device="cuda")
    assert small.sum().item() == 1 << 20
    del small
    assert tc.cuda.memory_stats()["allocated"] == before


def test_memory_can_be_limited() -> None:
    tc.cuda.empty_cache()
    # Room for 256 MiB: 512 MiB exceed the limit, 64 MiB do not.
    limit = tc.cuda.memory_stats()["reserved"] + (256 << 20)
    tc.cuda.set_memory_limit(limit)
    try:
        with pytest.raises(tc.OutOfMemoryError, match=r"the limit is \d+\.\d\d GiB"):
            tc.zeros((512 << 20,), dtype="u8", device="cuda")
        assert tc.zeros((64 << 20,), dtype="u8", device="cuda").shape == (64 << 20,)
        assert tc.cuda.memory_stats()["reserved"] <= limit
    finally:
        tc.cuda.set_memory_limit(None)
    assert tc.zeros((512 << 20,), dtype="u8", device="cuda").shape == (512 << 20,)


@pytest.mark.parametrize("read", [tc.Tensor.item, float, bool, tc.Tensor.tolist, tc.Tensor.numpy])
def test_other_threads_run_while_values_are_awaited(read: Callable[[tc.Tensor], Any]) -> None:
    reading = ran_meanwhile = False
    go = threading.Event()

    def work() -> None:
        nonlocal ran_meanwhile
        go.wait()
        ran_meanwhile = reading

    thread = threading.Thread(target=work)
    thread.start()
    # Queue work for the GPU, so that `read` has to wait.
    y = x = tc.full((4096, 4096), 1 / 4096, dtype="bf16", device="cuda")
    for _ in range(200):
        y = y @ x
    total = y.to("f32").sum()
    interval = sys.getswitchinterval()
    # With this interval of 1000 s, the other thread runs only while this thread releases the GIL.
    sys.setswitchinterval(1000)
    try:
        reading = True
        go.set()
        read(total)
        reading = False
    finally:
        sys.setswitchinterval(interval)
        thread.join()
    assert ran_meanwhile


def test_a_scaled_loss_keeps_its_scale_for_later_backward_passes() -> None:
    # The scaled loss saves the scale (8) for its backward passes. `update` then writes a new scale
    # (16) in place; the second backward pass of the loss must still multiply by 8.
    x = tc.Var(np.array([3.0]), device="cuda")
    weight = tc.Var([1.0], device="cuda")
    optimizer = tc.optim.SGD([weight], lr=0.1)
    scaler = tc.optim.GradScaler(init_scale=8.0, growth_interval=1)
    # `scaler.step` needs a gradient of the optimizer's variable, whose value does not matter.
    (weight * 1).sum().backward()
    scaled = scaler.scale((x * x).sum())
    scaled.backward(retain_graph=True)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 16.0
    x.zero_grad()
    scaled.backward()
    assert x.grad.tolist() == [48.0]  # 8 times the gradient of x * x, 2 x = 6
