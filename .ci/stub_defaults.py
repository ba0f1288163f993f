"""Read defaults of parameters from the Rust sources, and write them into the generated stubs.

PyO3 writes a default into a stub only if it is a literal. For any other expression, such as
`Integer::of(8)`, it writes `...`.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

Defaults = dict[tuple[str, str], str]

# A signature and the function that it belongs to, as in
# `#[pyo3(signature = (size, groups = Integer::of(8)))] fn new`.
SIGNATURE = re.compile(r"signature = \((.*?)\)\)\].*?\bfn (\w+)", re.DOTALL)
DEFAULT = re.compile(r"(\w+)\s*=\s*(?:Integer|Pair|Argument)::of\((-?[\d.e-]+|None)\)")
# The block `impl Class {` that a function is in.
OWNER = re.compile(r"^impl (\w+) \{", re.MULTILINE)


def defaults(folder: Path) -> Defaults:
    """Return the defaults in the Rust files, by (function or class, parameter)."""
    found: Defaults = {}
    for path in sorted(folder.rglob("*.rs")):
        source = path.read_text()
        for signature in SIGNATURE.finditer(source):
            name = signature[2]
            owners = OWNER.findall(source, 0, signature.start())
            if name == "new" and owners:
                name = owners[-1]
            found |= {
                (name, parameter): value for parameter, value in DEFAULT.findall(signature[1])
            }
    return found


def hidden(tree: ast.Module) -> Iterator[tuple[str, str, ast.expr]]:
    """Yield the function or class, the parameter and the syntax node of every default `...`."""
    for scope in ast.walk(tree):
        for node in getattr(scope, "body", []):
            if not isinstance(node, ast.FunctionDef):
                continue
            name = node.name
            if isinstance(scope, ast.ClassDef) and name in {"__new__", "__init__"}:
                name = scope.name
            positional = [*node.args.posonlyargs, *node.args.args]
            given = node.args.defaults
            pairs = [
                *zip(positional[len(positional) - len(given) :], given, strict=True),
                *zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True),
            ]
            for argument, default in pairs:
                if isinstance(default, ast.Constant) and default.value is ...:
                    yield name, argument.arg, default


def show_defaults(source: str, known: Defaults) -> str:
    """Return the source, with each default in `known` in place of its `...`."""
    lines = source.encode().split(b"\n")  # ast counts columns in bytes
    places = [
        (default.lineno - 1, default.col_offset, text)
        for name, parameter, default in hidden(ast.parse(source))
        if is_literal(text := known.get((name, parameter), ""))  # "" is not a literal
    ]
    for row, column, text in sorted(places, reverse=True):
        line = lines[row]
        lines[row] = line[:column] + text.encode() + line[column + len("...") :]
    return b"\n".join(lines).decode()


def is_literal(text: str) -> bool:
    """Return whether the Rust text of a default is also a literal in Python."""
    try:
        ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return False
    return True
