"""A model on several GPUs: time of summing gradients, and time of a step against one GPU.

python benches/gpu_distributed.py [--model flux] [--gpus 2] [--steps 100] [--machines]

Every process trains a full-size model of random weights with `Trainer` as `train-lora` does: batch
1 at 1024 x 1024 px, bf16, CUDA graphs, AdamW8bit, LoRA of rank 16. `sdxl` is the UNet with adapters
on every transformer layer, `flux` is Flux.1-dev with adapters on its attention and full
checkpointing. One GPU then trains twice: with one batch a step, to compare times, and with as many
batches a step as there are GPUs, to compare losses. Before training, the script times sums of f32
vectors over all GPUs, from the start of the sums until the GPU has done all queued work.

With `--stream 57`, the script trains only Flux, and only on all GPUs: it compares nothing with one
GPU. It keeps 57 blocks, all that Flux.1 has, in host memory: one copy for all processes or, with
`--apart`, one copy for each process. It prints the time of a step, the peak memory of a GPU, the
host memory of each process (Pss, which divides shared memory among the processes that share it),
and by how much loading reduced the free memory of the machine. With `--peers`, it measures this
twice: with the blocks in host memory, and with a slice of the blocks on each GPU.

With NCCL_P2P_DISABLE=1 the GPUs do not access each other's memory, as on cards that do not support
this access. `--machines` makes NCCL treat every GPU as if it were on a machine of its own, so that
sums go through sockets.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gpu_transformers import LORA_LAYERS, cases, inputs_of, model_of

import trainable_candle as tc
from trainable_candle.distributed.group import Group, make_group
from trainable_candle.distributed.launch import rank_environment
from trainable_candle.distributed.streamed import shared_streams
from trainable_candle.distributed.world import from_environment
from trainable_candle.families.sdxl import SDXL
from trainable_candle.train import Callback, StepReport, Trainer

if TYPE_CHECKING:
    from collections.abc import Callable

# The rank of the LoRA, the side of the latents of 1024 px, and the number of SDXL's text tokens.
RANK, LATENT, TOKENS = 16, 128, 77
# The number of f32 values in a sum of each size. 170 MB are the gradients of SDXL's adapter.
SIZES = {"1 kB": 256, "47 MB": 11_750_000, "93 MB": 23_250_000, "170 MB": 42_600_000}


class Numbers:
    """A source without data: a batch is its index."""

    def batch(self, index: int) -> int:
        return index


class Times(Callback):
    """The time at the end of each step, and the loss of each step."""

    def __init__(self) -> None:
        self.ends: list[float] = []
        self.losses: list[float] = []

    def on_step_end(self, _trainer: Trainer[Any], report: StepReport) -> None:
        self.ends.append(time.perf_counter())
        self.losses.append(report.loss)


class Network(NamedTuple):
    """The adapter of a model of random weights, the inputs of a batch, and the loss of inputs."""

    adapter: tc.AdapterSet
    inputs: Callable[[int], dict[str, tc.Tensor]]
    loss: Callable[[dict[str, tc.Tensor]], tc.Tensor]


def sdxl(device: str) -> Network:
    model = tc.models.SDXLUNet.from_config(dtype="bf16", device=device)
    config = tc.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(SDXL.targets))
    times = tc.full((1,), 500.0, device=device)
    sizes = tc.full((1, 6), 1024.0, device=device)

    def inputs(_number: int) -> dict[str, tc.Tensor]:
        shapes = {
            "sample": (1, 4, LATENT, LATENT),
            "target": (1, 4, LATENT, LATENT),
            "text": (1, TOKENS, 2048),
            "pooled": (1, 1280),
        }
        return {name: tc.randn(shape).to(device) for name, shape in shapes.items()}

    def loss(given: dict[str, tc.Tensor]) -> tc.Tensor:
        sample, text, pooled = (given[name].to("bf16") for name in ("sample", "text", "pooled"))
        found = model(sample, times, text, text_embeds=pooled, time_ids=sizes)
        return tc.nn.functional.mse_loss(found.to("f32"), given["target"])

    return Network(model.add_adapter(config), inputs, loss)


def flux(device: str, stream: int = 0) -> Network:
    # Titles begin with the model and the kind of checkpointing.
    case = next(case for case in cases() if case.title.startswith("flux-dev, full"))
    model = model_of(case, device, stream_blocks=stream, stream_modulation=stream > 0)
    model.enable_gradient_checkpointing("full")
    config = tc.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LORA_LAYERS)
    image, text, *others = inputs_of(case, device)

    def inputs(_number: int) -> dict[str, tc.Tensor]:
        shapes = {"sample": image.shape, "target": image.shape, "text": text.shape}
        return {name: tc.randn(shape).to(device) for name, shape in shapes.items()}

    def loss(given: dict[str, tc.Tensor]) -> tc.Tensor:
        sample, words = (given[name].to("bf16") for name in ("sample", "text"))
        return tc.nn.functional.mse_loss(model(sample, words, *others).to("f32"), given["target"])

    return Network(model.add_adapter(config), inputs, loss)


NETWORKS = {"sdxl": sdxl, "flux": flux}


def host_bytes() -> int:
    """Host memory of this process: its own, and its share of memory that processes share (Pss)."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def train(
    network: str,
    group: Group,
    device: str,
    steps: int,
    accumulation: int,
    *,
    stream: int = 0,
    apart: bool = False,
    peers: bool = False,
) -> dict[str, Any]:
    tc.manual_seed(0)
    make = functools.partial(flux, stream=stream) if stream else NETWORKS[network]
    free = tc.memory.available_bytes() or 0
    group.barrier()
    started = time.perf_counter()
    with nullcontext() if apart else shared_streams(group, peers=peers):
        adapter, inputs, loss = make(device)
    group.barrier()
    loaded = time.perf_counter() - started
    taken = free - (tc.memory.available_bytes() or 0)
    parameters = adapter.named_parameters()
    optimizer = tc.optim.AdamW8bit(list(parameters.values()), lr=1e-4)
    times = Times()
    trainer = Trainer(
        loss,
        parameters,
        optimizer,
        Numbers(),
        inputs=inputs,
        cuda_graphs=16,  # the largest number of batch shapes with a graph; here there is one
        steps=steps,
        gradient_accumulation=accumulation,
        max_grad_norm=1.0,
        callbacks=[times],
        group=group,
        seed=0,
    )
    trainer.train()
    group.barrier()  # Other processes may still read this GPU's slices.
    # The first quarter of the steps warms up and records graphs.
    seconds = [b - a for a, b in zip(times.ends, times.ends[1:], strict=False)][steps // 4 :]
    square_sum = sum(float(var.detach().to("f64").square().sum()) for var in parameters.values())
    return {
        "ms": 1e3 * statistics.median(seconds),
        "losses": times.losses,
        "parameters": square_sum,  # to compare processes
        "peak": tc.cuda.memory_stats(device)["peak_allocated"],
        "loaded": loaded,
        "host": host_bytes(),
        "taken": taken,
    }


def sums(group: Group, device: str) -> dict[str, tuple[float, float]]:
    """By size, milliseconds of a single sum, and of each sum in a series that is queued at once."""
    found = {}
    in_a_row = 3 if "NCCL_HOSTID" in os.environ else 20  # few between machines; see `timed`
    for name, count in SIZES.items():
        vector = {"one": tc.Var(tc.zeros((count,), device=device))}
        # Numbers that `Trainer` sums together with the gradients, such as the loss.
        tail = tc.zeros((3,), dtype="f64", device=device)
        found[name] = (timed(group, vector, tail, 1), timed(group, vector, tail, in_a_row))
    return found


def timed(group: Group, vector: dict[str, tc.Var], tail: tc.Tensor, count: int) -> float:
    """Milliseconds of a sum, when `count` sums are queued at once."""
    seconds = []
    # Sums between machines (sockets) take a hundred times as long, so fewer of them are timed.
    for _ in range(3 if "NCCL_HOSTID" in os.environ else 20):
        group.barrier()
        started = time.perf_counter()
        for _ in range(count):
            group.sum_gradients(vector, tail)
        group.wait()
        seconds.append((time.perf_counter() - started) / count)
    return 1e3 * statistics.median(seconds)


def child(options: argparse.Namespace) -> None:
    started = time.perf_counter()
    world = from_environment()
    device = "cuda" if world is None else world.device(tc.cuda.device_count())
    group = make_group(world, device, facts={})  # no settings that must be equal in all processes
    result: dict[str, Any] = {"join": time.perf_counter() - started}
    if options.sums and world is not None:
        result["sums"] = sums(group, device)
    result |= train(
        options.model,
        group,
        device,
        options.steps,
        options.accumulation,
        stream=options.stream,
        apart=options.apart,
        peers=options.peers,
    )
    result["version"] = tc.__version__
    group.close()
    print(json.dumps(result), flush=True)


def start(
    gpus: int, options: argparse.Namespace, steps: int, accumulation: int, *, with_sums: bool
) -> list[dict[str, Any]]:
    """Run one process for each GPU; return the results of each."""

    def environment(rank: int, folder: Path) -> dict[str, str]:
        if gpus == 1:
            return dict(os.environ)
        host_id = {"NCCL_HOSTID": f"machine-{rank}"} if options.machines else {}
        return rank_environment(folder, rank, gpus) | host_id

    with tempfile.TemporaryDirectory(prefix="tc-") as folder:
        command = [sys.executable, __file__, "--child", "--model", options.model]
        command += ["--steps", str(steps)]
        command += ["--accumulation", str(accumulation), *(["--sums"] if with_sums else [])]
        command += ["--stream", str(options.stream), *(["--apart"] if options.apart else [])]
        command += ["--peers"] if options.peers else []
        processes = [
            subprocess.Popen(
                command,
                env=environment(rank, Path(folder)),
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(gpus)
        ]
        answers = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit(f"a process failed: {[process.returncode for process in processes]}")
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


def streamed(options: argparse.Namespace) -> None:
    """Train Flux on all GPUs, with blocks in host memory or in slices on the GPUs."""
    found = start(options.gpus, options, options.steps, accumulation=1, with_sums=False)
    where = "one copy for each process" if options.apart else "one copy for all"
    where = "in slices on the GPUs" if options.peers else where
    print(
        f"{options.stream} blocks, {where}: {found[0]['ms']:.1f} ms a step, loaded in "
        f"{found[0]['loaded']:.0f} s, peak {found[0]['peak'] / 2**30:.2f} GiB a GPU"
    )
    host = ", ".join(f"{result['host'] / 2**30:.2f}" for result in found)
    print(
        f"host memory of each process: {host} GiB; loading took "
        f"{found[0]['taken'] / 2**30:.2f} GiB of the machine"
    )
    print(f"losses: {found[0]['losses'][:3]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=NETWORKS, default="sdxl")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--machines", action="store_true")
    parser.add_argument("--stream", type=int, default=0)
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--peers", action="store_true")
    # Only `start` gives these two flags and `--accumulation`, to the processes that it starts.
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--sums", action="store_true")
    options = parser.parse_args()
    if options.apart and options.peers:
        parser.error("--peers shares the blocks, but --apart shares nothing")
    if options.child:
        child(options)
        return
    if options.stream:
        choices = (False, True) if options.peers else (False,)
        for peers in choices:
            streamed(argparse.Namespace(**{**vars(options), "peers": peers}))
        return
    several = start(options.gpus, options, options.steps, accumulation=1, with_sums=True)
    first = several[0]
    print(
        f"trainable-candle {first['version']}, {options.gpus} GPUs, joined in {first['join']:.1f} s"
    )
    for name, (alone, in_a_row) in first["sums"].items():
        print(f"sum of {name}: {alone:.3f} ms alone, {in_a_row:.3f} ms in a row")
    one = start(1, options, options.steps, accumulation=1, with_sums=False)[0]
    # How many times as many samples a second as one GPU.
    speedup = options.gpus * one["ms"] / first["ms"]
    print(
        f"step: {one['ms']:.2f} ms on one GPU, {first['ms']:.2f} on {options.gpus}: {speedup:.3f} x"
    )
    print(f"peak: {one['peak'] / 2**30:.2f} GiB, {first['peak'] / 2**30:.2f}")
    same = len({(tuple(each["losses"]), each["parameters"]) for each in several}) == 1
    print(f"losses and parameters equal on all GPUs: {same}")
    steps = min(30, options.steps)
    accumulated = start(1, options, steps, accumulation=options.gpus, with_sums=False)[0]["losses"]
    pairs = zip(accumulated, first["losses"], strict=False)
    difference = max(abs(a - b) / abs(a) for a, b in pairs)
    print(
        f"losses of {steps} steps: at most {difference:.1e} from those of one GPU with "
        f"{options.gpus} batches a step (relative)"
    )


if __name__ == "__main__":
    main()
