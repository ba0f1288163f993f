"""Captured functions whose state on the host, such as a learning rate, changes between calls.

The next call replays the graph with the new state, runs without the graph (a later call then
records it again), or raises an error. `cuda.run` runs code on a simulated device and returns the
log of its calls. `run.after(name)` is the part of the log from `mark(name)` to the next mark, and
calls of the kind "refused" are those that the simulated driver rejected. The device's kernels do
not compute; test_frozen_gpu.py compares the values.
"""

import struct
from typing import Any

import pytest

TRAIN = """
    from contextlib import contextmanager

    @contextmanager
    def raises(error, *texts):
        try:
            yield
        except error as raised:
            assert all(text in str(raised) for text in texts), raised
        else:
            raise AssertionError(texts)

    F = tc.nn.functional
    tc.manual_seed(0)
    layer = tc.nn.LoRALinear(tc.randn(64, 64, dtype="bf16", device="cuda"), 8, 8.0)
    parameters = list(layer.parameters())
    opt = tc.optim.OPTIMIZER
    more = lambda: None  # more work of a step; tests replace this function

    def train(x):
        loss = F.dropout(layer(x), 0.1).sum()
        loss.backward()
        norm = tc.optim.clip_grad_norm_(parameters, 1.0)
        opt.step(if_finite=norm)
        more()
        opt.zero_grad()
        return loss, norm

    x = tc.randn(32, 64, dtype="bf16", device="cuda")

    def recorded_step():
        step = tc.cuda.capture(train, [x])
        while not step.is_recorded:
            step(x)
        return step
"""
ADAMW = TRAIN.replace("OPTIMIZER", "AdamW(parameters, lr=0.1)")


def test_loaded_states_reach_the_graph(cuda: Any) -> None:
    run = cuda.run(
        ADAMW
        + """
    step = recorded_step()
    # Simulated kernels do not count steps, so the loaded states come from an optimizer on the CPU.
    cpu_layer = tc.nn.LoRALinear(tc.randn(64, 64), 8, 8.0)
    cpu_opt = tc.optim.AdamW(list(cpu_layer.parameters()), lr=0.1)
    cpu_layer(tc.ones(1, 64)).sum().backward()
    cpu_opt.step()
    states = cpu_opt.state_dict()
    mark("load")
    opt.load_state_dict(states)
    mark("rate")
    opt.lr = 0.05
    mark("replay")
    step(x)
    mark("after")
    # When the function was recorded, the variables had equal step counts. In these states, the
    # counts differ, so the function must be recorded again.
    states["step"] = tc.tensor([2, 1], dtype="i64")
    opt.load_state_dict(states)
    for call in range(3):
        mark(f"call-{call}")
        step(x)
    """
    )
    assert run.of("refused") == []
    # The graph reads one buffer with the first moments of all variables and one with their second
    # moments: loading takes one copy to each. `optim_configure` writes the settings of a step, such
    # as its number and the learning rate.
    loaded = run.after("load").launches
    assert loaded.count("copy_bytes_4") == 2
    assert loaded.count("optim_configure") == 1
    assert run.after("rate").launches == ["optim_configure"]
    assert len(run.after("replay").of("replay")) == 1
    eager, recorded, replayed = (run.after(f"call-{call}") for call in range(3))
    assert eager.of("capture-begin", "replay") == []
    assert len(recorded.of("capture-end")) == len(recorded.of("replay")) == 1
    assert replayed.of("capture-begin") == []
    assert len(replayed.of("replay")) == 1


def test_a_graph_is_recorded_again_after_a_step_of_one_variable(cuda: Any) -> None:
    run = cuda.run(
        ADAMW
        + """
    step = recorded_step()
    step(x)
    # This step changes the first variable alone.
    (parameters[0] * 2).sum().backward()
    opt.step()
    opt.zero_grad()
    for call in range(3):
        mark(f"call-{call}")
        step(x)
    """
    )
    # The first call runs without a graph. The second call records the function and replays it.
    assert [len(run.after(f"call-{call}").of("replay")) for call in range(3)] == [0, 1, 1]


def test_a_step_without_gradients_is_not_replayed(cuda: Any) -> None:
    run = cuda.run(
        ADAMW
        + """
    def update(x):
        opt.step()
        return x

    step = tc.cuda.capture(update, [x])
    layer(x).sum().backward()
    for call in range(3):
        step(x)
    opt.zero_grad()
    mark("none")
    step(x)
    mark("end")
    """
    )
    # Without gradients, the optimizer changes nothing. The graph updates variables, so it must not
    # be replayed.
    assert run.after("none").of("replay") == []
    assert not any(name.startswith("adam_step") for name in run.after("none").launches)


