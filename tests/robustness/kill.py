"""Kill and resume training runs: each must end with the adapter of a run without kills.

python tests/robustness/kill.py [--kills 50] [--seed 0]

A run is killed at a random file event: when it opens, makes, renames or removes a file in its
folder, such as a log, a cache entry, a checkpoint or a preview.
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
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
ADAPTER = "adapter.safetensors"


def child(folder: str, last: int, arguments: list[str]) -> None:
    """Train, and print the number of events at the end. Event number `last` kills this process."""
    lock, count = threading.Lock(), [0]

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event not in EVENTS or not given or not str(given[0]).startswith(folder):
            return
        with lock:
            count[0] += 1
            if count[0] == last:
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


def train(folder: Path, last: int, *more: str) -> subprocess.CompletedProcess[str]:
    """Train in `folder` until event `last`, which kills the run; if `last` is 0, until the end."""
    flags = [text for name, value in FLAGS.items() for text in (f"--{name}", str(value))]
    given = ["--dataset", str(folder / "images"), "--output", str(folder / "run"), *flags, *more]
    command = [sys.executable, __file__, "--child", str(folder), str(last), *given]
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
    """The values of the adapter that a run ended with."""
    tensors = tc.load_file(next((folder / "run").rglob(ADAPTER), folder / "run" / ADAPTER))
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def resume(folder: Path) -> list[str]:
    """The flags that continue the run in `folder`; none if it has no checkpoint to continue from.

    A checkpoint that a killed process was replacing counts, because the next process restores it.
    """
    there = checkpoints(folder / "run") or needs_restoring(folder / "run")
    return ["--resume", "latest"] if there else []


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], int(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="kill-") as name:
        base = Path(name)
        write_images(base / "whole" / "images")
        result = train(base / "whole", 0)
        if result.returncode:
            sys.exit(f"the run without kills failed: {result.stderr}")
        events, expected = int(result.stdout.split()[-1]), adapter(base / "whole")
        print(f"{events} events in a run of {FLAGS['steps']} steps", flush=True)
        kills, runs = 0, 0
        while kills < options.kills:
            folder = base / f"run-{runs}"
            write_images(folder / "images")
            runs += 1
            while True:
                # Each iteration starts one process. If no process was killed so far, or if the
                # output folder is empty, the process is killed at a random event. Otherwise, half
                # of the processes are killed at a random event.
                last = rng.randint(1, events) if not kills or rng.random() < 0.5 else 0
                if not any(folder.glob("run/*")):
                    last = last or rng.randint(1, events)
                more = resume(folder)
                result = train(folder, last, *more)
                if result.returncode == -signal.SIGKILL:
                    kills += 1
                    continue
                break
            where = f"run {runs}, after {kills} kills, {more}"
            if result.returncode:
                sys.exit(f"{where}: {result.stderr}")
            if adapter(folder) != expected:
                sys.exit(f"{where}: the adapter is not that of the run without kills")
            shutil.rmtree(folder)
        print(f"{kills} kills in {runs} runs, each ended with the same adapter, bit for bit")


if __name__ == "__main__":
    main()
