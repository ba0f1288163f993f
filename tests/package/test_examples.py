"""The examples of docstrings run as they are written."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc

MODULES = (
    "",
    ".nn",
    ".nn.init",
    ".optim",
    ".optim.lr_scheduler",
    ".peft",
    ".testing",
    ".loader",
)
SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes):$")
LEAST = 80
"""The least number of names with an example."""


def blocks(doc: str) -> list[str]:
    """The indented blocks of a docstring outside its sections, and the fenced ones."""
    found: list[list[str]] = [[]]
    section = fence = False
    for line in doc.splitlines():
        if line.strip().startswith("```"):
            fence = not fence
            found.append([])
        elif fence:
            found[-1].append(line)
        elif line and not line.startswith(" "):
            section = bool(SECTION.match(line))
            found.append([])
        elif not section:
            found[-1].append(line)
    texts = [dedent("\n".join(lines)).strip("\n") for lines in found]
    return [text for text in texts if text]


def examples() -> Iterator[tuple[str, str]]:
    """Each public name with its examples as one program."""
    seen = set()
    for path in MODULES:
        module = importlib.import_module(f"trainable_candle{path}")
        if code := "\n".join(blocks(inspect.cleandoc(module.__doc__ or ""))):
            yield f"trainable_candle{path}", code
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if not (inspect.isclass(value) or inspect.isroutine(value)) or id(value) in seen:
                continue
            seen.add(id(value))
            # A class of the library may show its docstring's base; only its own counts.
            doc = value.__doc__ or ""
            if code := "\n".join(blocks(inspect.cleandoc(doc))):
                yield f"trainable_candle{path}.{name}", code


EXAMPLES = dict(examples())


def world() -> dict[str, Any]:
    """The names that examples may use: a model, batches, an optimizer."""
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
def test_an_example_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = EXAMPLES[name]
    ast.parse(code)
    tc.manual_seed(0)
    with tc.enable_grad():
        exec(compile(code, name, "exec"), world())


def test_names_have_examples() -> None:
    assert len(EXAMPLES) >= LEAST
