"""Why CUDA or one of its devices cannot be used: the reasons reach the user.

The fixture `cuda` runs programs with simulated CUDA libraries.
"""

import re
from typing import Any

import pytest

REPORT = """
    reason = tc.cuda.unavailable_reason()
    print(reason)
    assert not tc.cuda.is_available()
    assert tc.cuda.device_count() == 0
    assert (tc.info()["backend"], tc.info()["reason"]) == ("cpu", reason)
    for use in (lambda: tc.zeros(1, device="cuda"), lambda: tc.ones(1).to("cuda:0")):
        try:
            use()
        except tc.CudaUnavailableError as error:
            assert reason in str(error), error
        else:
            raise AssertionError("a tensor was made on an unavailable device")
    assert (tc.ones(2) + 1).tolist() == [2.0, 2.0]
"""
DRIVER = "libcuda.so.1"


# For each case: arguments of `cuda.run`, and a part of the reason that must be reported.
# `libraries` are those that exist (default: all), `missing` are functions that they lack.
# `settings` change the simulated driver: `INIT` is the status of `cuInit`, `VERSION` is the CUDA
# version (12080 is 12.8).
CASES = {
    "no driver": ({"libraries": ()}, "there is no NVIDIA driver on this machine (libcuda.so.1: "),
    "driver fails": (
        {"settings": {"INIT": "803"}},
        "the NVIDIA driver does not start: system has unsupported display driver",
    ),
    "driver too old": (
        {"settings": {"VERSION": "12080"}},
        "the NVIDIA driver offers CUDA 12.8, expected at least 13.0; update the driver",
    ),
    "no device": (
        {"settings": {"DEVICES": "0"}},
        "the NVIDIA driver finds no GPU; is it hidden by CUDA_VISIBLE_DEVICES?",
    ),
    "GPU too old": (
        {"settings": {"CAPABILITY": "7.5"}},
        "the GPU Simulated GPU has compute capability 7.5, expected at least 8.0",
    ),
    "no cuBLAS": (
        {"libraries": (DRIVER,)},
        "libcublas.so.13 cannot be opened (libcublas.so.13: cannot open shared object file",
    ),
    "no cuBLAS: what to install": (
        {"libraries": (DRIVER,)},
        '); pip install "trainable-candle[cuda13]", or install CUDA 13',
    ),
    "no cuBLASLt": (
        {"libraries": (DRIVER, "libcublas.so.13")},
        "libcublasLt.so.13 cannot be opened (libcublasLt.so.13: cannot open shared object file",
    ),
    "no cuRAND": (
        {"libraries": (DRIVER, "libcublas.so.13", "libcublasLt.so.13")},
        "libcurand.so.10 cannot be opened (libcurand.so.10: cannot open shared object file",
    ),
    "cuBLAS lacks a function": (
        {"missing": ("cublasGemmStridedBatchedEx",)},
        "libcublas.so.13 has no function cublasGemmStridedBatchedEx; its version is too old",
    ),
    "driver lacks a function": (
        {"missing": ("cuLaunchKernel",)},
        "libcuda.so.1 has no function cuLaunchKernel; its version is too old",
    ),
}


@pytest.mark.parametrize(("simulation", "part"), CASES.values(), ids=CASES)
def test_the_reason_why_cuda_is_unavailable_is_reported(
    cuda: Any, simulation: dict[str, Any], part: str
) -> None:
    assert part in cuda.run(REPORT, **simulation).output


def test_a_gpu_for_which_the_build_has_no_machine_code_is_rejected(cuda: Any) -> None:
    """A GPU cannot run machine code for another major compute capability."""
    # Each line of the file has a kernel of the build and its target, such as `sm_90`.
    targets = {line.split()[1] for line in cuda.kernels.read_text().splitlines()}
    if any(name.startswith("compute_") for name in targets):
        pytest.skip("this build has PTX, which the driver compiles for every GPU")
    pattern = "the GPU Simulated GPU has compute capability 13.0, and this build has code for "
    pattern += r"[0-9a,]+ alone; build the package with TRAINABLE_CANDLE_CUDA_ARCHS=130"
    run = cuda.run(REPORT, settings={"CAPABILITY": "13.0"})
    assert re.search(pattern, run.output), run.output
    # The simulated driver has rejected no call, and has loaded no module of kernels.
    assert run.of("refused", "module") == []


USE_EACH_DEVICE = """
    assert tc.cuda.is_available() and tc.cuda.device_count() == 3
    for device, capability in (("cuda:0", 9.0), ("cuda:1", 7.5), ("cuda:2", 9.0)):
        for use in (lambda: tc.zeros(1, device=device), lambda: tc.ones(1).to(device)):
            try:
                assert (use() + 1).shape == (1,) and capability == 9.0
            except tc.CudaUnavailableError as error:
                assert capability == 7.5, error
                assert f"{device}: the GPU Simulated GPU has compute capability 7.5" in str(error)
"""


def test_each_device_is_checked_at_its_first_use(cuda: Any) -> None:
    settings = {"DEVICES": "3", "CAPABILITY": "9.0,7.5,9.0"}
    # The simulated driver has rejected no call.
    assert cuda.run(USE_EACH_DEVICE, settings=settings).of("refused") == []


def test_an_unusable_first_device_does_not_make_cuda_unavailable(cuda: Any) -> None:
    use_second_device = """
        assert tc.cuda.unavailable_reason() is None
        assert (tc.ones(2, device="cuda:1") + 1).device == "cuda:1"
    """
    cuda.run(use_second_device, settings={"DEVICES": "2", "CAPABILITY": "7.5,9.0"})


def test_a_device_that_does_not_exist_is_an_error(cuda: Any) -> None:
    run = cuda.run(
        """
        assert tc.info()["devices"] == ["cpu", "cuda:0", "cuda:1"]
        try:
            tc.zeros(1, device="cuda:2")
        except tc.DeviceError as error:
            print(error)
    """,
        settings={"DEVICES": "2"},
    )
    assert "there is no cuda:2; found 2 CUDA devices" in run.output


def test_libraries_are_found_where_pip_puts_them(cuda: Any) -> None:
    """The system's loader finds only the driver. The others are below an entry of `sys.path`."""
    run = cuda.run("""
        import sys
        from pathlib import Path

        print(tc.cuda.unavailable_reason())
        folders = [Path(entry, "nvidia/cu13/lib") for entry in sys.path]
        folder = next(path for path in folders if path.is_dir())
        maps = Path("/proc/self/maps").read_text()
        assert f"{folder}/libcublas.so.13" in maps
        assert f"{folder}/libcurand.so.10" in maps
    """)
    assert run.output == "None\n"
