"""Devices and their memory, on a simulated GPU.

The GPU's kernels compute nothing, but its copies and its fills with zeros are real.
"""

from typing import Any

GIB = 1 << 30


def test_values_go_to_the_device_and_come_back(cuda: Any) -> None:
    # `run.of("refused")` are calls that the simulated libraries have rejected.
    run = cuda.run("""
        import numpy as np

        for dtype in ("f32", "f64", "f16", "bf16", "u8", "u32", "i64"):
            values = tc.tensor([[1, 2, 3], [4, 5, 6]], dtype=dtype)
            there = values.to("cuda")
            assert (there.device, there.dtype, there.shape) == ("cuda:0", values.dtype, (2, 3))
            assert there.to("cpu").tolist() == there.tolist() == values.tolist(), dtype
            zeros = tc.zeros((2, 3), dtype=dtype, device="cuda")
            assert zeros.tolist() == [[0] * 3] * 2, dtype
            assert tc.zeros((0, 3), dtype=dtype, device="cuda").to("cpu").shape == (0, 3)
        array = np.arange(300_000, dtype=np.float32)
        assert (tc.tensor(array, device="cuda").numpy() == array).all()
        part = tc.tensor(array, device="cuda")[1000:1003]
        assert part.tolist() == [1000.0, 1001.0, 1002.0]
    """)
    assert run.of("refused") == []


def test_a_copy_is_on_the_device_of_its_source_unless_another_is_named(cuda: Any) -> None:
    run = cuda.run("""
        x = tc.tensor([1, 2, 3], device="cuda")
        for copy in (x.clone(), tc.tensor(x), tc.tensor(x, dtype="i64"), x.detach().clone()):
            assert copy.device == x.device, copy.device
        assert tc.tensor(x, device="cpu").device == "cpu"
        assert tc.tensor([1, 2, 3]).device == "cpu"
    """)
    assert run.of("refused") == []


def test_tensors_move_between_devices_but_operands_must_share_one(cuda: Any) -> None:
    run = cuda.run("""
        here, there = tc.zeros(3, device="cuda:0"), tc.zeros(3, device="cuda:1")
        assert (here.device, there.device) == ("cuda:0", "cuda:1")
        assert here.to("cuda:1").device == "cuda:1"
        assert tc.tensor([1.0, 2.0], device="cuda:1").to("cuda:0").tolist() == [1.0, 2.0]
        cases = {
            "add": lambda: here + there,
            "cpu and cuda": lambda: here + tc.zeros(3),
            "matmul": lambda: tc.zeros((2, 3), device="cuda:0") @ tc.zeros((3, 2), device="cuda:1"),
            "cat": lambda: tc.cat([here, there], 0),
            "set": lambda: tc.Var(here).set(there),
        }
        for name, use in cases.items():
            try:
                use()
            except tc.DeviceError as error:
                print(name, "|", error)
            else:
                raise AssertionError(name)
        assert (tc.zeros(3, device="cuda:1") + there).device == "cuda:1"
    """, settings={"DEVICES": "2"})  # fmt: skip
    assert len(run.output.splitlines()) == 5  # one error for each case


def test_memory_is_counted(cuda: Any) -> None:
    cuda.run("""
        tc.zeros(1, device="cuda")
        before = tc.cuda.memory_stats()
        assert before["total"] == 80 << 30
        big = tc.zeros((256, 1024, 1024), dtype="u8", device="cuda")
        during = tc.cuda.memory_stats()
        assert during["allocated"] - before["allocated"] == 256 << 20
        assert during["peak_allocated"] >= during["allocated"]
        assert during["reserved"] >= during["allocated"]
        # A part of the tensor, up to 64 MiB, may lie in memory that was already reserved.
        assert during["free"] <= before["free"] - (256 << 20) + (64 << 20)
        del big
        after = tc.cuda.memory_stats()
        assert after["allocated"] == before["allocated"]
        assert after["peak_allocated"] == during["peak_allocated"]
        tc.cuda.reset_peak_memory_stats()
        assert tc.cuda.memory_stats()["peak_allocated"] == before["allocated"]
    """)


def test_the_name_of_a_device_is_its_product_name(cuda: Any) -> None:
    cuda.run("""
        assert tc.cuda.get_device_name() == tc.cuda.get_device_name("cuda:0") == "Simulated GPU"
    """)


