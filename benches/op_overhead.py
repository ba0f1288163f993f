"""Time calls of operations on one element, here and in torch: the overhead of a call.

One operand needs a gradient, so each call also records its operation for the backward pass.

python benches/op_overhead.py
"""

from __future__ import annotations

import timing

import trainable_candle as tc


def main() -> None:
    options = timing.arguments(__doc__)
    torch = timing.find_torch()
    ours = tc.Var([1.0], dtype="f32")
    our_constant = tc.tensor([2.0], dtype="f32")
    theirs = torch.ones(1, requires_grad=True) if torch else None
    their_constant = torch.full((1,), 2.0) if torch else None
    cases = {
        "add": (lambda: ours + our_constant, lambda: theirs + their_constant),
        "mul": (lambda: ours * our_constant, lambda: theirs * their_constant),
        "mul by a number": (lambda: ours * 2.0, lambda: theirs * 2.0),
        # Without torch, the second call of a pair, torch's, is not used; any function will do here.
        "exp": (ours.exp, theirs.exp if torch else ours.exp),
        "reshape": (lambda: ours.reshape(1, 1), lambda: theirs.reshape(1, 1)),
    }
    for name, (our_call, their_call) in cases.items():
        sides = {"ours": our_call} | ({"torch": their_call} if torch else {})
        # A round has 20,000 calls, because one call is too short to time.
        seconds = timing.race(sides, options.rounds, inner=20_000)
        timing.report(name, seconds, unit=1e-6, symbol="us")


if __name__ == "__main__":
    main()
