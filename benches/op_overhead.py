"""The overhead of calling an operation from Python: tensors of one element, gradients on.

python benches/op_overhead.py
"""

from __future__ import annotations

import timing

import trainable_candle as tc


def main() -> None:
    options = timing.arguments(__doc__)
    torch = timing.find_torch()
    ours = tc.Var([1.0], dtype="f32")
    other = tc.tensor([2.0], dtype="f32")
    theirs = torch.ones(1, requires_grad=True) if torch else None
    constant = torch.full((1,), 2.0) if torch else None
    cases = {
        "add": (lambda: ours + other, lambda: theirs + constant),
        "mul": (lambda: ours * other, lambda: theirs * constant),
        "mul by a number": (lambda: ours * 2.0, lambda: theirs * 2.0),
        "exp": (ours.exp, theirs.exp if torch else ours.exp),
        "reshape": (lambda: ours.reshape(1, 1), lambda: theirs.reshape(1, 1)),
    }
    for name, (mine, reference) in cases.items():
        sides = {"ours": mine} | ({"torch": reference} if torch else {})
        timing.report(name, timing.race(sides, options.rounds, inner=20_000), 1e-6, "us")


if __name__ == "__main__":
    main()
