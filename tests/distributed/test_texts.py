"""Validation of texts and of pairs of answers has the same results on two processes as on one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainable_candle.run import JSON_LOG
from trainable_candle.train.logs import read_json_log


def validations(output: Path, *settings: str) -> dict[int, dict[str, Any]]:
    """The validation results of a run of the built-in language model, by step."""
    command = [sys.executable, "-m", "trainable_candle", "train", "--model", "causal-lm"]
    small = [
        "--steps",
        "2",
        "--learning-rate",
        "1e-2",
        "--sequence-length",
        "64",
        "--device",
        "cpu",
    ]
    result = subprocess.run(
        [*command, "--output", str(output), *small, *settings],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    rows = read_json_log(output / JSON_LOG)
    return {
        row["step"]: {name: value for name, value in row.items() if name.startswith("validation_")}
        for row in rows
        if "validation_loss" in row
    }


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_results_of_validation_equal_those_of_one_process(tmp_path: Path, objective: str) -> None:
    dataset = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": f"say {word}", "chosen": f"{word} {word}", "rejected": "no"}
        if objective == "dpo"
        else {"prompt": f"say {word}", "completion": f"{word} {word}"}
        for word in ("a", "bee", "sea", "tea", "ease", "knee", "pea", "key", "free", "three")
    ]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["--dataset", str(dataset), "--validation-split", "0.5", "--validate-every", "1"]
    more = [] if objective == "sft" else ["--objective", "dpo"]
    one = validations(tmp_path / "one", *common, *more, "--gradient-accumulation", "2")
    two = validations(tmp_path / "two", *common, *more, "--gpus", "2")
    assert list(one) == list(two) == [0, 1, 2]
    assert two[0] == one[0]
    assert one[0].keys() > {"validation_loss"}
    for step in (1, 2):
        # A margin is a small difference of f32 log-probabilities, so its relative error is large;
        # `abs` allows for this error.
        assert two[step] == pytest.approx(one[step], rel=1e-4, abs=1e-6)
