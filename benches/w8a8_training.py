"""Whether products of codes train as well as those of values: the built-in language model.

python benches/w8a8_training.py [--device cuda] [--steps 2000] [--seeds 3]

A LoRA learns the demo's unseen task over a base in 8 bits, with products of values and of codes
(`--w8a8`). A line for each: the mean loss of the last tenth of the steps and the share of exact
answers about held-out words, seed by seed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from trainable_candle.demo.language import DATASET, Answers, configuration, write_dataset
from trainable_candle.run import train_adapter
from trainable_candle.tasks.text.task import TextTask
from trainable_candle.train.logs import read_json_log

CASES = (("same", False), ("int8", False), ("int8", True), ("fp8", False), ("fp8", True))


def trained(base: str, *, w8a8: bool, seed: int, steps: int, device: str) -> tuple[float, float]:
    """The mean loss of the last tenth, and the share of right answers."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder)
        write_dataset(output / DATASET, seed)
        config = configuration(output, seed=seed).with_(
            base_precision=base, w8a8=w8a8, steps=steps, device=device, precision="bf16"
        )
        run = train_adapter(config, progress=False, report=lambda _: None)
        assert isinstance(run.task, TextTask)
        rows = read_json_log(output / "train.jsonl")
        losses = [row["loss"] for row in rows if "loss" in row]
        return statistics.mean(losses[-max(1, steps // 10) :]), Answers(run.task, seed).right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    for base, w8a8 in CASES:
        found = [
            trained(base, w8a8=w8a8, seed=seed, steps=given.steps, device=given.device)
            for seed in range(given.seeds)
        ]
        losses = " ".join(f"{loss:.4f}" for loss, _ in found)
        right = " ".join(f"{share:.1%}" for _, share in found)
        name = f"{base} base, {'codes' if w8a8 else 'values'}"
        print(f"{name:<20} loss {losses}   right {right}", flush=True)


if __name__ == "__main__":
    main()
