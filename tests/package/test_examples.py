"""The examples of docstrings run as they are written."""

import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc

ASSETS = Path(tc.__file__).parent / "assets"
REFERENCE = Path(__file__).parents[2] / ".ci" / "site" / "reference.py"
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$")
DATA = "the docstring of trainable_candle.data shows how a folder becomes batches"
GPU = "needs a GPU; docs/training.md and docs/python.md show it"
WEIGHTS = "needs weights that the package does not have; the guide of the family shows it"
WITHOUT = {
    **dict.fromkeys(
        (
            "cuda.Captured",
            "cuda.KernelTime",
            "cuda.Profile",
            "cuda.capture",
            "cuda.device_count",
            "cuda.empty_cache",
            "cuda.get_device_name",
            "cuda.memory_stats",
            "cuda.reset_peak_memory_stats",
            "cuda.set_memory_limit",
            "cuda.synchronize",
        ),
        GPU,
    ),
    **dict.fromkeys(
        (
            "models.AutoencoderKLQwenImage",
            "models.ChromaTransformer",
            "models.Flux2Transformer",
            "models.FluxTransformer",
            "models.SD3Transformer",
            "models.T5Encoder",
            "models.QwenImageTransformer",
            "models.ZImageTransformer",
        ),
        WEIGHTS,
    ),
    **dict.fromkeys(
        ("get_w8a8", "set_w8a8"), "a setting for a whole run; docs/memory.md says what it does"
    ),
    "data": DATA,
    "distributed.Group": "the protocol of the groups that the module's functions use",
    "distributed.World": "the launcher makes it",
    "train.StepReport": "the example of Callback reads it",
}
"""Public names without an example, each with the reason. A module stands for all names in it."""


def blocks(doc: str) -> list[str]:
    """Return the examples in a docstring.

    These are its fenced blocks, and its indented blocks outside sections such as `Args:`.
    """
    found: list[list[str]] = [[]]
    in_section = in_fence = False
    for line in doc.splitlines():
        if line.strip().startswith("```"):
            in_fence = not in_fence
            found.append([])
        elif in_fence:
            found[-1].append(line)
        elif line and not line.startswith(" "):
            in_section = bool(SECTION.match(line))
            found.append([])
        elif not in_section:
            found[-1].append(line)
    texts = [dedent("\n".join(lines)).strip("\n") for lines in found]
    return [text for text in texts if text]


def modules() -> tuple[str, ...]:
    """Return the public modules on the site's reference pages; "" is the package itself."""
    spec = importlib.util.spec_from_file_location("reference", REFERENCE)
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    return tuple(reference.MODULES)


def examples() -> Iterator[tuple[str, str]]:
    """Yield names, each with the examples in its docstring as one program.

    The names are those of modules with examples, and of all public functions and classes except
    exceptions. A function or class in several modules appears once. The program of a function or
    class without an example is "".
    """
    seen = set()
    for home in modules():
        module = importlib.import_module(f"trainable_candle.{home}".rstrip("."))
        if home not in WITHOUT and (code := code_of(module)):
            yield home or "trainable_candle", code
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if not (inspect.isclass(value) or inspect.isroutine(value)) or id(value) in seen:
                continue
            if inspect.isclass(value) and issubclass(value, BaseException):
                continue
            seen.add(id(value))
            yield f"{home}.{name}".lstrip("."), code_of(value)


def code_of(value: Any) -> str:
    """Return the examples in the docstring of a value, as one program."""
    return "\n".join(blocks(inspect.cleandoc(value.__doc__ or "")))


PROGRAMS = dict(examples())
EXAMPLES = {name: code for name, code in PROGRAMS.items() if code}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with the files that examples read: two built-in models and an adapter."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "sdxl").symlink_to(ASSETS / "sdxl_tiny")
    (folder / "llama").symlink_to(ASSETS / "llama_tiny")
    tc.manual_seed(0)
    unet = tc.models.load(folder / "sdxl")
    adapter = unet.add_adapter(tc.LoraConfig(r=4, target_modules="all-attention"))
    for parameter in adapter.parameters():
        parameter.set(tc.randn(*parameter.shape) * 0.01)
    adapter.save(folder / "adapter.safetensors")
    return folder


def given_names() -> dict[str, Any]:
    """Return the names that examples use without defining them, such as `tc` and `model`."""
    model = tc.nn.Sequential(tc.nn.Linear(4, 8), tc.nn.ReLU(), tc.nn.Linear(8, 2))
    optimizer = tc.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [(tc.randn(3, 4), tc.randn(3, 2)) for _ in range(2)]
    x = batches[0][0]
    return {
        "tc": tc,
        "np": np,
        "F": tc.nn.functional,
        "model": model,
        "x": x,
        "batches": batches,
        "optimizer": optimizer,
        "loss": (model(x) ** 2).mean(),
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(
    name: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of the names that need a GPU, only this one has an example.
    if name == "cuda.profile" and not tc.cuda.is_available():
        pytest.skip(GPU)
    for file in files.iterdir():
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    code = EXAMPLES[name]
    tc.manual_seed(0)
    with tc.enable_grad():
        exec(compile(code, name, "exec"), given_names())


def test_every_public_name_has_an_example_or_a_reason_to_have_none() -> None:
    without = {name for name, code in PROGRAMS.items() if not code}
    in_listed_modules = {name for name in without if name.rpartition(".")[0] in WITHOUT}
    # "data" is the only module in `WITHOUT`.
    assert without - in_listed_modules == WITHOUT.keys() - {"data"}
