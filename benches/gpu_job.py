"""Time a whole job on a full-size model, and diffusers in the same phases (`job_peer.py`).

python benches/gpu_job.py [--model sdxl] [--folder DIR] [--only cold,warm,...] [--no-torch]

The benchmark first makes 24 images and a checkpoint of random weights. The checkpoint takes 6.9 GB
for SDXL, 15 for SD3.5-medium, 26 for SD3.5-large, 16 for FLUX.2-klein 4B, 35 for 9B, 21 for
Z-Image, 28 for Chroma, 34 for Flux.1 and 54 for Qwen-Image. `merge` needs the same space again; use
a folder in /dev/shm if the disk is too small. Then the benchmark runs the commands that a user
would type: train (200 steps of SDXL, 30 of the other models) on cold caches, then on warm ones;
resume; train with previews, validation and an average of the weights; sample; merge; verify. A
phase is the time between two lines that a command prints. The peaks of GPU memory (nvidia-smi) and
of resident host memory are those of the command's process. If torch is installed, `job_peer.py`
then times diffusers.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import full_flow
import full_size
import timing

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = "a photo of a sks thing on a table"
# The rank of the adapters, which are on the layers that `train-lora` adapts by default.
RANK = 16


@dataclass(frozen=True)
class Job:
    """The settings of a job that differ between models."""

    name: str
    """The value of this script's `--model`, and the name of the folder of the weights."""
    family: str
    """The value of `--model` of the commands."""
    steps: int
    """The number of training steps."""
    draw_steps: int
    """The number of steps in which an image is drawn."""
    guidance: float | None
    """The guidance scale with which an image is drawn; None: the commands' default."""


# The arguments are the fields of `Job`, in their order.
JOBS = {
    job.name: job
    for job in (
        Job("sdxl", "sdxl", 200, 30, 6.0),
        Job("sd3", "sd3", 30, 28, 4.5),
        Job("sd3-large", "sd3", 30, 28, 4.5),
        Job("flux", "flux", 30, 28, 3.5),
        Job("flux-schnell", "flux", 30, 4, None),
        Job("chroma", "chroma", 30, 35, 5.0),
        Job("zimage", "zimage", 30, 30, 5.0),
        Job("zimage-turbo", "zimage", 30, 9, 1.0),
        Job("flux2", "flux2", 30, 30, 4.0),
        Job("flux2-9b", "flux2", 30, 30, 4.0),
        Job("qwen-image", "qwen-image", 30, 30, 4.0),
    )
}


@dataclass
class Outcome:
    """Time and memory that a command took, and what it printed."""

    seconds: float
    lines: list[tuple[float, str]]
    """Each printed line, with the seconds from the start."""
    gpu: float
    """Peak of GPU memory, GiB."""
    host: float
    """Peak of resident host memory, GiB."""
    code: int = 0
    errors: str = ""


def gpu_used() -> float:
    """GiB in use on the first visible GPU, by all processes."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    query = ["nvidia-smi", f"--id={first}", "--query-gpu=memory.used"]
    query.append("--format=csv,noheader,nounits")
    used = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return int(used.split()[0]) / 1024  # nvidia-smi prints MiB


@dataclass
class Watch:
    """Samples the memory of a process every fifth of a second."""

    process: int
    """The id of the process."""
    before: float
    """GiB in use on the GPU before the process started, by this program and others."""
    gpu: float = 0.0
    """The process's peak of GPU memory so far, GiB."""
    host: float = 0.0
    """Its peak of resident host memory so far, GiB."""
    done: threading.Event = field(default_factory=threading.Event)
    """Set when the process has ended; then `run` returns."""

    def run(self) -> None:
        while not self.done.wait(0.2):
            status = Path(f"/proc/{self.process}/status")
            try:
                self.gpu = max(self.gpu, gpu_used() - self.before)
                for line in status.read_text().splitlines():
                    if line.startswith("VmRSS"):
                        # The line has the number of KiB.
                        self.host = max(self.host, int(line.split()[1]) / 2**20)
            except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
                continue


