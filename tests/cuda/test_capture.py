"""Captured functions, copies, memory and DLPack on the simulated device.

The device's copies move data, but its kernels do not compute. `cuda.run` runs code in a process of
its own and returns the log of the calls of the simulated driver. `run.after(name)` is the part of
the log from `mark(name)` to the next mark. Calls of the kind "refused" are those that the driver
rejected, and `waits` are those for which the host waits.
"""

from typing import Any

STEP = """
    F = tc.nn.functional
    tc.manual_seed(0)
    weights = [tc.Var(tc.randn(s, device="cuda")) for s in ((64, 32), (10, 64))]
    fc1, fc2 = (tc.nn.Linear(weight) for weight in weights)

    def run(x, labels):
        for weight in weights:
            weight.zero_grad()
        loss = F.cross_entropy(fc2(F.dropout(fc1(x).relu(), 0.2)), labels)
        loss.backward()
        for weight in weights:
            weight.set(weight.detach() - 0.1 * weight.grad)
        return {"loss": loss, "rest": [None, (loss * 2,)]}

    def batch(seed):
        return tc.full((8, 32), float(seed)), tc.arange(8)
"""


def test_a_training_step_becomes_one_replay(cuda: Any) -> None:
    run = cuda.run(
        STEP
        + """
    step = tc.cuda.capture(run, batch(0))
    offsets = []
    for call in range(6):
        mark(f"call-{call}")
        result = step(*batch(call))
        # A graph needs the addresses of the gradients. The first call allocates the gradients, the
        # second call finds them allocated, and the third call records the graph.
        assert step.is_recorded == (call > 1)
        assert list(result) == ["loss", "rest"]
        assert result["loss"].shape == () and not result["loss"].requires_grad
        assert result["rest"][0] is None and isinstance(result["rest"][1], tuple)
        assert [w.grad.shape for w in weights] == [w.shape for w in weights]
        offsets.append(tc.get_rng_state()[1])
    mark("end")
    # Each call advances the random generator by the same amount.
    advances = {after - before for before, after in zip(offsets, offsets[1:])}
    assert len(advances) == 1 and advances.pop() > 0, offsets
    """
    )
    assert run.of("refused") == []
    eager, recorded = run.after("call-1"), run.after("call-2")
    assert eager.of("capture-begin", "replay") == []
    assert recorded.of("capture-end")[0]["valid"] == "1"
    assert len(recorded.of("replay")) == 1
    for call in (3, 4, 5):
        replay = run.after(f"call-{call}")
        assert len(replay.of("replay")) == 1
        assert replay.waits == []
        # A replay records nothing, allocates nothing, and makes no matrix product of its own.
        assert replay.of("capture-begin", "grow", "shrink", "alloc", "product") == []
        # The launches outside the graph copy the generator's offset, two inputs, two outputs, and
        # the two gradients that the code above reads.
        assert len(replay.launches) <= 7, replay.launches
    # The graph has at least one launch of each kernel that an eager call launches.
    kernels = int(run.after("call-3").of("replay")[0]["kernels"])
    assert kernels >= len(set(eager.launches))


