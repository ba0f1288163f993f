"""Fine-tune large models with LoRA and DoRA, without PyTorch."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from trainable_candle._core import (
    AdapterFile,
    AdapterModule,
    AdapterReport,
    AdapterSet,
    CheckpointFacts,
    DType,
    LoraConfig,
    PartFacts,
    Tensor,
    TrainingAdapter,
    Var,
    __version__,
    arange,
    cat,
    checkpoint,
    empty_like,
    eye,
    from_dlpack,
    full,
    get_float32_matmul_precision,
    get_num_threads,
    get_rng_state,
    grad,
    gradcheck,
    inspect,
    is_grad_enabled,
    load_file,
    lora_backward,
    lora_backward_,
    manual_seed,
    ones,
    ones_like,
    prepare_adapters,
    rand,
    randint,
    randn,
    save_adapters,
    save_file,
    set_float32_matmul_precision,
    set_num_threads,
    set_rng_state,
    snapshot,
    stack,
    tensor,
    verify_adapter,
    where,
    zeros,
    zeros_like,
)
from trainable_candle._grad_mode import enable_grad, no_grad
from trainable_candle._info import info
from trainable_candle.errors import (
    ArgumentError,
    AutogradError,
    ConfigError,
    CudaUnavailableError,
    DatasetError,
    DeviceError,
    DTypeError,
    Error,
    FileError,
    IndexOutOfRangeError,
    InternalError,
    MissingFileError,
    NoBackwardError,
    NonFiniteError,
    OutOfMemoryError,
    ShapeError,
    WeightsFormatError,
)

if TYPE_CHECKING:
    from trainable_candle import (
        cuda,
        errors,
        families,
        memory,
        models,
        nn,
        optim,
        testing,
        train,
    )

float32 = DType("f32")
float16 = DType("f16")
bfloat16 = DType("bf16")
float64 = DType("f64")
uint8 = DType("u8")
uint32 = DType("u32")
int64 = DType("i64")

__all__ = [
    "AdapterFile",
    "AdapterModule",
    "AdapterReport",
    "AdapterSet",
    "ArgumentError",
    "AutogradError",
    "CheckpointFacts",
    "ConfigError",
    "CudaUnavailableError",
    "DType",
    "DTypeError",
    "DatasetError",
    "DeviceError",
    "Error",
    "FileError",
    "IndexOutOfRangeError",
    "InternalError",
    "LoraConfig",
    "MissingFileError",
    "NoBackwardError",
    "NonFiniteError",
    "OutOfMemoryError",
    "PartFacts",
    "ShapeError",
    "Tensor",
    "TrainingAdapter",
    "Var",
    "WeightsFormatError",
    "__version__",
    "arange",
    "bfloat16",
    "cat",
    "checkpoint",
    "cuda",
    "empty_like",
    "enable_grad",
    "errors",
    "eye",
    "families",
    "float16",
    "float32",
    "float64",
    "from_dlpack",
    "full",
    "get_float32_matmul_precision",
    "get_num_threads",
    "get_rng_state",
    "grad",
    "gradcheck",
    "info",
    "inspect",
    "int64",
    "is_grad_enabled",
    "load_file",
    "lora_backward",
    "lora_backward_",
    "manual_seed",
    "memory",
    "models",
    "nn",
    "no_grad",
    "ones",
    "ones_like",
    "optim",
    "prepare_adapters",
    "rand",
    "randint",
    "randn",
    "save_adapters",
    "save_file",
    "set_float32_matmul_precision",
    "set_num_threads",
    "set_rng_state",
    "snapshot",
    "stack",
    "tensor",
    "testing",
    "train",
    "uint8",
    "uint32",
    "verify_adapter",
    "where",
    "zeros",
    "zeros_like",
]

# Imported at first use, so that `import trainable_candle` stays fast.
_LAZY = frozenset({"families", "memory", "models", "nn", "optim", "testing", "train"})


def __getattr__(name: str) -> ModuleType:
    if name in _LAZY:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
