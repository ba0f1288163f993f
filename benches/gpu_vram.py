"""Predicted and measured memory and time of runs that must fit into cards of several sizes.

python benches/gpu_vram.py [--models flux,llama] [--vram 8,12,24] [--folder DIR] [--ballast]

Each model has its full size and random weights (`gpu_job.py` and `gpu_text_job.py` say how much
disk space they take), and is trained through the command line with each `--vram`: LoRA of rank 16
on the default layers, batch 1, images of 1024 x 1024 px or rows of 2,048 tokens. The first run of
an image model encodes the two images of the data set and their captions; later runs read the
results from the cache. Each run's line has the predicted peak of memory ("announced"), the peak of
tensors, the peak of the device, the predicted and the measured milliseconds of a step, and what the
plan chose. The peak of the device is that of nvidia-smi: it includes CUDA's own memory, which
`--vram` counts too. The measured time is the median of the second half of the steps.

With `--ballast`, this script fills the GPU so that only the given GiB stay free, and `train` gets
no `--vram`: it must find out what is free.
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import statistics
import tempfile
from pathlib import Path

import full_flow
import full_size
import full_text
from gpu_job import JOBS, RANK, Outcome, command
from gpu_timing import GIB

import trainable_candle as tc

MODELS: tuple[str, ...] = ("sdxl", *full_flow.PIPELINES, *full_text.MODELS)
IMAGES = 2
"""Images in the data set."""
GIB_PATTERN = r"([\d.]+) GiB"
ROW = "{:<10} {:>5} {:>9} {:>9} {:>9} {:>9} {:>9}  {}"


def prepare(model: str, folder: Path) -> list[str]:
    """Write a model and its data set; return the flags of `train` that are about them."""
    weights, data = folder / "weights", folder / "data"
    if model in full_text.MODELS:
        full_text.write_model(weights, model, "cuda")
        full_text.write_texts(data.with_suffix(".jsonl"))
        flags = ["--model", "causal-lm", "--dataset", str(data.with_suffix(".jsonl"))]
        return [*flags, "--sequence-length", "2048", "--weights", str(weights)]
    if model == "sdxl":
        full_size.write_pipeline(weights, "cuda")
    else:
        full_flow.write_pipeline(weights, model, "cuda")
    full_size.write_images(data, IMAGES, sizes=((1024, 1024),))
    return ["--model", JOBS[model].family, "--dataset", str(data), "--weights", str(weights)]


def row(model: str, vram: str, outcome: Outcome, output: Path) -> str:
    """Return the table row of a run; if it failed, with the end of its errors.

    The columns are those of `titles` in `main`, after the model and the value of `--vram`.
    """
    if outcome.code:
        return ROW.format(model, vram, "", "", "", "", "", outcome.errors.strip()[-300:])
    text = "\n".join(line for _, line in outcome.lines)
    plan = rf"^plan: (.*?) \(about {GIB_PATTERN}(?:, ([\d.]+) s a step)?\) fits"
    # Group 1 is what the plan chose, group 3 the predicted seconds of a step.
    chosen = re.search(plan, text, re.MULTILINE)
    # The log predicts a peak for each stage of the run; "announced" is the highest of them.
    announced = re.findall(rf"^GPU memory while .*: {GIB_PATTERN}", text, re.MULTILINE)
    tensor_peak = re.search(rf"at most {GIB_PATTERN} of GPU memory", text)
    with (output / "train.csv").open() as file:
        seconds = [float(step["seconds"]) for step in csv.DictReader(file)]
    median = statistics.median(seconds[len(seconds) // 2 :])
    predicted = "" if chosen is None or chosen[3] is None else f"{float(chosen[3]) * 1e3:.0f}"
    return ROW.format(
        model, vram, f"{max(map(float, announced)):.2f}",
        "" if tensor_peak is None else tensor_peak[1],
        f"{outcome.gpu:.2f}", predicted, f"{median * 1e3:.0f}",
        "nothing" if chosen is None else chosen[1],
    )  # fmt: skip


def ballast(free: float) -> tc.Tensor:
    """Take memory of the GPU until `free` GiB are left; the memory is held by the result."""
    taken = tc.cuda.memory_stats("cuda")["free"] - int(free * GIB)
    return tc.zeros((taken // 4,), dtype="f32", device="cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--models", default="sdxl,flux,llama", help=f"comma-separated, of {', '.join(MODELS)}"
    )
    parser.add_argument(
        "--vram", default="8,12,24", help="values of train's --vram (GiB), comma-separated"
    )
    parser.add_argument(
        "--folder", type=Path, help="an existing folder (default: that of temporary files)"
    )
    parser.add_argument("--steps", type=int, default=16, help="training steps of a run")
    parser.add_argument(
        "--ballast", action="store_true", help="fill the rest of the GPU instead of giving --vram"
    )
    given = parser.parse_args()
    reason = tc.cuda.unavailable_reason()
    if reason is not None:
        raise SystemExit(f"no CUDA: {reason}")
    titles = ("announced", "tensors", "device", "ms, predicted", "measured", "chosen")
    print(ROW.format("model", "vram", *titles), flush=True)
    for model in given.models.split(","):
        work = Path(tempfile.mkdtemp(prefix="gpu_vram_", dir=given.folder))
        try:
            flags = prepare(model, work)
            tc.cuda.empty_cache()
            for vram in given.vram.split(","):
                held = ballast(float(vram)) if given.ballast else None
                limit = [] if given.ballast else ["--vram", vram]
                outcome = command(
                    "train", *flags, "--output", str(work / vram), "--device", "cuda",
                    "--precision", "bf16", "--rank", str(RANK), "--steps", str(given.steps),
                    *limit,
                )  # fmt: skip
                print(row(model, vram, outcome, work / vram), flush=True)
                del held
                tc.cuda.empty_cache()
        finally:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
