"""Calls to NCCL on simulated GPUs. The ranks are threads of one process, each with a GPU.

`all_reduce_gradients` also sums its argument `tail`, such as losses and counts of a step. Calls of
the kind "refused" in a log are those that the simulated libraries rejected.
"""

from typing import Any

import pytest

from trainable_candle import _core
from trainable_candle.errors import CudaUnavailableError

TWO_RANKS = """
    import threading
    from trainable_candle import _core
    from trainable_candle.errors import ArgumentError, CudaUnavailableError, DeviceError

    # Call work(communicator, device) in a thread for each of two ranks. Return each rank's error or
    # None.
    def run_two_ranks(work):
        identifier = _core.nccl_unique_id()
        errors = [None, None]

        def run(rank):
            try:
                device = f"cuda:{rank}"
                # 2 ranks, which have 20 seconds to join.
                work(_core.NcclCommunicator(device, rank, 2, identifier, 20.0), device)
            except Exception as error:
                errors[rank] = error

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return errors

    def make_parameters(device):
        shapes = ((40, 3), (7,))
        parameters = [tc.Var(tc.ones(shape), device=device) for shape in shapes]
        # The optimizer gives the gradients, 127 numbers, one flat buffer.
        tc.optim.AdamW(parameters, lr=1e-3)
        return parameters
"""
"""The start of a snippet: imports, and functions for tests with two ranks."""


def test_a_step_sums_all_gradients_in_one_all_reduce(cuda: Any) -> None:
    run = cuda.run(
        TWO_RANKS
        + """
    def work(group, device):
        parameters = make_parameters(device)
        for step in range(3):
            # Rank 1 has no gradient for the second parameter.
            for var in parameters[: 2 - group.rank]:
                var.grad = tc.ones(var.shape, device=device)
            tail = tc.zeros((3,), dtype="f64", device=device)
            group.all_reduce_gradients(parameters, tail)
            assert all(var.grad is not None for var in parameters)
            group.wait(10.0)
        group.broadcast_(parameters[0], 0)
        group.wait(10.0)

    assert run_two_ranks(work) == [None, None]
    """,
        settings={"DEVICES": "2"},
    )
    assert run.of("refused") == []
    for rank in "01":
        calls = [call for call in run.of("nccl") if call["rank"] == rank]
        assert [call["op"] for call in calls] == [
            "init",
            *["all_reduce"] * 6,
            "broadcast",
            "destroy",
        ]
        sums = [call for call in calls if call["op"] == "all_reduce"]
        # One all-reduce sums all gradients (f32, NCCL's type 7). The all-reduce of the `tail` (f64,
        # type 8) is in the same NCCL group.
        assert [(call["count"], call["type"]) for call in sums] == [("127", "7"), ("3", "8")] * 3
        assert all(call["in_place"] == "1" and call["group"] == "1" for call in sums)
    # The program copies nothing to the host.
    assert [copy for copy in run.of("copy") if copy["kind"].startswith("cuMemcpyDtoH")] == []


def test_a_narrow_sum_of_gradients_is_in_bf16(cuda: Any) -> None:
    run = cuda.run(
        TWO_RANKS
        + """
    def work(group, device):
        parameters = make_parameters(device)
        tail = tc.zeros((3,), dtype="f64", device=device)
        group.all_reduce_gradients(parameters, tail, narrow=True)
        group.wait(10.0)

    assert run_two_ranks(work) == [None, None]
    """,
        settings={"DEVICES": "2"},
    )
    sums = [call for call in run.of("nccl") if call["op"] == "all_reduce"]
    # The gradients are summed in bf16 (NCCL's type 9). The `tail` stays f64 (type 8).
    assert (
        sorted((call["count"], call["type"]) for call in sums)
        == [("127", "9")] * 2 + [("3", "8")] * 2
    )


def test_a_rank_aborts_if_its_tensor_has_another_size_than_that_of_the_other_rank(
    cuda: Any,
) -> None:
    run = cuda.run(
        TWO_RANKS
        + """
    barrier = threading.Barrier(2)

    def work(group, device):
        group.all_reduce(tc.ones((5,), device=device))
        barrier.wait()
        # Rank 0 makes its second call first. So NCCL finds the wrong size in the call of rank 1.
        if group.rank == 1:
            barrier.wait()
        try:
            group.all_reduce(tc.ones((5 + group.rank,), device=device))
        finally:
            if group.rank == 0:
                barrier.wait()
            else:
                try:
                    group.wait(1.0)
                except DeviceError as error:
                    assert "aborted" in str(error), error

    errors = run_two_ranks(work)
    assert errors[0] is None, errors
    assert "NCCL reports: invalid usage" in str(errors[1]), errors
    """,
        settings={"DEVICES": "2"},
    )
    assert [call["why"] for call in run.of("refused")] == ["ranks-differ"]
    assert len([call for call in run.of("nccl") if call["op"] == "abort"]) == 1


