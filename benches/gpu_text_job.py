"""Time the commands of a whole job on a full-size language model, and transformers and peft.

python benches/gpu_text_job.py [--model qwen2] [--folder DIR] [--only cold,chat,...] [--no-torch]

The benchmark first writes a model of random weights (3.1 GB for Qwen2-1.5B, 16 GB for Llama-3-8B)
and 5,000 conversations, unless the folder already has them. Then it runs the commands that a user
would type. These are, with their names for `--only`: preview the data (`preview`); train 100 steps
of 4 rows of 2,048 tokens (`cold`); resume this run for 20 steps (`resume`); train with validation,
previews and saves (`everything`), with LoRA+ (`plus`), from PiSSA (`pissa`), and until the
validation loss rises (`stop`); chat (`chat`); export for peft (`peft`), for llama.cpp (`gguf`) and
as a merged model (`merged`); verify the adapter (`verify`). `resume` and all commands from `chat`
on need the run of `cold`. A phase is the time between two lines that a command prints. If torch is
installed, `text_job_peer.py` then runs most of these phases in transformers and peft.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import full_text
import timing
from gpu_job import RANK, command, show

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS, ROWS, LENGTH = 100, 4, 2048
"""Training steps, packed rows in a batch, and tokens in a row."""
ANSWER_TOKENS = 128
"""The most tokens of an answer."""
PROMPT: Final = "What is a LoRA?"
EARLY_STOP: Final = (
    "--learning-rate", "0.03", "--validation-split", "0.02", "--validate-every", "5",
    "--early-stop", "2",
)  # fmt: skip
"""A learning rate so high that the validation loss soon rises, which ends the run."""


def train(work: Path, name: str, steps: int, *more: str) -> None:
    """Train to the folder `name`, with the settings of all trainings and with `more` flags."""
    outcome = command(
        "train", "--model", "causal-lm", "--weights", str(work / "weights"),
        "--dataset", str(work / "chats.jsonl"), "--output", str(work / name),
        "--device", "cuda", "--precision", "bf16", "--rank", str(RANK), "--steps", str(steps),
        "--batch-size", str(ROWS), "--sequence-length", str(LENGTH), *more,
    )  # fmt: skip
    show(f"train, {name}", outcome, work / name)


def chat(work: Path) -> None:
    """Answer one prompt, then two: the difference is the time of an answer without start-up.

    Training on random words teaches the adapter to end every answer at once. A small scale of the
    adapter keeps the answers long.
    """
    for count in (1, 2):
        outcome = command(
            "sample", "--model", "causal-lm", "--weights", str(work / "weights"),
            "--adapter", str(work / "cold" / "peft"), "--device", "cuda", "--precision", "bf16",
            "--scale", "1e-3", "--tokens", str(ANSWER_TOKENS), *["--prompt", PROMPT] * count,
        )  # fmt: skip
        show(f"sample, {count} of at most {ANSWER_TOKENS} tokens", outcome)


def export(work: Path, reader: str) -> None:
    """Export the adapter in the form `reader`: "peft", "gguf" or "merged"."""
    output = work / f"for-{reader}"
    outcome = command(
        "export", "--weights", str(work / "weights"), "--adapter", str(work / "cold" / "peft"),
        "--for", reader, "--output", str(output),
    )  # fmt: skip
    show(f"export --for {reader}", outcome)
    shutil.rmtree(output, ignore_errors=True)


def preview(work: Path) -> None:
    """Preview three examples of the data, and print only the last line of the preview."""
    data = ["--weights", str(work / "weights"), "--dataset", str(work / "chats.jsonl")]
    outcome = command("preview-data", *data, "--examples", "3")
    outcome.lines = outcome.lines[-1:]
    show("preview-data", outcome)


def verify(work: Path) -> None:
    """Verify the adapter."""
    weights = ["--weights", str(work / "weights")]
    show("verify", command("verify", "--model", "causal-lm", *weights, str(work / "cold" / "peft")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=sorted(full_text.MODELS), default="qwen2")
    parser.add_argument("--folder", type=Path, help="for all files (default: a temporary folder)")
    parser.add_argument(
        "--only", default="", help="names of commands, comma-separated (default: all)"
    )
    parser.add_argument("--no-torch", action="store_true", help="leave transformers and peft out")
    given = parser.parse_args()
    reason = tc.cuda.unavailable_reason()
    if reason is not None:
        raise SystemExit(f"no CUDA: {reason}")
    work = given.folder or Path(tempfile.mkdtemp(prefix="gpu_text_job_"))
    runs: dict[str, Callable[[], None]] = {
        "preview": lambda: preview(work),
        "cold": lambda: train(work, "cold", STEPS),
        "resume": lambda: train(work, "cold", STEPS + 20, "--resume", "latest"),
        "everything": lambda: train(
            work, "everything", 60, "--save-every", "20", "--sample-every", "20",
            "--sample-prompts", PROMPT, "--sample-tokens", str(ANSWER_TOKENS),
            "--validation-split", "0.02", "--validate-every", "20",
        ),
        "plus": lambda: train(work, "plus", STEPS, "--lora-plus-ratio", "16"),
        "pissa": lambda: train(work, "pissa", STEPS, "--init", "pissa"),
        "stop": lambda: train(work, "stop", STEPS, *EARLY_STOP),
        "chat": lambda: chat(work),
        "peft": lambda: export(work, "peft"),
        "gguf": lambda: export(work, "gguf"),
        "merged": lambda: export(work, "merged"),
        "verify": lambda: verify(work),
    }  # fmt: skip
    wanted = [name for name in given.only.split(",") if name] or list(runs)
    try:
        if not (work / "weights").exists():
            started = time.perf_counter()
            full_text.write_model(work / "weights", given.model, "cuda")
            full_text.write_chats(work / "chats.jsonl")
            print(f"made the model and the conversations: {time.perf_counter() - started:.1f} s")
        for name in wanted:
            runs[name]()
        if not given.no_torch and timing.find_torch() is not None:
            peer = str(Path(__file__).with_name("text_job_peer.py"))
            subprocess.run([sys.executable, peer, str(work)], check=False)
    finally:
        if given.folder is None:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
