"""Gradient checkpoints that keep their inputs in host memory until the backward pass.

`cuda.run` runs code on the simulated device and returns the log of the driver's calls.
`run.after(name)` is the part of the log from `mark(name)` to the next mark. Calls of the kind
"refused" are those that the driver rejected. `run.waits` are those for which the host waits; calls
of the kind "wait" make only a stream wait.
"""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc

LAYERS = 6
ROWS, WIDTH = 1024, 512
BYTES = ROWS * WIDTH * 4  # of the f32 input of a checkpoint
CHAIN = f"""
    weights = [tc.Var(tc.randn(({WIDTH}, {WIDTH})) * 0.05, device="cuda") for _ in range({LAYERS})]
    x = tc.randn(({ROWS}, {WIDTH}), device="cuda")

    def step(x):
        for weight in weights:
            x = tc.checkpoint(lambda x, weight=weight: (x @ weight).tanh(), x, policy="offload")
        loss = x.square().mean()
        loss.backward()
        return loss
"""


def copies_to_host(run: Any) -> list[Any]:
    return [call for call in run.of("copy") if call["kind"].startswith("cuMemcpyDtoHAsync")]


def copies_to_device(run: Any) -> list[Any]:
    return [call for call in run.of("copy") if call["kind"].startswith("cuMemcpyHtoDAsync")]


def second_step(cuda: Any) -> Any:
    """The CUDA calls of the second step."""
    run = cuda.run(
        CHAIN
        + """
    step(x)
    mark("second")
    step(x)
    mark("end")
    """
    )
    assert run.of("refused") == []
    return run.after("second")


def test_each_input_is_copied_once_in_each_direction(cuda: Any) -> None:
    second = second_step(cuda)
    # The first input is a constant, which stays on the device.
    assert [int(call["bytes"]) for call in copies_to_host(second)] == [BYTES] * (LAYERS - 1)
    assert [int(call["bytes"]) for call in copies_to_device(second)] == [BYTES] * (LAYERS - 1)
    assert {call["pageable"] for call in copies_to_host(second) + copies_to_device(second)} == {"0"}
    # The step reuses the pinned buffers of the first step, and the host does not wait for the GPU.
    assert second.of("alloc-pinned") == []
    assert second.waits == []


def test_copies_to_the_device_can_run_while_later_layers_are_recomputed(cuda: Any) -> None:
    second = second_step(cuda)
    calls, copies = second.calls, copies_to_device(second)
    starts = [i for i, call in enumerate(calls) if call in copies]
    work = [i for i, call in enumerate(calls) if call.kind in {"launch", "product"}]
    # The backward pass starts with the last layer, which needs its input at once: no work runs
    # beside the first copy.
    for earlier, later in pairwise(starts[1:]):
        assert any(earlier < i < later for i in work)
    side = calls[starts[0]]["stream"]  # the stream of the copies
    # The calls by which another stream waits for an event, such as the end of a copy.
    waits = [i for i, call in enumerate(calls) if call.kind == "wait" and call["stream"] != side]
    # While the input of layer i is copied to the device, layer i + 1 is recomputed: a launch or
    # product lies between the copy and the next of `waits`.
    for start in starts[1:]:
        awaited = next(i for i in waits if i > start)
        assert any(start < i < awaited for i in work)


def test_a_graph_has_the_copies_and_keeps_its_pinned_buffers(cuda: Any) -> None:
    run = cuda.run(
        CHAIN
        + """
    recorded = tc.cuda.capture(step, [x])
    for call in range(4):
        mark(f"call-{call}")
        recorded(x)
    assert recorded.is_recorded
    mark("eager")
    step(x)
    mark("end")
    """
    )
    assert run.of("refused") == []
    assert all(end["valid"] == "1" for end in run.of("capture-end"))
    # The last of the calls replays the graph. Besides the copies of inputs in both directions, the
    # graph may have others.
    replay = run.after("call-3").of("replay")
    assert int(replay[0]["copies"]) >= 2 * (LAYERS - 1)
    # An eager step does not use the pinned buffers of the graph. It allocates its own.
    assert len(run.after("eager").of("alloc-pinned")) == LAYERS - 1


def test_with_too_little_pinned_memory_the_error_names_the_cure(cuda: Any) -> None:
    run = cuda.run(
        CHAIN
        + """
    try:
        step(x)
    except tc.errors.OutOfMemoryError as error:
        print(error)
    """,
        # Enough for one buffer of 8 MiB, through which values are copied, and for three inputs.
        settings={"PINNED": str((8 << 20) + 3 * BYTES)},
    )
    assert 'use "full" checkpointing' in run.output


def last_step(
    policy: str, device: str, layers: int, rows: int, *, recorded: bool = False
) -> tuple[list[np.ndarray], int]:
    """Take a few steps. Return the last one's loss and gradients, and peak of device memory.

    The peak is in bytes; on the CPU, it is 0.
    """
    tc.manual_seed(0)
    weights = [tc.Var(tc.randn((WIDTH, WIDTH)) * 0.05, device=device) for _ in range(layers)]
    x = tc.randn((rows, WIDTH)).to(device)

    def step(x: tc.Tensor) -> tc.Tensor:
        for weight in weights:

            def layer(x: tc.Tensor, weight: tc.Var = weight) -> tc.Tensor:
                return (x @ weight).tanh()

            x = tc.checkpoint(layer, x, policy=policy)
        loss = x.square().mean()
        loss.backward()
        return loss

    run = tc.cuda.capture(step, [x]) if recorded else step
    peak = 0
    # With `recorded`, the last of four steps is a replay.
    for _ in range(4 if recorded else 2):
        for weight in weights:
            weight.zero_grad()
        if device != "cpu":
            tc.cuda.reset_peak_memory_stats(device)
        loss = run(x)
        if device != "cpu":
            peak = tc.cuda.memory_stats(device)["peak_allocated"]
    return [loss.numpy(), *(weight.grad.numpy() for weight in weights)], peak


def test_on_the_cpu_offloading_changes_no_bit() -> None:
    full, offloaded = (last_step(policy, "cpu", 3, ROWS // 2)[0] for policy in ("full", "offload"))
    for a, b in zip(full, offloaded, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "recorded"])
def test_offloading_changes_no_bit_and_frees_memory(gpu: str, *, recorded: bool) -> None:
    full, full_peak = last_step("full", gpu, 4 * LAYERS, 4 * ROWS)
    offloaded, offloaded_peak = last_step("offload", gpu, 4 * LAYERS, 4 * ROWS, recorded=recorded)
    for a, b in zip(full, offloaded, strict=True):
        np.testing.assert_array_equal(a, b)
    # A replay uses memory that its capture has freed again; `peak_allocated` does not count it.
    if not recorded:
        # At least three quarters of the 4 * LAYERS inputs, of 4 * BYTES each, are not kept.
        assert full_peak - offloaded_peak > 3 * LAYERS * 4 * BYTES
