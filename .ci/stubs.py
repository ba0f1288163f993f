#!/usr/bin/env python3
"""Generate the type stubs of the extension: `stubs.py write TREE` or `stubs.py check TREE`.

TREE is the source tree that the extension is built from, the checkout or the unpacked sdist.
The environment variable CARGO_TARGET_DIR, which make sets, is where the build writes its files.
"""

import ast
import builtins
import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

from stub_defaults import defaults, show_defaults

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "trainable_candle"
COMMITTED = PACKAGE / "_core.pyi"
OPTIMIZERS = PACKAGE / "optim" / "kinds.pyi"
FOLDER = Path(os.environ["CARGO_TARGET_DIR"]) / "stubs"
GENERATED = FOLDER / "trainable_candle" / "_core.pyi"
# The extension, which `generate` builds.
LIBRARY = FOLDER.parent / "maturin" / "lib_core.so"


def run(*command: str, folder: Path = ROOT) -> None:
    """Run a command and stop with its exit code if it fails."""
    result = subprocess.run(command, cwd=folder, check=False)
    if result.returncode:
        sys.exit(result.returncode)


def hidden_builtins(tree: ast.Module) -> list[ast.Name]:
    """Return each use, within a class, of a builtin type that a method of the class hides."""
    names = []
    for scope in ast.walk(tree):
        if isinstance(scope, ast.ClassDef):
            methods = {node.name for node in scope.body if isinstance(node, ast.FunctionDef)}
            hidden = {name for name in methods if isinstance(getattr(builtins, name, None), type)}
            names += [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id in hidden]
    return names


def qualify_hidden_builtins(source: str) -> str:
    """Put `builtins.` before each name that `hidden_builtins` finds."""
    lines = source.encode().split(b"\n")  # ast counts columns in bytes
    tree = ast.parse(source)
    names = hidden_builtins(tree)
    for name in sorted(names, key=lambda n: (n.lineno, n.col_offset), reverse=True):
        line = lines[name.lineno - 1]
        lines[name.lineno - 1] = line[: name.col_offset] + b"builtins." + line[name.col_offset :]
    if names:
        first = next(node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)))
        lines.insert(first.lineno - 1, b"import builtins")
    return b"\n".join(lines).decode()


def with_composed_methods(source: str) -> str:
    """Declare the methods that `_methods.attach` adds to classes of the extension."""
    for old, new in (
        ("class Tensor:", "class Tensor(ComposedMethods):"),
        ("class Var(Tensor):", "class Var(VarMethods, Tensor):"),
    ):
        if source.count(old) != 1:
            sys.exit(f"stubs: there is no `{old}`")
        source = source.replace(old, new)
    # `_arguments.attach` makes `Tensor.device` return a `Device`, a `str` with `type` and `index`.
    start = source.index("class Tensor(")
    place = source.index("def device(self, /) -> str:", start)
    source = source[:place] + source[place:].replace("-> str:", "-> Device:", 1)
    first = source.index("from ")  # the first import
    imports = "from trainable_candle._device import device as Device\n"
    imports += "from trainable_candle._in_place import VarMethods\n"
    imports += "from trainable_candle._methods import ComposedMethods\n"
    return source[:first] + imports + source[first:]


def generate(tree: Path) -> str:
    """Return the stubs of the extension that `tree` builds."""
    linker = f"linker={ROOT / '.ci' / 'zig-cc'}"
    build = ("maturin", "generate-stubs", "--profile", "release", "--out", str(FOLDER))
    # The generator reads the library's symbols, so these must not be stripped.
    run(*build, "--", "-C", linker, "-C", "strip=none", folder=tree)
    source = GENERATED.read_text()
    for number, line in enumerate(source.splitlines(), 1):
        if "Incomplete" in line:
            sys.exit(
                f"stubs: line {number} has the placeholder Incomplete for a type; "
                f"define INPUT_TYPE or OUTPUT_TYPE for the Rust type: {line.strip()}"
            )
    # PyO3 writes `...` for a default that is not a literal; the Rust sources have the values.
    source = show_defaults(source, defaults(tree / "rust" / "python" / "src"))
    source = with_composed_methods(qualify_hidden_builtins(source))
    # pyo3 writes `dict` without types; every dict of the extension has strings as keys.
    GENERATED.write_text(re.sub(r"([:,] )dict(?=[],)])", r"\1dict[str, Any]", source))
    return formatted(GENERATED)


def formatted(path: Path) -> str:
    """Format a stub file in place, in the style of the committed stubs, and return its text."""
    config = f"--config={ROOT / 'pyproject.toml'}"
    run("ruff", "check", "--quiet", config, "--select=F401,I,UP", "--fix", str(path))
    run("ruff", "format", "--quiet", config, str(path))
    return path.read_text()


def generate_optimizers() -> str:
    """Return the stubs of the optimizers in the library that `generate` has built."""
    path = FOLDER / "kinds.pyi"
    script = str(ROOT / ".ci" / "stub_optimizers.py")
    made = subprocess.run([sys.executable, script, str(LIBRARY)], check=True, capture_output=True)
    path.write_bytes(made.stdout)
    return formatted(path)


def main(action: str, tree: str) -> None:
    """Write the stubs of TREE's extension into the checkout, or compare them with those in it."""
    for path, generated in (
        (COMMITTED, generate(Path(tree))),
        (OPTIMIZERS, generate_optimizers()),
    ):
        if action == "write":
            path.write_text(generated)
            continue
        committed = path.read_text()
        if committed != generated:
            sys.stdout.writelines(
                difflib.unified_diff(
                    committed.splitlines(keepends=True),
                    generated.splitlines(keepends=True),
                    path.name,
                    "the Rust signatures",
                )
            )
            sys.exit(f"stubs: {path.name} differs from the Rust signatures; run `make stubs`")


if __name__ == "__main__":
    main(*sys.argv[1:])
