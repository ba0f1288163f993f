"""A frozen linear layer with LoRA, forward and backward.

python benches/lora_linear.py [--rows]
"""

from __future__ import annotations

import numpy as np
import timing

import trainable_candle as tc


def case(rows: int, width: int, rank: int, rounds: int, *, by_row: bool = False) -> None:
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((width, width), dtype=np.float32) * 0.02
    down = rng.standard_normal((rank, width), dtype=np.float32) * 0.02
    up = rng.standard_normal((width, rank), dtype=np.float32) * 0.02
    x = rng.standard_normal((rows, width), dtype=np.float32)
    grad = rng.standard_normal((rows, width), dtype=np.float32)

    layer = tc.nn.LoRALinear(tc.tensor(weight), rank, rank / 2)
    for var, value in zip(layer.get_vars(), (down, up), strict=True):
        var.set(tc.tensor(value))
    our_x, our_grad = tc.Var(x), tc.tensor(grad)

    def ours() -> None:
        for var in (our_x, *layer.get_vars()):
            var.zero_grad()
        layer(our_x).backward(our_grad)

    sides = {"ours": ours}
    torch = timing.find_torch()
    if torch:
        base, their_grad = torch.from_numpy(weight), torch.from_numpy(grad)
        their_x = torch.from_numpy(x).requires_grad_()
        a, b = (torch.from_numpy(m).requires_grad_() for m in (down, up))
        linear = torch.nn.functional.linear

        def theirs() -> None:
            for leaf in (their_x, a, b):
                leaf.grad = None
            y = linear(their_x, base) + linear(linear(their_x, a), b) * 0.5
            y.backward(their_grad)

        sides["torch"] = theirs
    seconds = timing.race(sides, rounds)
    title = f"{rows} rows, {width} -> {width}, rank {rank}"
    timing.report(title, seconds)
    if by_row:
        costs = (f"{name} {value / rows * 1e6:.2f} us a row" for name, value in seconds.items())
        print(f"{title}: {', '.join(costs)}", flush=True)


def main() -> None:
    parser = timing.parser(__doc__)
    parser.add_argument("--rows", action="store_true", help="time growing numbers of rows")
    options = timing.start(parser)
    if options.rows:
        for power in range(12, 21, 2):
            case(2**power, 512, 16, max(options.rounds >> (power - 12), 5), by_row=True)
        return
    for rows, width, rank in ((512, 1024, 16), (1024, 768, 16), (2048, 640, 32), (64, 256, 8)):
        case(rows, width, rank, options.rounds)


if __name__ == "__main__":
    main()
