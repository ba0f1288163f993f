"""CUDA graphs, memory shared with torch, and ids out of range, on a real GPU."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import numpy as np
import pytest

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainable_candle import Tensor, Var

pytestmark = pytest.mark.gpu
F = tc.nn.functional


@pytest.fixture(autouse=True)
def _need_gpu() -> None:
    reason = tc.cuda.unavailable_reason()
    if reason is not None:
        pytest.skip(reason)


def make_step() -> tuple[list[Var], Callable[..., Tensor]]:
    """The weights of a network of two layers, and a step of gradient descent on them."""
    rng = np.random.default_rng(0)
    weights = [
        tc.Var(rng.standard_normal(shape).astype(np.float32) * 0.1, device="cuda")
        for shape in ((96, 64), (10, 96))
    ]

    def step(x: Tensor, labels: Tensor) -> Tensor:
        for weight in weights:
            weight.zero_grad()
        hidden = tc.checkpoint(lambda x: F.dropout(F.linear(x, weights[0]).relu(), 0.3), x)
        loss = F.cross_entropy(F.linear(hidden, weights[1]), labels)
        loss.backward()
        for weight in weights:
            assert weight.grad is not None
            weight.set(weight.detach() - weight.grad * 0.1)
        return loss.detach()

    return weights, step


def test_captured_steps_equal_eager_ones_to_the_bit() -> None:
    rng = np.random.default_rng(1)
    batches = [
        (rng.standard_normal((32, 64)).astype(np.float32), rng.integers(0, 10, 32))
        for _ in range(6)
    ]
    inputs = [tuple(tc.tensor(part, device="cuda") for part in batch) for batch in batches]
    results = []
    for captured in (False, True):
        weights, step = make_step()
        run = tc.cuda.capture(step, inputs[0]) if captured else step
        tc.manual_seed(3)
        losses = [run(*batch).item() for batch in inputs]
        finals = [weight.detach().tolist() for weight in weights]
        results.append((losses, finals, tc.get_rng_state()))
    assert results[0] == results[1]


def optimize(name: str, *, captured: bool) -> tuple[object, ...]:
    """Take six steps with decreasing learning rates.

    Return the loss and gradient norm of each step, and the final weights and optimizer state.
    """
    rng = np.random.default_rng(2)
    x = tc.tensor(rng.standard_normal((6, 32, 64)).astype(np.float32), device="cuda")
    labels = tc.tensor(rng.integers(0, 10, 32), device="cuda")
    weights, _ = make_step()
    optimizer = getattr(tc.optim, name)(weights, lr=1e-2)

    def train(x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(F.linear(F.linear(x, weights[0]).relu(), weights[1]), labels)
        loss.backward()
        norm = tc.optim.clip_grad_norm_(weights, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    run = tc.cuda.capture(train, [x[0], labels]) if captured else train
    results = []
    for call in range(6):
        optimizer.lr = 1e-2 / (call + 1)
        results.append([value.item() for value in run(x[call], labels)])
    state = {key: value.tolist() for key, value in optimizer.state_dict().items()}
    return results, [weight.detach().tolist() for weight in weights], state


@pytest.mark.parametrize("name", ["AdamW", "AdamW8bit", "Lion", "SGD"])
def test_captured_optimizer_steps_equal_eager_ones_to_the_bit(name: str) -> None:
    assert optimize(name, captured=True) == optimize(name, captured=False)


def test_two_thousand_replays_take_no_memory() -> None:
    _, step = make_step()
    labels = tc.tensor(np.arange(32) // 4, device="cuda")
    inputs = [tc.zeros((32, 64), device="cuda"), labels]
    run = tc.cuda.capture(step, inputs)
    # A graph needs the addresses of the gradients. The first call allocates the gradients, the
    # second call finds them allocated, and the third call records the graph.
    for _ in range(3):
        run(*inputs)
    before = tc.cuda.memory_stats()
    for _ in range(2000):
        loss = run(*inputs)
    assert np.isfinite(loss.item())
    del loss
    after = tc.cuda.memory_stats()
    # `growths` counts how often memory was taken from the device.
    for name in ("allocated", "reserved", "growths"):
        assert after[name] == before[name], name
    del run, step
    gc.collect()
    assert tc.cuda.memory_stats()["graphs"] == 0


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64", "i64", "u8"])
def test_torch_shares_memory_of_tc_but_tc_copies_memory_of_torch(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    t = tc.tensor(np.arange(6).reshape(2, 3), dtype=dtype, device="cuda").T
    shared = torch.from_dlpack(t)
    assert shared.device.type == "cuda"
    assert shared.to(torch.float64).tolist() == t.tolist()
    shared[0, 0] = 5
    torch.cuda.synchronize()
    assert t[0, 0].item() == 5
    copied = tc.from_dlpack(shared)
    assert (copied.device, copied.dtype) == ("cuda:0", dtype)
    expected = t.tolist()
    shared[0, 0] = 7
    torch.cuda.synchronize()
    assert copied.tolist() == expected


def test_streams_of_torch_wait_for_the_stream_of_tc_and_the_reverse() -> None:
    torch = pytest.importorskip("torch")
    # Each of the 50 products below scales the values by about 0.02 * 2048**0.5 = 0.9, so that
    # they do not vanish.
    x = tc.randn((2048, 2048), device="cuda") * 0.02
    side = torch.cuda.Stream()
    for stream in (torch.cuda.default_stream(), side):
        y = x
        for _ in range(50):
            y = y @ x
        # The stream of tc may still compute the products. torch reads the result on its own stream,
        # which has to wait.
        with torch.cuda.stream(stream):
            total = torch.from_dlpack(y).double().sum().item()
        assert total == pytest.approx(float(y.to("f64").sum().item()), rel=1e-9, abs=1e-12)
        with torch.cuda.stream(stream):
            z = torch.zeros((2048, 2048), device="cuda")
            for i in range(200):
                z += i
            copied = tc.from_dlpack(z)
        assert copied[0, :3].tolist() == [sum(range(200))] * 3
        # Memory that torch still reads must not be given to another tensor.
        for _ in range(20):
            shared = tc.full((2048, 2048), 1.0, device="cuda")
            with torch.cuda.stream(stream):
                view = torch.from_dlpack(shared)
                result = view
                for _ in range(20):  # adds 20 to the 1
                    result = result + view
                del view
            del shared
            unrelated = tc.full((2048, 2048), 9.0, device="cuda")
            # `item` reads on torch's current stream: the sum must be queued on that stream.
            with torch.cuda.stream(stream):
                assert result.sum().item() == 21.0 * 2048 * 2048
            del unrelated


def test_int32_from_torch_is_rejected_and_bool_becomes_0_and_1() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(tc.DTypeError, match="convert them to int64 first"):
        tc.from_dlpack(torch.arange(3, dtype=torch.int32, device="cuda"))
    assert tc.from_dlpack(torch.tensor([True, False], device="cuda")).tolist() == [1, 0]


def test_ids_out_of_range_raise_when_a_value_is_read() -> None:
    weight = tc.ones((4, 3), device="cuda")
    rows = F.embedding(tc.tensor([1, 7], device="cuda"), weight)
    with pytest.raises(tc.IndexOutOfRangeError, match="embedding: the id or bound at position 1"):
        rows.tolist()
    # The error is raised once. The row of a wrong id is 0.
    assert rows.tolist() == [[1.0] * 3, [0.0] * 3]
    loss = F.cross_entropy(tc.zeros((2, 3), device="cuda"), tc.tensor([0, 3], device="cuda"))
    with pytest.raises(tc.IndexOutOfRangeError, match="cross_entropy"):
        loss.item()
    tc.cuda.synchronize()  # raises nothing: no error is left