def test_a_recording_that_is_rejected_changes_nothing(cuda: Any) -> None:
    run = cuda.run(
        """
    weights = [tc.Var(tc.ones(4, device="cuda")) for _ in range(2)]
    opt = tc.optim.AdamW(weights, lr=0.1)
    both = True

    def train(x):
        opt.zero_grad()
        (x * weights[0] + (weights[1] if both else 0.0)).sum().backward()
        opt.step()
        return x

    x = tc.ones(4, device="cuda")
    step = tc.cuda.capture(train, [x])
    step(x)
    both = False
    try:
        step(x)
    except tc.DeviceError as error:
        assert "the function changes the sets of variables" in str(error)
    else:
        raise AssertionError
    mark("eager")
    train(x)
    mark("end")
    """
    )
    # Variables that take a step together share settings (learning rate, step number) in GPU memory.
    # The rejected recording would have stepped the first variable alone, but was undone: the two
    # still share settings. So the eager step, of the first variable alone, must write new ones. If
    # the recording were not undone, the first variable would have its own already, and the eager
    # step would write none.
    assert run.after("eager").launches.count("optim_configure") == 1


def test_a_set_value_is_copied_to_the_master_values_before_a_replay(cuda: Any) -> None:
    run = cuda.run(
        """
    weight = tc.Var(tc.ones(64, dtype="bf16", device="cuda"))
    opt = tc.optim.AdamW([weight], lr=0.1)

    def train(x):
        (x * weight).sum().backward()
        opt.step()
        opt.zero_grad()
        return x

    x = tc.ones(64, dtype="bf16", device="cuda")
    step = tc.cuda.capture(train, [x])
    step(x)
    for name in ("recorded", "replayed"):
        weight.set(tc.zeros(64, dtype="bf16", device="cuda"))
        mark(name)
        step(x)
    mark("unchanged")
    step(x)
    mark("end")
    """
    )
    assert run.of("refused") == []
    for name in ("recorded", "replayed"):
        call = run.after(name)
        copies = [c["captured"] for c in call.of("launch") if c["name"] == "copy_bf16_f32"]
        # The optimizer updates master values: an f32 copy of the weight. `set` has changed the
        # weight, so a launch outside the graph copies the new weight into the master values before
        # the replay.
        assert copies == ["0"], name
        assert len(call.of("replay")) == 1
    assert "copy_bf16_f32" not in run.after("unchanged").launches


AVERAGE = """
    model = tc.models.DigitsTransformer.from_pretrained(BASE, device="cuda")
    adapter = model.add_adapter(tc.LoraConfig(r=2, target_modules=["to_q"]))
    ema = tc.optim.EMA(adapter, decay=0.9, warmup=True)
"""


def weights_of_updates(calls: list[Any]) -> list[float]:
    """The weight of the trained value, 1 - decay, in each update of averages.

    The kernel `fill_f64` writes this number, its last argument, whose bits the log has in
    hexadecimal.
    """
    filled = [c["arguments"].split(",")[-1] for c in calls if c["name"] == "fill_f64"]
    return [struct.unpack("<d", struct.pack("<Q", int(number, 16)))[0] for number in filled]


def test_replays_follow_the_warmup_of_averages_and_fail_while_swapped_in(
    cuda: Any, digits_base: Any
) -> None:
    run = cuda.run(
        AVERAGE.replace("BASE", repr(str(digits_base)))
        + """
    def update(x):
        ema.update()
        return x

    x = tc.ones(3, device="cuda")
    step = tc.cuda.capture(update, [x])
    mark("updates")
    for call in range(6):
        step(x)
        assert (step.is_recorded, ema.updates) == (call > 0, call + 1)
    mark("load")
    state = ema.state_dict()
    state["updates"] = tc.tensor([20], dtype="i64")  # still within the warm-up: 21 / 30 < 0.9
    ema.load_state_dict(state)
    step(x)
    assert ema.updates == 21
    mark("swapped")
    with ema:  # puts the averages in the place of the parameters
        try:
            step(x)
        except tc.ArgumentError as error:
            assert "update() found the averages in place" in str(error)
        else:
            raise AssertionError
    assert ema.updates == 21
    """
    )
    assert run.of("refused") == []
    # While the averages warm up, the decay after n updates is (1 + n) / (10 + n), at most 0.9.
    found = weights_of_updates(run.after("updates").of("launch"))
    assert found == [1 - min(0.9, (1 + n) / (10 + n)) for n in range(6)]
    assert weights_of_updates(run.after("load").of("launch")) == [1 - 21 / 30]
    assert len(run.after("load").of("replay")) == 1
    assert run.after("swapped").of("replay") == []


