"""Optimizer states in host memory, on a simulated GPU that does not compute.

`cuda.run` runs a snippet and returns the log of its calls of the driver. `mark(NAME)` in a snippet
writes a line to the log; `run.after(NAME)` has the calls from there to the next mark. "refused" is
logged for a call that the simulated driver rejects.
"""

from typing import Any

import pytest

import trainable_candle as tc

TRAIN = """
    def train(layer, optimizer, x):
        loss = layer(x).sum()
        loss.backward()
        optimizer.step(if_finite=tc.optim.clip_grad_norm_(layer.parameters(), 1.0))
        optimizer.zero_grad()
        return loss

    def make_training(kind, states, **arguments):
        tc.manual_seed(0)
        base = tc.randn(64, 96, dtype="bf16", device="cuda")
        layer = tc.nn.LoRALinear(base, 8, 8.0)
        return layer, tc.optim.KINDS[kind](layer.parameters(), lr=0.1, states=states, **arguments)

    x = tc.randn(32, 96, dtype="bf16", device="cuda")
"""
EXTRA_ARGUMENTS: dict[str, dict[str, Any]] = {
    "sgd": {"momentum": 0.9},
    **{kind: {"min_8bit_size": 1} for kind in ("adamw8bit", "adam8bit", "lion8bit")},
}
"""Arguments of some optimizers in addition to those of all.

With them, every optimizer has states, and all states of 8-bit optimizers are codes.
"""


@pytest.mark.parametrize("kind", tc.optim.KINDS)
def test_states_are_in_pinned_memory_and_steps_launch_the_same_kernels(
    cuda: Any, kind: str
) -> None:
    run = cuda.run(
        TRAIN
        + f"""
    for states in ("device", "host"):
        before = tc.cuda.memory_stats()["allocated"]
        layer, optimizer = make_training({kind!r}, states, **{EXTRA_ARGUMENTS.get(kind, {})!r})
        for step in range(3):
            mark(f"{{states}}-{{step}}")
            train(layer, optimizer, x)
        mark(f"{{states}}-end")
        print(tc.cuda.memory_stats()["allocated"] - before, optimizer.state_bytes)
        mark(f"{{states}}-dropped")
        del layer, optimizer
    mark("end")
    """
    )
    assert run.of("refused") == []
    assert run.after("host-2").launches == run.after("device-2").launches
    assert run.after("host-2").waits == []
    # The third step takes no more pinned memory, and it reserves no more memory of the GPU.
    assert run.after("host-2").of("alloc-pinned", "grow") == []
    lines = [list(map(int, line.split())) for line in run.output.splitlines()]
    # With states on the device and on the host: the growth of device memory, and `state_bytes`.
    (device_growth, state_bytes), (host_growth, host_state_bytes) = lines
    assert host_state_bytes == state_bytes
    # The allocator rounds each block of device memory up to a multiple of 512 bytes. The bound
    # allows for five blocks.
    assert state_bytes <= device_growth - host_growth <= state_bytes + 5 * 512
    freed = [int(call["bytes"]) for call in run.after("host-dropped").of("free-pinned")]
    assert sum(freed) == state_bytes
    # All other pinned memory is buffers of 8 MiB, through which values are copied.
    pinned = [int(call["bytes"]) for call in run.of("alloc-pinned")]
    assert sum(pinned) % (8 << 20) == state_bytes