def test_optimizers_step_in_a_graph(cuda: Any) -> None:
    for name in ("AdamW", "AdamW8bit", "Lion", "SGD"):
        run = cuda.run(f"""
            F = tc.nn.functional
            weights = [tc.Var(tc.randn(s, device="cuda")) for s in ((512, 32), (10, 512))]
            optimizer = tc.optim.{name}(weights, lr=1e-3)

            def train(x, labels):
                loss = F.cross_entropy(F.linear(F.linear(x, weights[0]).relu(), weights[1]), labels)
                loss.backward()
                norm = tc.optim.clip_grad_norm_(weights, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                return loss, norm

            x, labels = tc.zeros((8, 32), device="cuda"), tc.arange(8, device="cuda")
            step = tc.cuda.capture(train, [x, labels])
            for call in range(6):
                mark(f"call-{{call}}")
                loss, norm = step(x, labels)
                assert (loss.shape, norm.shape) == ((), ())
                assert [weight.grad for weight in weights] == [None, None]
            assert step.is_recorded
            mark("rate")
            optimizer.lr = 1e-4
            mark("end")
            # An eager step can follow the replays.
            train(x, labels)
            assert step(x, labels)[0].shape == ()
        """)
        assert run.of("refused") == [], name
        # These calls replay the graph; earlier calls allocate and record.
        for call in (4, 5):
            replay = run.after(f"call-{call}")
            assert len(replay.of("replay")) == 1
            assert replay.launches == []
            assert [copy for copy in replay.of("copy") if "HtoD" in copy["kind"]] == []
            assert replay.waits == []
        # A new learning rate is written between replays, without a synchronization.
        assert run.after("rate").launches == ["optim_configure"]
        assert run.after("rate").waits == []


def test_inputs_are_copied_and_outputs_are_copies(cuda: Any) -> None:
    cuda.run("""
        x = tc.tensor([1.0, 2.0], device="cuda")
        step = tc.cuda.capture(lambda x: x, [x])
        outputs = [step(tc.tensor([float(i), 0.0])) for i in range(4)]
        assert [y.tolist() for y in outputs] == [[float(i), 0.0] for i in range(4)]
        assert x.tolist() == [1.0, 2.0]
    """)


def test_wrong_inputs_are_rejected(cuda: Any) -> None:
    cuda.run("""
        x = tc.tensor([1.0, 2.0], device="cuda")
        step = tc.cuda.capture(lambda x: x, [x])
        for _ in range(4):
            step(x)
        for wrong, error in (
            ((tc.zeros(3),), tc.ShapeError),
            ((tc.zeros(2, dtype="f64"),), tc.DTypeError),
            ((), tc.ArgumentError),
        ):
            try:
                step(*wrong)
            except error as raised:
                assert str(raised).startswith("capture: "), raised
            else:
                raise AssertionError(wrong)
        try:
            tc.cuda.capture(lambda x: x, [tc.Var([1.0], device="cuda")])
        except tc.AutogradError as raised:
            assert "let the function use the variable itself" in str(raised)
        else:
            raise AssertionError
    """)


def test_functions_that_a_graph_cannot_repeat_are_rejected(cuda: Any) -> None:
    run = cuda.run("""
        import random, threading

        x = tc.tensor([1.0, 2.0], device="cuda")
        errors = []

        def use_in_thread(x):
            def use():
                try:
                    x + x
                except tc.DeviceError as error:
                    errors.append(error)
            thread = threading.Thread(target=use)
            thread.start()
            thread.join()
            if errors:
                raise errors.pop()
            return x

        cases = {
            "item": lambda x: x * x.max().item(),
            "numpy": lambda x: tc.tensor(x.numpy(), device="cuda"),
            "tolist": lambda x: x * x.tolist()[0],
            "to": lambda x: x.to("cpu").to("cuda"),
            "synchronize": lambda x: (tc.cuda.synchronize(), x)[1],
            "value": lambda x: x * tc.tensor([random.random(), 1.0], device="cuda"),
            "seed": lambda x: (tc.manual_seed(3), x * tc.rand(2, device="cuda"))[1],
            "thread": use_in_thread,
        }
        for name, function in cases.items():
            step = tc.cuda.capture(function, [x])
            # After a failure, the calls start over: the next call only runs the function again.
            for attempt in range(2):
                # The first call only runs the function. The second call records it and fails.
                step(x)
                try:
                    step(x)
                except tc.DeviceError as error:
                    if not attempt:
                        print(name, "|", error)
                else:
                    raise AssertionError(name)
                assert not step.is_recorded
            # Later operations of the process work.
            assert (x.tolist(), (x + x).shape) == ([1.0, 2.0], (2,))
        returns_cpu_tensor = tc.cuda.capture(lambda x: tc.zeros(2), [x])
        try:
            returns_cpu_tensor(x)
        except tc.DeviceError as error:
            assert "output 0 is on the CPU" in str(error)
        else:
            raise AssertionError
        for wrong in (lambda x: 3, lambda x: [x, "text"]):
            try:
                tc.cuda.capture(wrong, [x])(x)
            except TypeError as error:
                assert "expected a Tensor, None" in str(error)
            else:
                raise AssertionError
        assert tc.cuda.memory_stats()["graphs"] == 0
    """)
    messages = dict(line.split(" | ") for line in run.output.splitlines())
    for name in ("item", "numpy", "tolist", "synchronize"):
        assert messages[name].startswith(f"{name}: values are not known inside a captured function")
    assert messages["to"].startswith("to_device: values are not known")
    assert "copies a value from the CPU that the previous call did not copy" in messages["value"]
    assert "seeds the random generator" in messages["seed"]
    assert "another thread captures a function" in messages["thread"]


