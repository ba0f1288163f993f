"""Idioms of torch's users work, or raise an error that says what to write instead."""

import contextlib
import copy
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainable_candle as tc

# A row is `OK EXPRESSION` or `ERROR EXPRESSION # MESSAGE`, with spaces after the first word.
TABLE = Path(__file__).with_name("idioms.txt")
ROWS = [line for line in TABLE.read_text().splitlines() if not line.startswith("#")]
# The least number of idioms in the table that must work.
LEAST = 261


def names(device: str) -> dict[str, Any]:
    """Return the modules, tensors and variables that idioms use, by name."""
    v = tc.Var(tc.randn(3, 4, device=device))
    (v * v).sum().backward()  # some idioms read v.grad
    x = tc.randn(2, 3, 4, device=device)
    tc.save_file({"a": x}, "x.safetensors")  # an idiom loads this file
    i = tc.tensor([0, 2, 1], dtype="i64", device=device)
    functional = tc.nn.functional
    modules = {"tc": tc, "np": np, "copy": copy, "pickle": pickle, "F": functional}
    return {**modules, "x": x, "v": v, "i": i}


def run(code: str, known: dict[str, Any]) -> None:
    if "torch." in code:
        known["torch"] = pytest.importorskip("torch")
    # An idiom may disable gradients. The end of the context `enable_grad` enables them again.
    with contextlib.redirect_stdout(io.StringIO()), tc.enable_grad():
        exec(code, known)


@pytest.mark.parametrize("row", ROWS)
def test_an_idiom_works_or_its_error_helps(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    state, code = row.split(maxsplit=1)
    if state == "OK":
        run(code, names("cpu"))
        return
    code, _, message = code.partition(" # ")
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the message says which
        run(code, names("cpu"))
    found = str(caught.value).replace("\n", " ")
    assert f"{type(caught.value).__name__}: {found}".startswith(message)


def test_at_least_as_many_idioms_work_as_before() -> None:
    assert len(ROWS) == 288  # No row was lost.
    assert sum(row.startswith("OK") for row in ROWS) >= LEAST


@pytest.mark.gpu
@pytest.mark.parametrize("row", [row for row in ROWS if row.startswith("OK")])
def test_idioms_that_work_on_the_cpu_work_on_a_gpu(
    row: str, gpu: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = row.split(maxsplit=1)[1]
    if any(word in code for word in ("np.", "torch.", "numpy", "tc.")):
        pytest.skip("makes a tensor on the CPU")
    monkeypatch.chdir(tmp_path)
    run(code, names(gpu))
