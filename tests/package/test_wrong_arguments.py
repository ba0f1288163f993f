"""Call every public callable with wrong values for each of its parameters.

Whatever a user passes, a call gives a result, an error of the library, or a `TypeError` that
names the operation or the parameter: never an error of a lower layer.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc
from trainable_candle import _core

MODULES = [
    "trainable_candle",
    "trainable_candle.cuda",
    "trainable_candle.memory",
    "trainable_candle.models",
    "trainable_candle.nn",
    "trainable_candle.nn.functional",
    "trainable_candle.nn.init",
    "trainable_candle.optim",
    "trainable_candle.optim.lr_scheduler",
    "trainable_candle.loader",
]
# Values that are wrong for most parameters, by their descriptions.
WRONG = {
    "negative": -1,
    "2**63": 2**63,
    "2**200": 2**200,
    "fraction": 1.5,
    "text": "x",
    "None": None,
    "object": object(),
    "pair of text": ("x", "x"),
    "negative pair": (-1, -1),
    "huge pair": (2**63, 2**63),
}
# Makers of valid values for the other arguments of a call. A key is PARAMETER, or
# FUNCTION.PARAMETER for the parameter of one function.
RIGHT: dict[str, Callable[[], Any]] = {
    "adapter": lambda: tc.models.DigitsTransformer().add_adapter(tc.LoraConfig(r=2)),
    "adapters": lambda: [tc.models.DigitsTransformer().add_adapter(tc.LoraConfig(r=2))],
    "alpha": lambda: 4.0,
    "arrays_or_tensors": lambda: tc.ones(2, 2),
    "base_weight": lambda: tc.ones(4, 4),
    "channels_last": lambda: True,
    "chunks": lambda: 2,
    "class_labels": lambda: tc.tensor([1]),
    "condition": lambda: tc.ones(2, dtype="u8"),
    "config": lambda: tc.LoraConfig(r=2),
    "cos": lambda: tc.ones(4, 2),
    "data": lambda: [[1.0, 2.0], [3.0, 4.0]],
    "device": lambda: "cpu",
    "dim": lambda: 0,
    "dim0": lambda: 0,
    "cu_seqlens": lambda: tc.tensor([0, 3, 4]),
    "dim1": lambda: 1,
    "dtype": lambda: "f32",
    "embedding_dim": lambda: 4,
    "end": lambda: 4,
    "examples": lambda: [0, 1],
    "exponent": lambda: 2,
    "format": lambda: "peft",
    "function": lambda: lambda x: x * 2.0,
    "high": lambda: 9,
    "in_channels": lambda: 4,
    "in_features": lambda: 4,
    "index": lambda: tc.tensor([[0, 1], [1, 0]]),
    "input": lambda: tc.ones(4, 4),
    "inputs": lambda: [tc.Var([1.0])],
    "key": lambda: tc.ones(4, 4),
    "kernel_size": lambda: 3,
    "kind": lambda: "linear",
    "length": lambda: 1,
    "loss": lambda: tc.ones(1),
    "low": lambda: 0,
    "lora_down": lambda: tc.ones(2, 4),
    "lora_up": lambda: tc.ones(4, 2),
    "lora_downs": lambda: [tc.Var(tc.ones(2, 4))],
    "lora_ups": lambda: [tc.Var(tc.ones(4, 2))],
    "precision": lambda: "highest",
    "max_norm": lambda: 1.0,
    "n": lambda: 2,
    "next_sigma": lambda: 0.5,
    "normalized_shape": lambda: 4,
    "num_channels": lambda: 4,
    "num_embeddings": lambda: 4,
    "num_groups": lambda: 2,
    "num_training_steps": lambda: 10,
    "num_warmup_steps": lambda: 2,
    "optimizer": lambda: tc.optim.SGD([tc.Var([1.0])]),
    "other": lambda: tc.ones(2, 2),
    "out_channels": lambda: 4,
    "out_features": lambda: 4,
    "parameters": lambda: [tc.Var([1.0])],
    "params": lambda: [tc.Var([1.0])],
    "path": lambda: "does/not/exist",
    "folder": lambda: "",
    "query": lambda: tc.ones(4, 4),
    "rank": lambda: 2,
    "sample": lambda: tc.ones(1, 1, 8, 8),
    "samples": lambda: [0, 1],
    "scale": lambda: 1.0,
    "seed": lambda: 1,
    "settings": dict,
    "shape": lambda: (2, 2),
    "sigma": lambda: 1.0,
    "sin": lambda: tc.ones(4, 2),
    "split_size_or_sections": lambda: 1,
    "start": lambda: 0,
    "state": lambda: (1, 2),
    "step": lambda: 1,
    "steps": lambda: 2,
    "target": lambda: tc.ones(4, 4),
    "tensors": lambda: [tc.ones(2), tc.ones(2)],
    "timestep": lambda: tc.ones(1),
    "total_steps": lambda: 10,
    "value": lambda: 1,
    "velocity": lambda: tc.ones(1, 1, 8, 8),
    "warmup_steps": lambda: 1,
    "weight": lambda: tc.ones(4, 4),
    "x": lambda: tc.ones(4, 4),
    "grad_output": lambda: tc.ones(4, 4),
    "max_steps": lambda: 10,
    "name": lambda: "x",
    "module": lambda: tc.nn.Linear.init(2, 2),
    "add_layer_norm.residual": lambda: tc.ones(4, 4),
    "modulated_layer_norm.scale": lambda: tc.ones(4, 4),
    "modulated_layer_norm.shift": lambda: tc.ones(4, 4),
    "rms_norm_rope.weight": lambda: tc.ones(4),
    "scaled_dot_product_attention.value": lambda: tc.ones(4, 4),
    "varlen_attention.query": lambda: tc.ones(4, 2, 4),
    "varlen_attention.key": lambda: tc.ones(4, 1, 4),
    "varlen_attention.value": lambda: tc.ones(4, 1, 4),
    "noise.data": lambda: tc.ones(2, 2),
    "validation_noise.data": lambda: tc.ones(2, 2),
    "quantize.tensor": lambda: tc.ones(2, 64),
    "quantize.format": lambda: "nf4",
    "Optimizer.kind": lambda: "AdamW",
    "save_checkpoint.models": dict,
    "save_file.tensors": lambda: {"t": tc.ones(2)},
    "lora_backward_.grad_outputs": lambda: [tc.ones(4, 4)],
    "lora_backward_.inputs": lambda: [tc.ones(4, 4)],
}
# Functions that are not called, because they change state that all tests share.
LEFT_OUT = {"trainable_candle.set_num_threads", "trainable_candle.cuda.capture"}


def instances() -> Iterator[tuple[str, Any]]:
    """Yield objects whose methods are called, each with the name of its class."""
    x = tc.tensor(np.arange(4.0).reshape(2, 2))
    yield "Tensor", x
    yield "Var", tc.Var(x)
    yield "Adam", tc.optim.Adam([tc.Var(x)])
    yield "GradScaler", tc.optim.GradScaler()
    yield "Linear", tc.nn.Linear.init(2, 2)
    yield "LoRALinear", tc.nn.LoRALinear(tc.ones(4, 4), 2, 2)
    model = tc.models.DigitsTransformer()
    yield "DigitsTransformer", model
    yield "AdapterSet", model.add_adapter(tc.LoraConfig(r=2))
    yield "FlowMatching", _core.FlowMatching()
    yield "Schedule", _core.Schedule("linear", 1, 4)
    yield "LRScheduler", tc.optim.lr_scheduler.constant(tc.optim.SGD([tc.Var(x)]))


def callables() -> Iterator[tuple[str, Any]]:
    """Yield names, each with its callable.

    These are the public functions and classes of `MODULES`, without exceptions and `LEFT_OUT`, and
    the public methods of `instances()`.
    """
    for home in MODULES:
        module = importlib.import_module(home)
        for name in module.__all__:
            value = getattr(module, name)
            is_exception = inspect.isclass(value) and issubclass(value, BaseException)
            if callable(value) and not is_exception and f"{home}.{name}" not in LEFT_OUT:
                yield f"{home}.{name}", value
    for kind, instance in instances():
        for name in dir(type(instance)):
            if not name.startswith("_"):
                value = getattr(instance, name)
                if callable(value):
                    yield f"{kind}.{name}", value
    yield "Linear.init", tc.nn.Linear.init


def parameters(function: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of a callable by name; none if it has no signature."""
    try:
        return dict(inspect.signature(function).parameters)
    except ValueError:  # a builtin class without a signature
        return {}


