"""Test the public names, errors, global settings and imports of `trainable_candle`."""

import importlib
import inspect
import subprocess
import sys
import threading

import pytest

import trainable_candle as tc
from trainable_candle import _core, _creation, errors

MODULES = [
    "trainable_candle",
    *(
        f"trainable_candle.{name}"
        for name in (
            "cuda",
            "errors",
            "memory",
            "nn",
            "nn.functional",
            "nn.init",
            "optim",
            "optim.lr_scheduler",
            "testing",
            "loader",
        )
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_public_names_of_a_module_exist_and_are_documented(name):
    module = importlib.import_module(name)
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isroutine(value) or inspect.ismodule(value):
            assert inspect.getdoc(value), f"{name}.{public} has no docstring"


def test_every_class_and_method_of_the_extension_is_documented():
    classes = [c for c in vars(_core).values() if inspect.isclass(c)]
    assert classes
    for cls in classes:
        assert inspect.getdoc(cls), f"{cls.__name__} has no docstring"
        for name, member in vars(cls).items():
            if not name.startswith("_"):
                assert inspect.getdoc(member), f"{cls.__name__}.{name} has no docstring"


def test_every_callable_of_the_extension_is_public_or_listed_here():
    modules = [
        importlib.import_module(name)
        for name in [*MODULES, "trainable_candle.models", "trainable_candle.train"]
    ]
    public = {id(getattr(module, name)) for module in modules for name in module.__all__}
    # The public functions in `_creation` take more arguments than the extension's functions of the
    # same names.
    public |= {id(getattr(_core, name)) for name in _creation.__all__}
    # Functions and classes that only the package itself uses.
    internal = {
        "Adapter",
        "Schedule",
        "CapturedFunction",
        "NcclCommunicator",
        "gradient_vectors",
        "nccl_unique_id",
        "nccl_version",
        "optimizer_kinds",
        "set_gradient_vectors",
        "cuda_bus_id",
        "cuda_device_count",
        "cuda_device_name",
        "cuda_empty_cache",
        "cuda_finish_profile",
        "cuda_link",
        "cuda_memory_stats",
        "cuda_reset_peak_memory_stats",
        "cuda_set_memory_limit",
        "cuda_pinnable_bytes",
        "cuda_stages_weights",
        "cuda_start_profile",
        "cuda_synchronize",
        "cuda_unavailable_reason",
        "adapted_parts",
        "choices",
        "draw_from",
        "gguf_facts",
        "init_linear",
        "normal_samples",
        "pipeline_parts",
        "set_grad_enabled",
        "set_resolver",
        "memory_machine",
        "share_streamed",
        "stream_seed",
    }
    for name, value in vars(_core).items():
        if callable(value) and not name.startswith("_") and name not in internal:
            assert id(value) in public, f"_core.{name} is neither public nor listed above"


def test_every_error_is_also_a_builtin_exception():
    builtin = {
        "ShapeError": ValueError,
        "DTypeError": TypeError,
        "DeviceError": ValueError,
        "CudaUnavailableError": RuntimeError,
        "IndexOutOfRangeError": IndexError,
        "ArgumentError": ValueError,
        "NoBackwardError": RuntimeError,
        "AutogradError": RuntimeError,
        "OutOfMemoryError": MemoryError,
        "NonFiniteError": ArithmeticError,
        "WeightsFormatError": ValueError,
        "DatasetError": ValueError,
        "ConfigError": ValueError,
        "DistributedError": RuntimeError,
        "FileError": OSError,
        "MissingFileError": FileNotFoundError,
        "InternalError": RuntimeError,
    }
    assert {"Error", *builtin} == set(errors.__all__)
    for name, base in builtin.items():
        assert getattr(tc, name) is getattr(errors, name)
        assert issubclass(getattr(tc, name), base)
        assert issubclass(getattr(tc, name), tc.Error)


# CI runs this file with a build without CUDA, which the next two tests need.


def test_info_describes_a_build_without_cuda():
    info = tc.info()
    assert info["version"] == tc.__version__
    assert info["backend"] == "cpu"
    assert info["reason"] == "this build has no CUDA support"
    assert info["devices"] == ["cpu"]
    assert info["threads"] == tc.get_num_threads()


def test_a_build_without_cuda_has_no_gpu_and_functions_for_gpus_raise():
    assert not tc.cuda.is_available()
    assert tc.cuda.device_count() == 0
    for call in (
        tc.cuda.synchronize,
        tc.cuda.empty_cache,
        tc.cuda.memory_stats,
        tc.cuda.reset_peak_memory_stats,
        lambda: tc.cuda.capture(lambda x: x, []),
    ):
        with pytest.raises(
            tc.CudaUnavailableError, match="CUDA is unavailable: this build has no CUDA support"
        ):
            call()


def test_results_do_not_depend_on_the_number_of_threads():
    before = tc.get_num_threads()
    x = tc.randn(300, 300)
    results = []
    for count in (1, 2, 3):
        tc.set_num_threads(count)
        assert tc.get_num_threads() == count
        results.append(((x @ x).softmax(-1).sum().item(), x.sum().item()))
    tc.set_num_threads(before)
    assert len(set(results)) == 1
    with pytest.raises(
        tc.ArgumentError, match="set_num_threads: found 0 threads, expected 1 to 1024"
    ):
        tc.set_num_threads(0)


def test_matmul_precision_can_be_set():
    assert tc.get_float32_matmul_precision() == "highest"
    tc.set_float32_matmul_precision("high")
    assert tc.get_float32_matmul_precision() == "high"
    tc.set_float32_matmul_precision("highest")
    with pytest.raises(tc.ArgumentError, match='found precision "medium", expected "highest"'):
        tc.set_float32_matmul_precision("medium")


def test_saved_bytes_count_what_the_tape_holds():
    before = tc.memory.saved_bytes()
    y = tc.Var(tc.ones(1000)).exp()
    # For its gradient, exp saves its result: 1000 values of f32.
    assert tc.memory.saved_bytes() == before + 4000
    del y
    assert tc.memory.saved_bytes() == before


def test_available_bytes_are_positive_where_the_system_reports_them():
    assert tc.memory.available_bytes() is None or tc.memory.available_bytes() > 0


def test_an_unknown_attribute_is_an_error_and_dir_has_the_known_ones():
    with pytest.raises(
        AttributeError, match="module 'trainable_candle' has no attribute 'nonsense'"
    ):
        _ = tc.nonsense
    assert "Tensor" in dir(tc)


def test_importing_the_package_loads_no_large_module():
    code = "import sys, trainable_candle; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    for heavy in (
        "torch",
        "yaml",
        "PIL",
        "tqdm",
        "matplotlib",
        "sklearn",
        "trainable_candle.train",
        "trainable_candle.optim",
    ):
        assert heavy not in modules


def test_the_gil_is_released_in_long_calls():
    x = tc.randn(700, 700)
    start, ran = threading.Event(), []

    def record():
        start.wait()
        ran.append(True)

    thread = threading.Thread(target=record)
    before = sys.getswitchinterval()
    # With this interval, another thread runs only while a call releases the GIL.
    sys.setswitchinterval(1e6)
    try:
        thread.start()
        start.set()
        calls = 0
        # On busy processors the thread may not run during some calls. If the calls kept the GIL,
        # the thread would run during none of them.
        while not ran and calls < 1000:
            _ = x @ x
            calls += 1
        assert ran
    finally:
        start.set()
        sys.setswitchinterval(before)
        thread.join()


def test_modules_are_imported_at_first_use():
    code = "import trainable_candle as tc, sys; assert 'trainable_candle.lora' not in sys.modules; "
    code += "assert tc.lora.resize and tc.data.load_dataset"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(tc, "nothing")  # noqa: B009 - mypy rejects tc.nothing


@pytest.mark.parametrize(
    ("name", "advice"), [("max_memory_allocated", "peak_allocated"), ("set_device", "cuda:1")]
)
def test_the_error_for_a_name_that_cuda_lacks_suggests_what_to_use(name, advice):
    with pytest.raises(AttributeError, match=advice):
        getattr(tc.cuda, name)


def test_a_gpu_can_be_given_by_its_number():
    if tc.cuda.is_available():
        assert tc.cuda.get_device_name(0) == tc.cuda.get_device_name("cuda:0")
        return
    with pytest.raises(tc.CudaUnavailableError):
        tc.cuda.get_device_name(0)