def test_replays_copy_constants_within_the_graph(cuda: Any) -> None:
    run = cuda.run("""
        import numpy as np

        x = tc.zeros(3, device="cuda")
        constant = np.array([5.0, 6.0, 7.0], dtype=np.float32)

        def function(x):
            return tc.tensor(constant, device="cuda")

        step = tc.cuda.capture(function, [x])
        for call in range(4):
            mark(f"call-{call}")
            assert step(x).tolist() == [5.0, 6.0, 7.0]
        assert step.is_recorded
        mark("end")
    """)
    assert run.of("refused") == []
    copies = [call for call in run.after("call-3").of("copy") if "HtoD" in call["kind"]]
    assert copies == []
    assert int(run.after("call-3").of("replay")[0]["copies"]) >= 1


def test_a_captured_function_can_be_part_of_another(cuda: Any) -> None:
    run = cuda.run("""
        x = tc.tensor([1.0, 2.0], device="cuda")
        inner = tc.cuda.capture(lambda x: (x, x * 2), [x])
        outer = tc.cuda.capture(lambda x: inner(x)[0], [x])
        for call in range(4):
            mark(f"call-{call}")
            assert outer(tc.tensor([float(call), 0.0])).tolist() == [float(call), 0.0]
        assert outer.is_recorded and not inner.is_recorded
        assert inner(x)[0].tolist() == [1.0, 2.0]
    """)
    assert run.of("refused") == []
    assert len(run.after("call-2").of("replay")) == 1


def test_graphs_share_memory_and_free_it(cuda: Any) -> None:
    cuda.run("""
        import gc

        def function(x):
            for _ in range(4):
                x = x @ x
            return x

        def graph_bytes():
            return tc.cuda.memory_stats()["graphs"]

        x = tc.zeros((1024, 1024), device="cuda")
        first = tc.cuda.capture(function, [x])
        first(x), first(x)
        alone = graph_bytes()
        assert alone >= 8 << 20  # two matrices of 4 MiB
        y = tc.zeros((2, 1024, 1024), device="cuda")
        second = tc.cuda.capture(function, [y])
        second(y), second(y)
        # The second graph needs twice as much as the first, and shares the memory of the first.
        assert graph_bytes() < 3 * alone
        before = tc.cuda.memory_stats()
        for _ in range(5):
            first(x), second(y)
        after = tc.cuda.memory_stats()
        assert (after["growths"], after["reserved"]) == (before["growths"], before["reserved"])
        del first
        assert graph_bytes() > 0
        del second
        assert graph_bytes() == 0

        # Python's collector frees a reference cycle that contains the captured function.
        class Owner:
            def __init__(self):
                self.step = tc.cuda.capture(self.run, [x])

            def run(self, x):
                return x @ x

        owner = Owner()
        owner.step(x), owner.step(x)
        assert graph_bytes() > 0
        del owner
        gc.collect()
        assert graph_bytes() == 0
    """)


