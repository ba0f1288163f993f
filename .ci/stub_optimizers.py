"""Print the stubs of the optimizers of a built extension: `stub_optimizers.py LIBRARY`."""

import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any

NUMBER = "SupportsFloat | SupportsIndex"
HEADER = """
from collections.abc import Iterable, Mapping
from typing import Any, SupportsFloat, SupportsIndex

from trainable_candle import Var
from trainable_candle.optim.groups import GroupedOptimizer
"""


def type_of(default: Any) -> str:
    """Return the type annotation of a hyper-parameter with this default."""
    if default is None:
        return f"{NUMBER} | None"
    if isinstance(default, tuple):
        return f"tuple[{', '.join(map(type_of, default))}]"
    return {bool: "bool", int: "int"}.get(type(default), NUMBER)


def text_of(default: Any) -> str:
    """Return the default of a hyper-parameter as code; `...` for infinity, which has no literal."""
    return "..." if default == float("inf") else repr(default)


def stubs(library: str) -> str:
    """Return the stubs of the optimizers in a built library."""
    loader = ExtensionFileLoader("_core", library)
    spec = spec_from_loader("_core", loader)
    assert spec is not None
    core = module_from_spec(spec)
    loader.exec_module(core)
    kinds = core.optimizer_kinds()
    parts = [HEADER, f"__all__ = {[name for name, *_ in kinds]!r}"]
    # The first `positional` hyper-parameters of `defaults` may be passed by position.
    for name, doc, positional, defaults in kinds:
        body = "\n".join(f"    {line}".rstrip() for line in doc.splitlines())
        arguments = [
            "cls",
            "/",
            "params: Iterable[Var] | Mapping[str, Var] | Iterable[Mapping[str, Any]]",
        ]
        for index, (field, default) in enumerate(defaults.items()):
            if index == positional:
                arguments.append("*")
            arguments.append(f"{field}: {type_of(default)} = {text_of(default)}")
        # The arguments that all optimizers have are passed by name only. The loop has added no `*`
        # if all hyper-parameters may be passed by position.
        if len(defaults) == positional:
            arguments.append("*")
        arguments.append("stochastic_rounding: bool = False")
        arguments.append("states: str = 'device'")
        arguments += [f"{flag}: bool | None = None" for flag in ("fused", "foreach")]
        new = f"    def __new__({', '.join(arguments)}) -> {name}: ..."
        parts.append(f'class {name}(GroupedOptimizer):\n    """\n{body}\n    """\n{new}')
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(stubs(sys.argv[1]))
