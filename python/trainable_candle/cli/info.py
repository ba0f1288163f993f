"""`trainable-candle info`: show versions, devices and models."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.cli.options import Parser, add_help

if TYPE_CHECKING:
    from collections.abc import Sequence


def run(arguments: Sequence[str], program: str) -> int:
    """Print versions, devices and models, and return the exit status."""
    parser = Parser(program, "Show versions, devices and the models that can be trained.", "[-h]")
    add_help(parser.add_argument_group("options"))
    parser.parse(arguments)
    facts = tc.info()
    print(f"trainable-candle {facts['version']}, Python {facts['python']}, {facts['platform']}")
    why_not_cuda = f" ({facts['reason']})" if facts["reason"] else ""
    print(f"backend: {facts['backend']}{why_not_cuda}")
    print(f"devices: {', '.join(facts['devices'])}; {facts['threads']} CPU threads")
    print("models:")
    for name in families.NAMES:
        print(f"  {name:<10}  {families.find(name).summary}")
    return 0