def test_a_graph_keeps_the_states_that_it_updates(cuda: Any) -> None:
    run = cuda.run(
        TRAIN
        + """
    layer, optimizer = make_training("adamw", "host")
    step = tc.cuda.capture(lambda x: train(layer, optimizer, x), [x])
    for number in range(5):
        mark(f"step-{number}")
        step(x)
        optimizer.lr = 0.1 / (number + 1)
    assert step.is_recorded
    mark("loaded")
    optimizer.load_state_dict(optimizer.state_dict())
    mark("after")
    step(x)
    mark("optimizer")
    del optimizer, layer
    mark("graph")
    del step
    tc.cuda.empty_cache()
    mark("end")
    """
    )
    assert run.of("refused") == []
    assert all(end["valid"] == "1" for end in run.of("capture-end"))
    for name in ("step-4", "after"):
        assert len(run.after(name).of("replay")) == 1
        assert run.after(name).waits == []
    assert run.after("optimizer").of("free-pinned") == []
    # The first and the second moments of all variables are freed.
    assert len(run.after("graph").of("free-pinned")) == 2


def test_states_on_the_host_are_saved_without_copies_from_the_gpu(cuda: Any) -> None:
    # On a GPU, a kernel counts the steps. Simulated kernels do not compute, so the GPU's optimizers
    # would have taken no step. The states to load come from an optimizer on the CPU instead.
    run = cuda.run(
        TRAIN
        + """
    trainings = {
        states: make_training("adamw8bit", states, min_8bit_size=1)
        for states in ("device", "host")
    }
    variables = [tc.Var(tc.zeros(*var.shape)) for var in trainings["host"][0].parameters()]
    cpu = tc.optim.AdamW8bit(variables, min_8bit_size=1, states="host")
    for var in variables:
        var.grad = tc.ones(*var.shape)
    cpu.step()
    saved = cpu.state_dict()
    # Each of the two variables has two states, as codes and scales. There are three other entries.
    assert len(saved) == 3 + 2 * 4
    for states, (layer, optimizer) in trainings.items():
        train(layer, optimizer, x)
        optimizer.load_state_dict(saved)
        mark(f"saved-{states}")
        found = optimizer.state_dict()
        mark(f"training-{states}")
        # A kernel would set the step counters. They may still be 0, and then `found` has no states.
        assert found.keys() <= saved.keys()
        train(layer, optimizer, x)
    """
    )
    assert run.of("refused") == []
    counts = []
    for states in ("device", "host"):
        saved = run.after(f"saved-{states}")
        counts.append(sum(call["kind"] == "cuMemcpyDtoHAsync" for call in saved.of("copy")))
        assert saved.of("synchronize")
    # States in GPU memory are four vectors: the codes and scales of both moments of all variables.
    # States in host memory need no copies; only the step counters are copied.
    assert counts[0] - counts[1] == 4


@pytest.mark.parametrize("limited", ["driver", "setting"])
def test_too_little_pinned_memory_is_an_error_that_names_the_cure(cuda: Any, limited: str) -> None:
    # Pinned memory is limited to 1 KiB by the simulated driver, or to 1000 bytes by the library's
    # environment variable.
    driver_settings = {"PINNED": str(1 << 10)} if limited == "driver" else {}
    set_limit = "" if driver_settings else "os.environ['TRAINABLE_CANDLE_PINNED_BYTES'] = '1000'"
    run = cuda.run(
        f"    {set_limit}"
        + TRAIN
        + """
    try:
        make_training("adamw", "host")
    except tc.errors.OutOfMemoryError as error:
        print(error)
    # The process can go on, with states in GPU memory.
    layer, optimizer = make_training("adamw", "device")
    train(layer, optimizer, x)
    """,
        settings=driver_settings,
    )
    assert "AdamW: " in run.output
    assert "of pinned memory for states of the optimizer" in run.output
    assert 'states "device"' in run.output


def test_making_an_optimizer_with_states_on_the_host_in_a_captured_function_is_an_error(
    cuda: Any,
) -> None:
    run = cuda.run(
        TRAIN
        + """
    def step(x):
        make_training("adamw", "host")
        return x * 2
    captured = tc.cuda.capture(step, [x])
    try:
        for _ in range(3):
            captured(x)
    except tc.errors.Error as error:
        print(error)
    # The process can go on.
    (x * 2).sum().item()
    """
    )
    assert run.output  # the error
