"""Time a frozen linear layer with LoRA, forward and backward, and the same layer in torch.

python benches/lora_linear.py [--rows]
"""

from __future__ import annotations

import numpy as np
import timing

import trainable_candle as tc


def compare(
    rows: int, width: int, rank: int, rounds: int, *, prints_row_times: bool = False
) -> None:
    """Time this library and torch on inputs of shape (rows, width), and print their times."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((width, width), dtype=np.float32) * 0.02
    down = rng.standard_normal((rank, width), dtype=np.float32) * 0.02
    up = rng.standard_normal((width, rank), dtype=np.float32) * 0.02
    x = rng.standard_normal((rows, width), dtype=np.float32)
    result_grad = rng.standard_normal((rows, width), dtype=np.float32)

    layer = tc.nn.LoRALinear(tc.tensor(weight), rank, rank / 2)  # alpha = rank / 2: a scale of 0.5
    # `get_vars` returns the factor (rank, width) first, as `down`.
    for var, value in zip(layer.get_vars(), (down, up), strict=True):
        var.set(tc.tensor(value))
    our_x, our_grad = tc.Var(x), tc.tensor(result_grad)

    def ours() -> None:
        for var in (our_x, *layer.get_vars()):
            var.zero_grad()
        layer(our_x).backward(our_grad)

    sides = {"ours": ours}
    torch = timing.find_torch()
    if torch:
        base, their_grad = torch.from_numpy(weight), torch.from_numpy(result_grad)
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
    if prints_row_times:
        row_times = (f"{name} {value / rows * 1e6:.2f} us a row" for name, value in seconds.items())
        print(f"{title}: {', '.join(row_times)}", flush=True)


def main() -> None:
    parser = timing.parser(__doc__)
    parser.add_argument(
        "--rows",
        action="store_true",
        help="instead, time 2^12 to 2^20 rows, and print times per row",
    )
    options = timing.start(parser)
    if options.rows:
        for power in range(12, 21, 2):
            # Twice the rows get half the rounds, but at least 5.
            rounds = max(options.rounds >> (power - 12), 5)
            compare(2**power, width=512, rank=16, rounds=rounds, prints_row_times=True)
        return
    for rows, width, rank in ((512, 1024, 16), (1024, 768, 16), (2048, 640, 32), (64, 256, 8)):
        compare(rows, width, rank, options.rounds)


if __name__ == "__main__":
    main()
