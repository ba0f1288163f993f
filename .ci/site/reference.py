"""Makes the reference of every public name: pages that mkdocstrings fills from the docstrings."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "trainable_candle"
MODULES = (
    "",
    "cuda",
    "data",
    "distributed",
    "errors",
    "families",
    "loader",
    "memory",
    "models",
    "nn",
    "nn.functional",
    "nn.init",
    "optim",
    "optim.lr_scheduler",
    "peft",
    "testing",
    "train",
)
"""The public modules, in the order of the reference; "" is the package itself."""


def names(module: str) -> list[str]:
    """Return every public name of a module: its `__all__`, read without an import."""
    path = PACKAGE.joinpath(*module.split(".")) if module else PACKAGE
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(source.read_text()).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                listed: list[str] = ast.literal_eval(value)
                return sorted(listed, key=str.lower)
            case _:
                continue
    raise ValueError(f"{source.relative_to(ROOT)} has no __all__")


def pages() -> dict[str, str]:
    """Return the text of each page of the reference, by its path in the site."""
    return {f"reference/{module or 'trainable_candle'}.md": page(module) for module in MODULES}


def page(module: str) -> str:
    """Return the text of a module's page; mkdocstrings replaces its `:::` lines."""
    full = f"trainable_candle.{module}".rstrip(".")
    parts = [f"# {full}\n"]
    if module:
        # This block, which the package's page lacks, shows only the module's docstring. The loop
        # below adds a heading per member.
        parts.append(
            f"::: {full}\n    options:\n      members: []\n      show_root_heading: false\n"
        )
    for name in names(module):
        member = f"{module}.{name}".lstrip(".")
        if member in MODULES:
            # A public module inside this module has a page of its own.
            parts.append(f"### {name}\n\nA module: [{full}.{name}]({member}.md).\n")
        else:
            parts.append(f"::: {full}.{name}\n")
    return "\n".join(parts)