def test_memory_can_be_limited(cuda: Any) -> None:
    # The first size of each tensor is its memory in MiB. The limit leaves 64 MiB beside `medium`,
    # which is too little for 128 and enough for `small`. After both are freed, 128 MiB fit, too.
    cuda.run("""
        medium = tc.zeros((100, 1 << 20), dtype="u8", device="cuda")
        limit = tc.cuda.memory_stats()["reserved"] + (64 << 20)
        tc.cuda.set_memory_limit(limit)
        try:
            tc.zeros((128, 1 << 20), dtype="u8", device="cuda")
        except tc.OutOfMemoryError as error:
            assert f"the limit is {limit / (1 << 30):.2f} GiB" in str(error), error
        else:
            raise AssertionError("the tensors take more than the limit, without an error")
        small = tc.zeros((32, 1 << 20), dtype="u8", device="cuda")
        # Freed memory can be allocated again, whatever the sizes of the freed blocks.
        del medium, small
        large = tc.zeros((128, 1 << 20), dtype="u8", device="cuda")
        assert tc.cuda.memory_stats()["reserved"] <= limit
        tc.cuda.set_memory_limit(None)
        huge = tc.zeros((1024, 1 << 20), dtype="u8", device="cuda")
        assert tc.cuda.memory_stats()["reserved"] > limit
    """)


def test_a_process_goes_on_after_errors_of_full_memory(cuda: Any) -> None:
    # The GPU has 2 GiB. `zeros` and `full` need 3 GiB of f32, and `matmul` needs 16 GiB for its
    # 2**16 by 2**16 results. Each tensor of `half` takes 0.5 GiB, and the last tensor 1 GiB.
    run = cuda.run("""
        values = tc.tensor([1.0, 2.0], device="cuda")
        uses = {
            "zeros": lambda: tc.zeros((3, 1024, 1024, 256), device="cuda"),
            "full": lambda: tc.full((3, 1024, 1024, 256), 1.5, device="cuda"),
            "matmul": lambda: (
                tc.zeros((1 << 16, 1), device="cuda") @ tc.zeros((1, 1 << 16), device="cuda")
            ),
        }
        for name, use in uses.items():
            try:
                use()
            except tc.OutOfMemoryError as error:
                print(error)
                assert isinstance(error, MemoryError)
            else:
                raise AssertionError(name)
        assert values.tolist() == [1.0, 2.0]
        half = [tc.zeros((1024, 1024, 128), device="cuda") for _ in range(2)]
        assert tc.cuda.memory_stats()["allocated"] > GIB
        del half
        assert tc.zeros((1024, 1024, 256), device="cuda").shape == (1024, 1024, 256)
    """.replace("GIB", str(GIB)), settings={"MEMORY": str(2 * GIB)})  # fmt: skip
    messages = run.output.splitlines()
    assert len(messages) == 3
    for name, message in zip(("zeros", "full", "matmul"), messages, strict=True):
        assert message.startswith(f"{name}: ")
        assert "needs 3.00 GiB" in message or "needs 16.00 GiB" in message
        assert "2.00" in message  # the GPU's memory in GiB


def test_a_gradient_without_memory_for_its_copy_is_an_error(cuda: Any) -> None:
    # The gradient is a part of the optimizer's flat buffer, and each reading of `var.grad` makes a
    # copy of 1 GiB. The tensors in `held` fill the memory in steps of 0.5 GiB, so the copy fails
    # before a new tensor does.
    cuda.run("""
        import pytest
        var = tc.Var(tc.zeros((256, 1024, 1024), device="cuda"))
        optimizer = tc.optim.SGD([var], lr=0.1)
        (var * 2).sum().backward()
        held = []
        with pytest.raises(tc.OutOfMemoryError):
            while True:
                assert var.grad is not None
                held.append(tc.zeros((128, 1024, 1024), device="cuda"))
        del held
        assert var.grad is not None
    """, settings={"MEMORY": str(6 * GIB)})  # fmt: skip


def test_repeated_work_neither_allocates_nor_waits(cuda: Any) -> None:
    run = cuda.run("""
        x = tc.zeros((512, 512), device="cuda")
        for step in range(20):
            if step == 2:
                mark("warm")
            y = (x * 2 + x).relu() @ x
            del y
    """)
    warm = run.after("warm")  # the calls of the simulated libraries after `mark("warm")`
    assert warm.of("grow", "alloc", "shrink") == []
    assert warm.waits == []
    # Each of the 18 steps launches `*`, `+` and `relu`. `@` is a call of cuBLAS.
    assert len(warm.launches) == 18 * 3


def test_cached_memory_goes_back_between_phases(cuda: Any) -> None:
    run = cuda.run(
        """
        from types import SimpleNamespace
        from trainable_candle.tasks.latent.model import LatentModel
        x = tc.zeros((1 << 26,), device="cuda")
        del x
        print(tc.cuda.memory_stats("cuda")["reserved"])
        LatentModel.release_cached_memory(SimpleNamespace(device="cuda"))
        print(tc.cuda.memory_stats("cuda")["reserved"])
        """
    )
    before, after = map(int, run.output.split())
    assert before >= 1 << 28 > after