def test_running_out_of_memory_during_a_capture_is_an_error(cuda: Any) -> None:
    run = cuda.run("""
        state = {"large": False}

        def function(x):
            return x + (tc.zeros((1 << 30,), device="cuda")[:1] if state["large"] else 0.0)

        x = tc.zeros(1, device="cuda")
        step = tc.cuda.capture(function, [x])
        step(x)
        state["large"] = True
        try:
            step(x)
        except tc.OutOfMemoryError as error:
            print(error)
        else:
            raise AssertionError
        state["large"] = False
        for _ in range(3):
            step(x)
        assert step.is_recorded
    """, settings={"MEMORY": str(2 << 30)})  # fmt: skip
    # The device has 2 GiB, and the function's tensor of 2^30 f32 numbers takes 4 GiB.
    assert "needs 4.00 GiB" in run.output


def test_unused_memory_can_be_given_back(cuda: Any) -> None:
    run = cuda.run("""
        x = tc.zeros((64, 1024, 1024), device="cuda")  # 256 MiB
        used = tc.zeros(3, device="cuda")
        del x
        before = tc.cuda.memory_stats()
        assert before["reserved"] >= 256 << 20 and before["allocated"] < 64 << 20
        assert tc.cuda.empty_cache() >= 256 << 20
        after = tc.cuda.memory_stats()
        assert after["reserved"] < 64 << 20 and after["free"] > before["free"]
        assert used.tolist() == [0.0] * 3
    """)
    assert run.of("refused") == []


def test_many_copies_from_the_host_arrive(cuda: Any) -> None:
    run = cuda.run("""
        import numpy as np

        rng = np.random.default_rng(0)
        arrays = [rng.standard_normal(n).astype(np.float32) for n in (1, 700_001, 5, 3_000_000) * 4]
        mark("copies")
        on_device = [tc.tensor(array, device="cuda") for array in arrays]
        mark("end")
        assert all((t.numpy() == a).all() for t, a in zip(on_device, arrays))
    """)
    assert run.of("refused") == []
    # All copies pass through pinned memory.
    copies = [call for call in run.after("copies").of("copy") if "HtoD" in call["kind"]]
    assert copies
    assert all(call["pageable"] == "0" for call in copies)


def test_dlpack_exports_to_valid_streams_only(cuda: Any) -> None:
    run = cuda.run("""
        t = tc.tensor([[1.0, 2.0], [3.0, 4.0]], device="cuda")
        assert t.__dlpack_device__() == (2, 0)  # CUDA, device 0
        # In DLPack's protocol, 1 is the legacy default stream, and -1 asks for no synchronization.
        for stream in (None, 1, -1):
            capsule = t.T.__dlpack__(stream=stream, max_version=(1, 0))
            copy = tc.from_dlpack(capsule)
            assert (copy.device, copy.shape, copy.dtype) == ("cuda:0", (2, 2), "f32")
        assert tc.from_dlpack(t).device == "cuda:0"
        assert tc.tensor(t, device="cpu").device == "cpu"
        # The protocol forbids 0, and other negative numbers have no meaning.
        for stream in (0, -2):
            try:
                t.__dlpack__(stream=stream)
            except BufferError as error:
                assert f"stream is {stream}" in str(error)
            else:
                raise AssertionError
    """)
    assert run.of("refused") == []


def test_a_dlpack_capsule_keeps_the_memory_of_its_tensor(cuda: Any) -> None:
    run = cuda.run("""
        tc.zeros(1, device="cuda")
        before = tc.cuda.memory_stats()["allocated"]
        big = tc.zeros((1024, 1024), device="cuda")
        capsule = big.__dlpack__(max_version=(1, 0))
        del big
        assert tc.cuda.memory_stats()["allocated"] >= before + (4 << 20)
        del capsule
        assert tc.cuda.memory_stats()["allocated"] == before
    """)
    assert run.of("refused") == []