def command(*arguments: str) -> Outcome:
    """Run `trainable-candle` with these arguments."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    before = gpu_used()
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "trainable_candle", *arguments],
            stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
        )  # fmt: skip
        watch = Watch(process.pid, before)
        watcher = threading.Thread(target=watch.run)
        watcher.start()
        assert process.stdout is not None
        lines = [(time.perf_counter() - started, line.rstrip()) for line in process.stdout]
        code = process.wait()
        seconds = time.perf_counter() - started
        watch.done.set()
        watcher.join()
        errors.seek(0)
        return Outcome(seconds, lines, watch.gpu, watch.host, code, errors.read())


def show(title: str, outcome: Outcome, output: Path | None = None) -> None:
    """Print a command's phases."""
    memory = f"GPU {outcome.gpu:.2f} GiB, host {outcome.host:.2f} GiB"
    print(
        f"\n== {title}: {outcome.seconds:.1f} s, {memory}, exit status {outcome.code}", flush=True
    )
    if outcome.code:
        print(outcome.errors[-2000:])
    previous = 0.0
    for moment, line in outcome.lines:
        print(f"  {moment:7.2f} s (+{moment - previous:6.2f})  {line[:110]}")
        previous = moment
    log = None if output is None else output / "train.csv"
    if log is not None and log.exists():
        with log.open() as file:
            seconds = [float(row["seconds"]) for row in csv.DictReader(file)]
        steady = sorted(seconds[len(seconds) // 2 :])[len(seconds) // 4]
        print(f"  {len(seconds)} steps: {sum(seconds):.2f} s, the first {seconds[0]:.2f} s, "
              f"median of the second half {steady * 1e3:.1f} ms")  # fmt: skip
    sys.stdout.flush()


def train(job: Job, work: Path, name: str, steps: int, *more: str) -> None:
    """Train as a user would."""
    output = work / name
    outcome = command(
        "train", "--model", job.family, "--weights", str(work / job.name),
        "--dataset", str(work / "images"), "--output", str(output),
        "--device", "cuda", "--precision", "bf16", "--rank", str(RANK), "--steps", str(steps),
        *more,
    )  # fmt: skip
    show(f"train, {name}", outcome, output)


def draw(job: Job, work: Path) -> None:
    """Draw one image, then two: the difference is the time of an image without start-up."""
    guidance = [] if job.guidance is None else ["--guidance", str(job.guidance)]
    for count in (1, 2):
        outcome = command(
            "sample", "--model", job.family, "--weights", str(work / job.name),
            "--adapter", str(work / "cold" / "adapter.safetensors"),
            "--device", "cuda", "--precision", "bf16", "--prompt", PROMPT, "--count", str(count),
            "--steps", str(job.draw_steps), *guidance,
            "--output", str(work / f"drawn{count}.png"),
        )  # fmt: skip
        show(f"sample, {count} of 1024 px", outcome)


def merge(job: Job, work: Path) -> None:
    """Merge the adapter into the checkpoint."""
    outcome = command(
        "merge", "--model", job.family, "--weights", str(work / job.name),
        "--adapter", str(work / "cold" / "adapter.safetensors"), "--output", str(work / "merged"),
    )  # fmt: skip
    show("merge into a folder, on the CPU", outcome)
    shutil.rmtree(work / "merged", ignore_errors=True)


def verify(job: Job, work: Path) -> None:
    """Verify the adapter."""
    adapter = str(work / "cold" / "adapter.safetensors")
    show("verify", command("verify", "--model", job.family, adapter))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=sorted(JOBS), default="sdxl")
    parser.add_argument("--folder", type=Path, help="for all files (default: a temporary folder)")
    parser.add_argument("--only", default="", help="commands, comma-separated (default: all)")
    parser.add_argument("--no-torch", action="store_true", help="leave diffusers out")
    given = parser.parse_args()
    reason = tc.cuda.unavailable_reason()
    if reason is not None:
        raise SystemExit(f"no CUDA: {reason}")
    job = JOBS[given.model]
    work = given.folder or Path(tempfile.mkdtemp(prefix="gpu_job_"))
    # The number of steps between two saves, previews and validations in the command "everything".
    every = str(max(10, job.steps // 10))
    commands: dict[str, Callable[[], None]] = {
        "cold": lambda: train(job, work, "cold", job.steps),
        "warm": lambda: train(job, work, "warm", job.steps),
        "resume": lambda: train(job, work, "cold", job.steps + 20, "--resume", "latest"),
        "everything": lambda: train(
            job, work, "everything", 3 * int(every), "--save-every", every, "--sample-every", every,
            "--sample-prompts", PROMPT, "--validation-split", "0.2", "--validate-every", every,
            "--ema-decay", "0.99",
        ),
        "sample": lambda: draw(job, work),
        "merge": lambda: merge(job, work),
        "verify": lambda: verify(job, work),
    }  # fmt: skip
    wanted = [name for name in given.only.split(",") if name] or list(commands)
    try:
        if not (work / job.name).exists():
            started = time.perf_counter()
            if job.name == "sdxl":
                full_size.write_pipeline(work / "sdxl", "cuda")
            else:
                full_flow.write_pipeline(work / job.name, job.name, "cuda")
            full_size.write_images(work / "images")
            print(f"made the checkpoint and images: {time.perf_counter() - started:.1f} s")
        for name in wanted:
            commands[name]()
        if not given.no_torch and timing.find_torch() is not None:
            peer = str(Path(__file__).with_name("job_peer.py"))
            settings = ["--steps", str(job.draw_steps)]
            if job.guidance is not None:
                settings += ["--guidance", str(job.guidance)]
            subprocess.run([sys.executable, peer, str(work), job.name, *settings], check=False)
    finally:
        if given.folder is None:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