def test_a_negative_time_for_joining_is_rejected(cuda: Any) -> None:
    run = cuda.run(
        TWO_RANKS
        + """
    try:
        _core.NcclCommunicator("cuda", 0, 2, _core.nccl_unique_id(), -1.0)
    except ArgumentError as error:
        assert "NcclCommunicator: seconds is -1, expected" in str(error), error
    else:
        raise AssertionError("the communicator accepts a negative number of seconds")
    """
    )
    assert run.of("nccl") == []


def test_joining_alone_fails_after_the_given_seconds(cuda: Any) -> None:
    run = cuda.run(
        TWO_RANKS
        + """
    identifier = _core.nccl_unique_id()
    try:
        _core.NcclCommunicator("cuda", 0, 2, identifier, 0.3)
    except DeviceError as error:
        assert "not all of the 2 processes have joined within 0.3 s" in str(error), error
    else:
        raise AssertionError("rank 0 has joined alone")
    """
    )
    assert [call["op"] for call in run.of("nccl")] == ["init", "abort"]


def test_a_stopped_communicator_waits_for_no_rank(cuda: Any) -> None:
    cuda.run(
        TWO_RANKS
        + """
    def work(group, device):
        if group.rank == 0:
            group.stop()
            group.all_reduce(tc.ones((5,), device=device))

    errors = run_two_ranks(work)
    assert errors[1] is None
    # Rank 0 checks for a stop only if its call is not done yet, so the call may succeed.
    assert errors[0] is None or "another process has ended" in str(errors[0]), errors
    """,
        settings={"DEVICES": "2"},
    )


# The value of SIMULATED_NCCL_FAIL: joining fails ("init"), or the second call of a rank ("2").
@pytest.mark.parametrize("fail", ["init", "2"], ids=["joining", "second call"])
def test_errors_of_nccl_are_raised_with_their_reason(cuda: Any, fail: str) -> None:
    cuda.run(
        f"""
    import os
    os.environ["SIMULATED_NCCL_FAIL"] = "{fail}"
    """
        + TWO_RANKS
        + """
    def work(group, device):
        for _ in range(3):
            group.all_reduce(tc.ones((5,), device=device))
            group.wait(5.0)

    errors = run_two_ranks(work)
    assert all("NCCL reports: remote process exited" in str(error) for error in errors), errors
    """,
        settings={"DEVICES": "2"},
    )


def test_the_error_of_a_missing_or_old_library_says_what_is_needed(cuda: Any) -> None:
    all_but_nccl = tuple(name for name in cuda.simulate.LIBRARIES if name != cuda.simulate.NCCL)
    code = """
    import os
    from trainable_candle import _core
    from trainable_candle.errors import CudaUnavailableError
    try:
        print(_core.nccl_version())
    except CudaUnavailableError as error:
        print(error)
    """
    run = cuda.run(code, libraries=all_but_nccl)
    assert 'pip install "trainable-candle[nccl]"' in run.output
    old = code.replace("try:", 'os.environ["SIMULATED_NCCL_VERSION"] = "21903"\n    try:')
    run = cuda.run(old)
    assert "found NCCL 2.19.3, expected at least 2.27 and below 3" in run.output


def test_multicast_is_off_by_default(cuda: Any) -> None:
    code = """
    import ctypes
    from trainable_candle import _core
    _core.nccl_version()
    # `os.environ` does not have variables that the library sets, so call the C function.
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    print(getenv(b"NCCL_NVLS_ENABLE"))
    """
    assert cuda.run(code).output == "b'0'\n"


def test_a_build_without_cuda_says_so() -> None:
    if _core.cuda_unavailable_reason() != "this build has no CUDA support":
        pytest.skip("the extension was built with CUDA")
    with pytest.raises(CudaUnavailableError, match="no CUDA support"):
        _core.nccl_unique_id()