# Code that defines `more`, which runs within the captured step, and a part of the error.
REJECTED = {
    "rate": ("def more(): opt.lr = 0.01", "the hyper-parameters of an optimizer"),
    "schedule": (
        "schedule = tc.optim.lr_scheduler.linear(opt, total_steps=10)\n    more = schedule.step",
        "the hyper-parameters of an optimizer",
    ),
    "load": (
        "states = opt.state_dict()\n    def more(): opt.load_state_dict(states)",
        "the hyper-parameters of an optimizer",
    ),
    "keep": (
        "kept = []\n    def more(): kept.append(x * 2)",
        "the function keeps 1 tensor (",
    ),
}


@pytest.mark.parametrize(("change", "reason"), REJECTED.values(), ids=REJECTED)
def test_changes_that_replays_would_not_repeat_are_rejected(
    cuda: Any, change: str, reason: str
) -> None:
    cuda.run(
        ADAMW
        + f"""
    {change}
    step = tc.cuda.capture(train, [x])
    step(x)
    with raises(tc.DeviceError, "capture: ", {reason!r}):
        step(x)
    assert not step.is_recorded
    if {change!r}.startswith("schedule"):
        assert schedule.last_step == 1  # the rejected call has not advanced the schedule
    more = lambda: None
    step(x)
    step(x)
    assert step.is_recorded
    assert tc.cuda.memory_stats()["graphs"] > 0
    """
    )


def test_graphs_reject_two_updates_and_a_swap_of_averages(cuda: Any, digits_base: Any) -> None:
    cuda.run(
        AVERAGE.replace("BASE", repr(str(digits_base)))
        + """
    def twice(x):
        ema.update()
        ema.update()
        return x

    def swaps(x):
        with ema:
            pass
        return x

    x = tc.ones(3, device="cuda")
    for function, text in ((twice, "averages twice in a call"), (swaps, "or trained values")):
        step = tc.cuda.capture(function, [x])
        step(x)
        before = ema.updates
        try:
            step(x)
        except tc.DeviceError as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
        assert (ema.updates, ema.is_swapped_in) == (before, False)
    """
    )


def test_a_loss_scaler_is_recorded_after_a_failure_but_not_without_its_step(cuda: Any) -> None:
    cuda.run(
        ADAMW
        + """
    scaler = tc.optim.GradScaler()
    fails = False

    def scaled(x):
        scaler.scale(layer(x).to("f32").sum()).backward()
        scaler.step(opt)
        if fails:
            raise RuntimeError("fails")
        scaler.update()
        opt.zero_grad()
        return x

    step = tc.cuda.capture(scaled, [x])
    step(x)
    fails = True
    with raises(RuntimeError, "fails"):
        step(x)
    fails = False
    for call in range(3):
        step(x)
    assert step.is_recorded

    def divided(x):
        scaler.scale(layer(x).to("f32").sum()).backward()
        scaler.unscale_(opt)
        return x

    part = tc.cuda.capture(divided, [x])
    part(x)
    scaler.update()
    # The scaler keeps the tensor in which unscale_() notes infinite gradients, until step() reads
    # it. Only the graph would have this tensor, so no step() outside the graph could read it.
    with raises(tc.DeviceError, "the function keeps 1 tensor ("):
        part(x)
    """
    )


OPTIMIZERS = {
    "AdamW": "AdamW(parameters, lr=0.1)",
    "Adam, two groups": (
        "Adam([{'params': parameters[:1]}, {'params': parameters[1:], 'lr': 0.2}], lr=0.1)"
    ),
    "AdamW8bit": "AdamW8bit(parameters, lr=0.1, min_8bit_size=1)",
    "Lion": "Lion(parameters, lr=0.1)",
    "Lion8bit": "Lion8bit(parameters, lr=0.1, min_8bit_size=1)",
    "SGD": "SGD(parameters, lr=0.1, momentum=0.9)",
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_recording_does_not_depend_on_the_number_of_steps_before(
    cuda: Any, digits_base: Any, optimizer: str
) -> None:
    """No argument of a recorded kernel may be a number that the host counts, such as the step."""
    run = cuda.run(
        TRAIN.replace("OPTIMIZER", optimizer)
        + AVERAGE.replace("BASE", repr(str(digits_base)))
        + """
    schedule = tc.optim.lr_scheduler.cosine(opt, total_steps=20)
    scaler = tc.optim.GradScaler(growth_interval=2)

    def more():
        ema.update()
        scaler.scale(layer(x).to("f32").sum()).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()

    for record in range(2):
        mark(f"record-{record}")
        step = recorded_step()
        for call in range(3):
            step(x)
            schedule.step()
    mark("end")
    """
    )
    assert run.of("refused") == []
    first, second = (
        [
            (call["name"], call["arguments"])
            for call in run.after(f"record-{record}").of("launch")
            if call["captured"] == "1"
        ]
        for record in range(2)
    )
    assert first
    assert first == second
