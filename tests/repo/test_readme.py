"""The README's Python runs, and does what it says."""

import re
from pathlib import Path

import trainable_candle as tc

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def run(block: str) -> dict[str, object]:
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    return names


def test_there_are_two_examples() -> None:
    assert len(BLOCKS) == 2


def test_the_network_reads_digits() -> None:
    names = run(BLOCKS[0])
    assert names["accuracy"] >= 0.97


def test_lora_finds_the_other_layer() -> None:
    tc.manual_seed(0)
    names = run(BLOCKS[1])
    assert names["loss"].item() < 1e-3
    assert names["merged"].shape == names["weight"].shape