def calls() -> Iterator[tuple[str, Any, str]]:
    """Yield (name of the callable, callable, name of one of its parameters) for all parameters."""
    for name, function in callables():
        for parameter in parameters(function):
            yield name, function, parameter


def valid_value(function: Any, name: str, default: Any) -> Any:
    """Return a valid value for the parameter `name`; `default` if `RIGHT` has none."""
    make = RIGHT.get(f"{getattr(function, '__name__', '')}.{name}", RIGHT.get(name))
    return make() if make else default


def arguments(function: Any, tested: str, value: Any) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the named arguments of a call.

    The parameter `tested` gets `value`; other parameters without a default get valid values.
    """
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for name, parameter in parameters(function).items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            # Most parameters of this kind are a shape.
            positional.append(value if name == tested else valid_value(function, name, (2, 2)))
        elif parameter.kind is parameter.VAR_KEYWORD:
            continue
        elif name == tested or parameter.default is parameter.empty:
            given = value if name == tested else valid_value(function, name, None)
            if parameter.kind is parameter.POSITIONAL_ONLY:
                positional.append(given)
            else:
                named[name] = given
    return positional, named


CALLS = list(calls())


@pytest.mark.parametrize(
    ("name", "function", "parameter"), CALLS, ids=[f"{name}-{p}" for name, _, p in CALLS]
)
def test_a_call_with_a_wrong_argument_gives_a_result_or_a_clear_error(
    name: str, function: Any, parameter: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state, threads = tc.get_rng_state(), tc.get_num_threads()
    try:
        for label, value in WRONG.items():
            positional, named = arguments(function, parameter, value)
            try:
                function(*positional, **named)
            except tc.InternalError as error:
                pytest.fail(f"{name}({parameter}={label}): {error!r}")
            except tc.Error as error:
                # The message must start with the operation's name, then a colon or a space.
                if not re.match(r"[\w./-]+[: ]", str(error)):
                    pytest.fail(f"{name}({parameter}={label}): {error!r} starts with no operation")
            except TypeError as error:
                check_type_error(name, parameter, label, error)
            except BaseException as error:  # noqa: BLE001 - a panic is no Exception
                pytest.fail(f"{name}({parameter}={label}): {error!r}")
    finally:
        tc.set_rng_state(state)
        tc.set_num_threads(threads)


def check_type_error(name: str, parameter: str, label: str, error: TypeError) -> None:
    assert "failed to extract" not in str(error), f"{name}({parameter}={label}): {error}"
    if sys.version_info < (3, 11):
        # The parameter is in a note on the exception, and Python 3.10 has no such notes.
        return
    text = " ".join([str(error), *getattr(error, "__notes__", [])])
    operation = name.rsplit(".", 1)[-1]
    assert parameter in text or operation in text, f"{name}({parameter}={label}): {text}"


def test_the_calls_include_functions_methods_and_classes() -> None:
    names = {name for name, _, _ in CALLS}
    assert len(CALLS) > 300
    assert {"trainable_candle.zeros", "Tensor.narrow", "trainable_candle.optim.Adam"} <= names


def test_capture_rejects_a_tensor_in_place_of_a_list() -> None:
    with pytest.raises(TypeError, match=r"capture: static_inputs is a Tensor, .*: \[tensor\]"):
        tc.cuda.capture(lambda x: x, tc.zeros((2, 3)))
