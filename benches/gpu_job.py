"""Commands for a whole job on a full-size model; for SDXL, diffusers runs the same phases.

python benches/gpu_job.py [--model sdxl] [--folder DIR] [--only cold,warm,...] [--no-torch]

Makes 24 images and a checkpoint of random weights: SDXL 6.9 GB, SD3.5-medium 15, FLUX.2-klein 16,
Z-Image 21, Chroma 28, Flux.1 34. `merge` needs as much again; use a folder in /dev/shm if the disk
is too small. Then it runs the commands that a user would type: train (200 steps of SDXL, 30 of
others) on cold and on warm caches, resume, train with previews, validation and an average, sample,
merge, verify. A phase is the time between two lines that a command prints. The peaks of GPU memory
(nvidia-smi) and of resident host memory are those of the command's process. For SDXL, diffusers
loads, encodes, draws and saves the same, if it is installed.
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
from typing import TYPE_CHECKING, Any

import full_flow
import full_size
import timing

import trainable_candle as tc

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT = "a photo of a sks thing on a table"
# Rank of the adapters, which are on every linear layer of the transformers, as in `train-lora`.
RANK = 16


@dataclass(frozen=True)
class Job:
    """What differs between models."""

    model: str
    """The value of `--model`."""
    steps: int
    """Of training."""
    draw_steps: int
    guidance: float


JOBS = {
    "sdxl": Job("sdxl", 200, 30, 6.0),
    "sd3": Job("sd3", 30, 28, 4.5),
    "sd3-large": Job("sd3", 30, 28, 4.5),
    "flux": Job("flux", 30, 28, 3.5),
    "chroma": Job("chroma", 30, 35, 5.0),
    "zimage": Job("zimage", 30, 30, 5.0),
    "flux2": Job("flux2", 30, 30, 4.0),
}


@dataclass
class Outcome:
    """Time and memory that a command took, and what it printed."""

    seconds: float
    lines: list[tuple[float, str]]
    """Each printed line, with the seconds from the start."""
    gpu: float
    """Peak on the device, GiB."""
    host: float
    """Peak resident, GiB."""
    code: int = 0
    errors: str = ""


def gpu_used() -> float:
    """GiB in use on the first GPU, by all processes."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    used = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    return int(used.split()[0]) / 1024


@dataclass
class Watch:
    """Samples the memory of a process every fifth of a second."""

    process: int
    before: float
    """GiB in use on the GPU before the process started, by this program and others."""
    gpu: float = 0.0
    host: float = 0.0
    done: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        while not self.done.wait(0.2):
            status = Path(f"/proc/{self.process}/status")
            try:
                self.gpu = max(self.gpu, gpu_used() - self.before)
                for line in status.read_text().splitlines():
                    if line.startswith("VmRSS"):
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
    before = 0.0
    for moment, line in outcome.lines:
        print(f"  {moment:7.2f} s (+{moment - before:6.2f})  {line[:110]}")
        before = moment
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
        "train", "--model", job.model, "--weights", str(work / job.model),
        "--dataset", str(work / "pictures"), "--output", str(output),
        "--device", "cuda", "--precision", "bf16", "--rank", str(RANK), "--steps", str(steps),
        *more,
    )  # fmt: skip
    show(f"train, {name}", outcome, output)


def draw(job: Job, work: Path) -> None:
    """Draw one image, then two: the difference is the time of an image without start-up."""
    for count in (1, 2):
        outcome = command(
            "sample", "--model", job.model, "--weights", str(work / job.model),
            "--adapter", str(work / "cold" / "adapter.safetensors"),
            "--device", "cuda", "--precision", "bf16", "--prompt", PROMPT, "--count", str(count),
            "--steps", str(job.draw_steps), "--guidance", str(job.guidance),
            "--output", str(work / f"drawn{count}.png"),
        )  # fmt: skip
        show(f"sample, {count} of 1024 px", outcome)


def merge(job: Job, work: Path) -> None:
    """Merge the adapter into the checkpoint."""
    outcome = command(
        "merge", "--model", job.model, "--weights", str(work / job.model),
        "--adapter", str(work / "cold" / "adapter.safetensors"), "--output", str(work / "merged"),
    )  # fmt: skip
    show("merge into a folder, on the CPU", outcome)
    shutil.rmtree(work / "merged", ignore_errors=True)


