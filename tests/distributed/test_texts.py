"""Validation of texts and of pairs of answers has the same results on two processes as on one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainable_candle.run import JSON_LOG
from trainable_candle.train.logs import read_json_log


def validations(output: Path, *flags: str) -> dict[int, dict[str, Any]]:
    """Train the built-in language model; return the validation results by step."""
    command = [sys.executable, "-m", "trainable_candle", "train", "--model", "causal-lm"]
    small = ["--steps", "2", "--learning-rate", "1e-2", "--sequence-length", "64"]
    result = subprocess.run(
        [*command, "--device", "cpu", "--output", str(output), *small, *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return {
        line["step"]: {
            name: value for name, value in line.items() if name.startswith("validation_")
        }
        for line in read_json_log(output / JSON_LOG)
        if "validation_loss" in line
    }


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_validation_on_two_processes_has_the_results_of_one(tmp_path: Path, objective: str) -> None:
    dataset = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": f"say {word}", "chosen": f"{word} {word}", "rejected": "no"}
        if objective == "dpo"
        else {"prompt": f"say {word}", "completion": f"{word} {word}"}
        for word in ("a", "bee", "sea", "tea", "ease", "knee", "pea", "key", "free", "three")
    ]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["--dataset", str(dataset), "--validation-split", "0.5", "--validate-every", "1"]
    objective_flags = [] if objective == "sft" else ["--objective", "dpo"]
    # Two processes with a batch each take the same steps as one that accumulates two batches.
    one = validations(tmp_path / "one", *common, *objective_flags, "--gradient-accumulation", "2")
    two = validations(tmp_path / "two", *common, *objective_flags, "--gpus", "2")
    # Validation runs before training and after each of the two steps.
    assert list(one) == list(two) == [0, 1, 2]
    # Before the first update, the results are the same in every bit.
    assert two[0] == one[0]
    assert one[0].keys() > {"validation_loss"}  # there are other results, too
    for step in (1, 2):
        # A margin is a small difference of f32 log-probabilities, so its relative error is large;
        # `abs` allows for this error.
        assert two[step] == pytest.approx(one[step], rel=1e-4, abs=1e-6)
