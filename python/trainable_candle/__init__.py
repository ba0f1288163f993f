"""Fine-tune large models with LoRA and DoRA, without PyTorch."""

from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

# Importing _copies makes copy and pickle reject objects whose state is in the extension.
from trainable_candle import _copies, _functions, _methods  # noqa: F401
from trainable_candle._core import (
    AdapterFile,
    AdapterModule,
    AdapterReport,
    AdapterSet,
    CheckpointFacts,
    DType,
    LoraConfig,
    PartFacts,
    QuantizedTensor,
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
    get_float32_matmul_precision,
    get_num_threads,
    get_rng_state,
    get_w8a8,
    grad,
    gradcheck,
    inspect,
    is_grad_enabled,
    load_file,
    lora_backward,
    lora_backward_,
    manual_seed,
    ones_like,
    prepare_adapters,
    quantize,
    save_adapters,
    save_file,
    set_float32_matmul_precision,
    set_num_threads,
    set_rng_state,
    set_w8a8,
    snapshot,
    stack,
    verify_adapter,
    where,
    zeros_like,
)
from trainable_candle._creation import full, ones, rand, randint, randn, tensor, zeros
from trainable_candle._device import device
from trainable_candle._functions import (
    allclose,
    concat,
    einsum,
    is_tensor,
    linspace,
    multinomial,
    normal,
    randperm,
)
from trainable_candle._generator import Generator
from trainable_candle._grad_mode import enable_grad, inference_mode, no_grad, set_grad_enabled
from trainable_candle._info import info
from trainable_candle._like import full_like, rand_like, randn_like
from trainable_candle.errors import (
    ArgumentError,
    AutogradError,
    ConfigError,
    CudaUnavailableError,
    DatasetError,
    DeviceError,
    DistributedError,
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
        distributed,
        errors,
        families,
        loader,
        memory,
        models,
        nn,
        optim,
        peft,
        testing,
        train,
    )
    from trainable_candle.peft import PeftModel, get_peft_model

_methods.attach()  # adds to Tensor the methods that are written in Python

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
    "DistributedError",
    "Error",
    "FileError",
    "Generator",
    "IndexOutOfRangeError",
    "InternalError",
    "LoraConfig",
    "MissingFileError",
    "NoBackwardError",
    "NonFiniteError",
    "OutOfMemoryError",
    "PartFacts",
    "PeftModel",
    "QuantizedTensor",
    "ShapeError",
    "Tensor",
    "TrainingAdapter",
    "Var",
    "WeightsFormatError",
    "__version__",
    "allclose",
    "arange",
    "bfloat16",
    "cat",
    "checkpoint",
    "concat",
    "cuda",
    "device",
    "distributed",
    "einsum",
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
    "full_like",
    "get_float32_matmul_precision",
    "get_num_threads",
    "get_peft_model",
    "get_rng_state",
    "get_w8a8",
    "grad",
    "gradcheck",
    "inference_mode",
    "info",
    "inspect",
    "int64",
    "is_grad_enabled",
    "is_tensor",
    "linspace",
    "load_file",
    "loader",
    "lora_backward",
    "lora_backward_",
    "manual_seed",
    "memory",
    "models",
    "multinomial",
    "nn",
    "no_grad",
    "normal",
    "ones",
    "ones_like",
    "optim",
    "peft",
    "prepare_adapters",
    "quantize",
    "rand",
    "rand_like",
    "randint",
    "randn",
    "randn_like",
    "randperm",
    "save_adapters",
    "save_file",
    "set_float32_matmul_precision",
    "set_grad_enabled",
    "set_num_threads",
    "set_rng_state",
    "set_w8a8",
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

_LAZY = frozenset(
    {
        "distributed",
        "families",
        "loader",
        "memory",
        "models",
        "nn",
        "optim",
        "peft",
        "testing",
        "train",
    }
)
"""Submodules that are imported at first use, so that `import trainable_candle` stays fast.

The imports above load the other submodules in `__all__`, `cuda` and `errors`.
"""
_DTYPE_ALIASES = {
    "float": "f32",
    "half": "f16",
    "double": "f64",
    "long": "i64",
    "bool": "u8",  # the dtype of masks
}
"""Torch's other names of dtypes, each with the dtype that it stands for here."""
_INSTEAD = {
    "save": "use tc.save_file, which writes tensors by name as safetensors",
    "load": "use tc.load_file for tensors by name, and models.load for a model",
    "compile": "there is nothing to compile; tc.cuda.capture makes a CUDA graph of a function",
    "autocast": "load a model in bf16; tc.optim.GradScaler scales the loss of f16",
    "amp": "load a model in bf16; tc.optim.GradScaler scales the loss of f16",
    "from_numpy": "use tc.tensor, which copies",
    "as_tensor": "use tc.tensor, which copies",
    "empty": "use tc.zeros",
    "bmm": "use a @ b",
    "mm": "use a @ b",
    "outer": "use a[:, None] * b",
    "equal": "use (a == b).all()",
    "isclose": "use tc.allclose for one result, or (a - b).abs() <= tolerance for each element",
    "meshgrid": "use tc.tensor(numpy.meshgrid(...))",
    "nonzero": "use numpy.nonzero(x.numpy())",
    "unique": "use numpy.unique(x.numpy())",
    "bincount": "use numpy.bincount(x.numpy())",
    "autograd": "use tc.grad(loss, [x]) or loss.backward(); there are no second derivatives",
    "jit": "there is nothing to compile; tc.cuda.capture makes a CUDA graph of a function",
    "backends": "see tc.set_float32_matmul_precision and tc.set_num_threads",
    "set_default_dtype": "give dtype= where tensors and layers are made",
    "set_default_device": "give device= where tensors and models are made",
    "complex64": "tensors are real",
    "int32": "use tc.int64; indices may be uint32 too",
}
"""Advice on names that torch has and this package lacks."""
_FROM_PEFT = frozenset({"PeftModel", "get_peft_model"})
"""Names of this package that the submodule `peft` defines."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return import_module(f"{__name__}.{name}")
    if name in _functions.NAMES:
        # A function that calls the method `name` of its argument, made when it is first needed.
        # Python calls `__getattr__` only for missing names, so this runs once for each function.
        globals()[name] = _functions.function(name)
        return globals()[name]
    if name in _DTYPE_ALIASES:
        return DType(_DTYPE_ALIASES[name])
    if name in _INSTEAD:
        raise AttributeError(f"module {__name__!r} has no {name!r}: {_INSTEAD[name]}")
    if name == "utils":
        # Torch's names: utils.data.DataLoader, utils.checkpoint.checkpoint.
        data = import_module(f"{__name__}.loader")
        return SimpleNamespace(data=data, checkpoint=SimpleNamespace(checkpoint=checkpoint))
    if name in _FROM_PEFT:
        return getattr(import_module(f"{__name__}.peft"), name)
    # Any other public submodule, such as `data`.
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
