"""The package's tiny SDXL trains on photographs, as in `examples/04_sdxl_from_pictures.py`."""

import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trainable_candle as tc
from trainable_candle.train.logs import read_json_log, read_log
from trainable_candle.train.state import checkpoints, step_of

PHOTOGRAPHS = Path(__file__).parents[2] / "examples" / "photos"


def training(output: Path, steps: int, **settings: Any) -> list[str]:
    """Return the arguments of a run; `settings` are added to, or override, those given here."""
    given = {
        "model": "sdxl",
        "dataset": PHOTOGRAPHS,
        "output": output,
        "rank": 16,
        "steps": steps,
        "batch_size": 4,
        "learning_rate": 2e-3,
        "target_modules": "all-linear",
        "sample_prompts": "a photo of a cup of coffee with a spoon on a red plate",
        **settings,
    }
    arguments = ["train"]
    for name, value in given.items():
        arguments += [f"--{name.replace('_', '-')}", str(value)]
    return arguments


PROGRAM = [sys.executable, "-m", "trainable_candle"]
# A program with the arguments FOLDER, N and a command line. The program runs the command and kills
# itself before the N-th operation on a file or folder below FOLDER. With N = 0, or if the command
# ends before the N-th operation, the program prints the number of operations below FOLDER.
KILLS_ITSELF = """
import atexit, os, signal, sys
from trainable_candle.cli import main

folder, n = sys.argv[1], int(sys.argv[2])
del sys.argv[1:3]
count = 0

def operation(event, arguments):
    global count
    if event in {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}:
        if str(arguments[0]).startswith(folder):
            count += 1
            if count == n:
                os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(operation)
atexit.register(lambda: print("operations:", count))
sys.exit(main())
"""


def run_checked(arguments: list[str], program: Sequence[str] = PROGRAM) -> str:
    """Run a program that must succeed, and return its standard output."""
    result = subprocess.run([*program, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
def test_photographs_are_learned(tmp_path: Path) -> None:
    """The validation loss falls by more than a quarter, and previews change visibly.

    Validation is on the training images, with the same noise and timesteps each time.
    """
    output = tmp_path / "run"
    validation = {"validation_dataset": PHOTOGRAPHS, "validate_every": 75}
    previews = {"sample_every": 150, "sample_steps": 4}
    run_checked(training(output, 150, cache="memory", **validation, **previews))
    # Guards against a test on a few images only.
    assert len(list(PHOTOGRAPHS.glob("*.jpg"))) >= 20
    rows = [row for row in read_json_log(output / "train.jsonl") if "validation_loss" in row]
    assert [row["step"] for row in rows] == [0, 75, 150]
    first, _, last = (row["validation_loss"] for row in rows)
    assert last < 0.75 * first
    drawn = []
    for step in (0, 150):
        with Image.open(output / "samples" / f"step-{step:06}.png") as image:
            drawn.append(np.asarray(image).astype(float))
    assert np.abs(drawn[0] - drawn[1]).mean() > 5  # of 255


@pytest.mark.slow
def test_a_killed_run_loses_only_the_steps_since_its_last_checkpoint(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "cache": "disk",
        "cache_dir": tmp_path / "cache",
        "save_every": 2,
        "validation_split": 0.25,
        "validate_every": 4,
        "sample_every": 8,
        "sample_steps": 1,
        "ema_decay": 0.9,
    }
    output, unbroken = tmp_path / "killed", tmp_path / "unbroken"
    kills_itself = [sys.executable, "-c", KILLS_ITSELF, str(tmp_path)]
    printed = run_checked(training(unbroken, 16, **settings), [*kills_itself, "0"])
    # The unbroken run also fills its cache. A resumed run finds the cache filled, so it does fewer
    # than `operations`. Each n below is less than half of `operations`, so that most resumed runs
    # reach operation n and are killed.
    operations = int(printed.rpartition("operations: ")[2])
    settings["cache_dir"] = tmp_path / "cache of the killed"
    generator = random.Random(0)
    kills = 0
    for _ in range(10):
        before = checkpoints(output)
        resume = {"resume": "latest"} if before else {}
        arguments = training(output, 16, **settings, **resume)
        n = generator.randrange(1, operations // 2)
        result = subprocess.run(
            [*kills_itself, str(n), *arguments], capture_output=True, text=True, check=False
        )
        assert result.returncode in {0, -signal.SIGKILL}, result.stderr
        kills += result.returncode != 0
        assert "Traceback" not in result.stderr
        assert "error" not in result.stderr
        # With save_every=2, the last checkpoint is at most two steps older than the log.
        steps = len(read_log(output / "train.csv"))
        after = checkpoints(output)
        assert not before or step_of(after[-1]) >= step_of(before[-1])
        if steps > 2:
            assert step_of(after[-1]) >= steps - 2
    assert kills >= 3
    resume = {"resume": "latest"} if checkpoints(output) else {}
    run_checked(training(output, 16, **settings, **resume))
    for name in ("adapter.safetensors", "adapter-best.safetensors"):
        assert contents(unbroken / name) == contents(output / name), name
    assert {path.name for path in output.iterdir()} == {path.name for path in unbroken.iterdir()}
    logs = [[row["loss"] for row in read_log(path / "train.csv")] for path in (unbroken, output)]
    assert logs[0] == logs[1]


def contents(path: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor of an adapter file, without the header: it names the run."""
    return {name: tensor.numpy().tobytes() for name, tensor in tc.load_file(path).items()}
