"""Packages import no package above them, and the shipped library contains no test code."""

import ast
import re
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "trainable_candle"
ABOVE = {
    "settings": {"data", "train", "tasks", "families", "run", "cli", "demo"},
    "data": {"train", "tasks", "families", "run", "cli", "demo"},
    "train": {"data", "tasks", "families", "run", "cli", "demo"},
    "tasks": {"families", "run", "cli", "demo"},
    "families": {"run", "cli", "demo"},
}
"""Maps a package to the packages that it must not import, not even for types.

`data` and `train` are at the same height: neither may import the other.
"""


@pytest.mark.parametrize("package", ABOVE)
def test_no_package_imports_a_package_above_it(package: str) -> None:
    for path in (PACKAGE / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            imported = {
                name.split(".")[1] for name in names if name.startswith("trainable_candle.")
            }
            assert not imported & ABOVE[package], (path, imported)


def test_cases_of_operations_are_compiled_for_tests_only() -> None:
    # Declarations of the modules with cases, uses of them, and the lists of cases: an operation's
    # (ENTRIES) and that of all operations (REGISTRY).
    of_tests = re.compile(r"\s*(pub\S* )?(mod cases?;|static (ENTRIES|REGISTRY)|use .*\bcases?::)")
    for path in (ROOT / "rust" / "core" / "src" / "ops").rglob("*.rs"):
        if path.name == "cases.rs":  # compiled only through its `mod` line
            continue
        lines = ["", *path.read_text().splitlines()]
        for previous, line in pairwise(lines):
            if of_tests.match(line):
                assert previous.strip() == '#[cfg(feature = "testing")]', (path, line)
