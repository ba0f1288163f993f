"""Kill and resume training runs: each must end with the adapter of a run without kills.

python tests/robustness/kill.py [--kills 50] [--seed 0]

A run starts a process. If this process is killed, another one resumes from the latest checkpoint,
and so on until one reaches the last step. A process is killed at a random file event: when it
opens, makes, renames, truncates or removes a file or folder in the run's folder, such as a log, a
cache entry, a checkpoint or a preview.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import trainable_candle as tc
from trainable_candle.train.state import checkpoints, needs_restoring

FLAGS = {
    "model": "digits", "rank": 4, "steps": 12, "batch-size": 4, "save-every": 2, "ema-decay": 0.9,
    "validation-split": 0.2, "validate-every": 3, "keep-checkpoints": 2, "threads": 1,
}  # fmt: skip
# Names of the events that Python's audit hooks get.
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
ADAPTER = "adapter.safetensors"


def child(folder: str, fatal: int, arguments: list[str]) -> None:
    """Train, and print the number of events at the end. Event number `fatal` kills this process.

    Events are numbered from 1. If `fatal` is 0, none kills it.
    """
    lock, count = threading.Lock(), [0]

    def hook(event: str, values: tuple[Any, ...]) -> None:
        if event not in EVENTS or not values or not str(values[0]).startswith(folder):
            return
        with lock:
            count[0] += 1
            if count[0] == fatal:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    sys.argv = ["train-lora", *arguments]
    from trainable_candle.cli import train_lora

    code = 0
    try:
        code = train_lora() or 0
    finally:
        print(f"events {count[0]}", flush=True)
    sys.exit(code)


def train(folder: Path, fatal: int, *more: str) -> subprocess.CompletedProcess[str]:
    """Train in a process that event `fatal` in `folder` kills; 0 lets it train until the end.

    `more` are flags beside `FLAGS`.
    """
    flags = [text for name, value in FLAGS.items() for text in (f"--{name}", str(value))]
    paths = ["--dataset", str(folder / "images"), "--output", str(folder / "run")]
    command = [sys.executable, __file__, "--child", str(folder), str(fatal), *paths, *flags, *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def write_images(folder: Path) -> None:
    """Write twelve images with captions."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(12):
        pixels = generator.integers(0, 256, (8, 8), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a handwritten {number % 10}", encoding="utf-8")


def adapter(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor of the adapter that a run ended with."""
    # If there is no such file, the default of `next` gives `load_file` a path for its error.
    tensors = tc.load_file(next((folder / "run").rglob(ADAPTER), folder / "run" / ADAPTER))
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def resume(folder: Path) -> list[str]:
    """Return the flags to resume the run in `folder`; none if it has no checkpoint.

    A checkpoint that a killed process was replacing counts, because the next process restores it.
    """
    resumable = checkpoints(folder / "run") or needs_restoring(folder / "run")
    return ["--resume", "latest"] if resumable else []


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), sys.argv[4:])  # does not return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="kill-") as name:
        base = Path(name)
        uninterrupted = base / "uninterrupted"
        write_images(uninterrupted / "images")
        result = train(uninterrupted, 0)
        if result.returncode:
            sys.exit(f"the run without kills failed: {result.stderr}")
        events, expected = int(result.stdout.split()[-1]), adapter(uninterrupted)
        print(f"{events} events in an uninterrupted run of {FLAGS['steps']} steps", flush=True)
        kills, runs = 0, 0
        while kills < options.kills:
            folder = base / f"run-{runs}"
            write_images(folder / "images")
            runs += 1
            while True:
                # Each iteration starts one process. If no process was killed so far in any run, or
                # if the output folder is empty, the process is killed at a random event. Otherwise,
                # half of the processes are killed at a random event.
                fatal = rng.randint(1, events) if not kills or rng.random() < 0.5 else 0
                if not any(folder.glob("run/*")):
                    fatal = fatal or rng.randint(1, events)
                flags = resume(folder)
                result = train(folder, fatal, *flags)
                if result.returncode == -signal.SIGKILL:
                    kills += 1
                    continue
                break
            # `flags` are those of the process that was not killed.
            where = f"run {runs}, after {kills} kills, flags {flags}"
            if result.returncode:
                sys.exit(f"{where}: {result.stderr}")
            if adapter(folder) != expected:
                sys.exit(f"{where}: the adapter is not that of the run without kills")
            shutil.rmtree(folder)
        print(f"{kills} kills in {runs} runs, each ended with the same adapter, bit for bit")


if __name__ == "__main__":
    main()
