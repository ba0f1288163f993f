"""The documentation site has every guide, every public module and name, and every demo."""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Any

import trainable_candle as tc
from trainable_candle.cli.demo import MODELS

ROOT = Path(__file__).parents[2]
SITE = ROOT / ".ci" / "site"


def load(name: str) -> Any:
    """Return the script NAME.py of the site as an imported module."""
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = load("reference")


def test_the_reference_has_every_public_name() -> None:
    # "" is the package itself. Its names that are modules have pages of their own, and mkdocstrings
    # replaces the line `::: NAME` of any other name by its documentation.
    assert reference.names("") == sorted(tc.__all__, key=str.lower)
    page = reference.pages()["reference/trainable_candle.md"]
    modules = set(reference.MODULES)
    missing = [
        n for n in tc.__all__ if n not in modules and f"::: trainable_candle.{n}\n" not in page
    ]
    assert missing == []


def test_the_reference_has_every_public_module() -> None:
    tree = ast.parse((ROOT / "python/trainable_candle/__init__.py").read_text())
    # `_LAZY` is a frozenset of the names of modules that are imported at first use.
    lazy = next(
        ast.literal_eval(node.value.args[0])
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and node.value.args
        and any(isinstance(target, ast.Name) and target.id == "_LAZY" for target in node.targets)
    )
    assert lazy - set(reference.MODULES) == set()


def test_the_navigation_has_every_guide() -> None:
    listed = set(re.findall(r"[\w-]+\.md", (SITE / "mkdocs.yml").read_text()))
    # The sources of these three pages are outside `docs/`.
    assert listed - {"index.md", "examples.md", "gallery.md"} == {
        path.name for path in (ROOT / "docs").glob("*.md")
    }


def test_the_gallery_has_every_demo() -> None:
    assert load("gallery").DEMOS.keys() == set(MODELS)