def verify(job: Job, work: Path) -> None:
    """Verify the adapter."""
    adapter = str(work / "cold" / "adapter.safetensors")
    show("verify", command("verify", "--model", job.model, adapter))


def peer(work: Path) -> None:
    """Time the same phases in diffusers; runs in a process of its own."""
    started = time.perf_counter()
    import diffusers  # noqa: PLC0415 - optional
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415
    from peft import LoraConfig, get_peft_model_state_dict  # noqa: PLC0415
    from PIL import Image  # noqa: PLC0415

    def phase(title: str, run: Callable[[], Any]) -> Any:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        result = run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(
            f"  diffusers, {title}: {time.perf_counter() - begun:.2f} s, {peak:.2f} GiB", flush=True
        )
        return result

    print(f"\n== diffusers: imports {time.perf_counter() - started:.1f} s", flush=True)
    kind = diffusers.StableDiffusionXLPipeline
    load = lambda: kind.from_pretrained(work / "sdxl", torch_dtype=torch.bfloat16).to("cuda")  # noqa: E731
    pipeline = phase("load", load)
    pipeline.set_progress_bar_config(disable=True)
    pictures = sorted((work / "pictures").glob("*.png"))

    def encode() -> None:
        for path in pictures:
            image = np.asarray(Image.open(path).convert("RGB").resize((1024, 1024)))
            values = torch.tensor(image).permute(2, 0, 1)[None].float().cuda() / 127.5 - 1
            pipeline.vae.encode(values).latent_dist.mean.cpu()

    with torch.no_grad():
        captions = [path.with_suffix(".txt").read_text() for path in pictures]
        phase("24 captions", lambda: [pipeline.encode_prompt(text) for text in captions])
        pipeline.vae.float()
        phase("latents of 24 images of 1024 px, f32", encode)
        pipeline.vae.to(torch.bfloat16)
        for number in ("first", "second"):
            call = lambda: pipeline(  # noqa: E731
                PROMPT, num_inference_steps=30, guidance_scale=6.0, height=1024, width=1024
            )
            phase(f"draw 1024 px in 30 steps, {number}", call)
    adapter = work / "cold" / "adapter.safetensors"
    if adapter.exists():

        def merged() -> None:
            pipeline.load_lora_weights(str(adapter))
            pipeline.fuse_lora()
            pipeline.unload_lora_weights()
            pipeline.save_pretrained(work / "peer-merged")

        phase("merge the adapter and save the pipeline", merged)
    layers = ["to_q", "to_k", "to_v", "to_out.0", "proj", "proj_in", "proj_out", "ff.net.2"]
    pipeline.unet.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, target_modules=layers))
    state = get_peft_model_state_dict(pipeline.unet)
    save = lambda: kind.save_lora_weights(work / "peer", unet_lora_layers=state)  # noqa: E731
    phase("save the adapter", save)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=sorted(JOBS), default="sdxl")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--only", default="", help="parts, comma-separated")
    parser.add_argument("--no-torch", action="store_true", help="leave diffusers out")
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer:
        peer(given.folder)
        return
    reason = tc.cuda.unavailable_reason()
    if reason is not None:
        raise SystemExit(f"no CUDA: {reason}")
    job = JOBS[given.model]
    work = given.folder or Path(tempfile.mkdtemp(prefix="gpu_job_"))
    every = str(max(10, job.steps // 10))
    parts: dict[str, Callable[[], None]] = {
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
    wanted = [name for name in given.only.split(",") if name] or list(parts)
    try:
        if not (work / job.model).exists():
            started = time.perf_counter()
            if job.model == "sdxl":
                full_size.write_pipeline(work / "sdxl", "cuda")
            else:
                full_flow.write_pipeline(work / job.model, given.model, "cuda")
            full_size.write_pictures(work / "pictures")
            print(f"made the checkpoint and images: {time.perf_counter() - started:.1f} s")
        for name in wanted:
            parts[name]()
        if job.model == "sdxl" and not given.no_torch and timing.find_torch() is not None:
            peers = [sys.executable, __file__, "--peer", "--folder", str(work)]
            subprocess.run(peers, check=False)
    finally:
        if given.folder is None:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
