"""Saving a checkpoint and an adapter, compared with a plain write of the same bytes.

python benches/gpu_save.py [--device cpu] [--folder /tmp] [--rounds 5]

The adapter has rank 16 on all transformer layers of SDXL's UNet: 1,444 tensors, 42.6 M parameters,
trained with AdamW8bit. On the CPU the adapter is for the small UNet that the package ships. A plain
write puts the same bytes from memory into files of the same sizes and syncs them; saving and plain
writing take turns. Training waits while values are copied to the host. The script also measures
this pause in a training run: the step after a checkpoint takes longer than the others.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.families.sdxl import SDXL
from trainable_candle.train import Callback, Trainer, state

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainable_candle.train import StepReport

RANK, TOKENS, MIB = 16, 77, 2**20
STEPS, SAVE_EVERY = 40, 10


def write_plain(contents: dict[str, bytes], folder: Path) -> None:
    """Write files and sync them and their folder."""
    folder.mkdir(exist_ok=True)
    for name, content in contents.items():
        with (folder / name).open("wb", buffering=0) as file:
            view = memoryview(content)
            while view:
                view = view[file.write(view) :]
            os.fsync(file.fileno())
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare(
    title: str, copy: Callable[[], Any], write: Callable[[Any], Path], rounds: int, folder: Path
) -> None:
    """Time a copy to the host, writing that copy, and a plain write of the same files, in turns."""
    copies, writes, plains = [], [], []
    size = 0
    for number in range(rounds + 1):
        results: list[Any] = []  # the copy, then the path to which it was written
        copied = timed(lambda results=results: results.append(copy()))
        written = timed(lambda results=results: results.append(write(results[0])))
        path = results[1]
        files = sorted(path.iterdir()) if path.is_dir() else [path]
        contents = {file.name: file.read_bytes() for file in files}
        size = sum(map(len, contents.values()))  # the same in every round
        # Removing files takes time too, so it is outside both measurements.
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        plain = timed(lambda contents=contents: write_plain(contents, folder / "plain"))
        shutil.rmtree(folder / "plain")
        # The first round allocates pinned memory and loads kernels, so the medians leave it out.
        if number == 0:
            print(f"{title}: first copy {1e3 * copied:.0f} ms")
            continue
        copies.append(copied)
        writes.append(written)
        plains.append(plain)
    # The median seconds of all rounds but the first.
    copied, written, plain = map(statistics.median, (copies, writes, plains))
    print(
        f"{title}: {size / MIB:.0f} MiB; copy to the host {1e3 * copied:.0f} ms, "
        f"write {1e3 * written:.0f} ms, plain write {1e3 * plain:.0f} ms; "
        f"copy and write minus plain write {1e3 * (copied + written - plain):+.0f} ms",
        flush=True,
    )


class Clock(Callback):
    """Records when each step ended."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, trainer: Trainer[Any], report: StepReport) -> None:  # noqa: ARG002
        self.times.append(time.perf_counter())


class Indices:
    """A source without data: a batch is its index. The loss gets the same inputs in every step."""

    def batch(self, index: int) -> int:
        return index


def make_trainer(device: str, folder: Path) -> tuple[Trainer[int], Any, Clock]:
    """A training run, its adapter, and its clock. On a GPU the base has random weights."""
    on_gpu = device != "cpu"
    if on_gpu:
        model = tc.models.SDXLUNet.from_config(dtype="bf16", device=device)
    else:
        path = families.weights_of("sdxl", None)  # the weights that the package ships
        model = tc.models.SDXLUNet.from_pretrained(path, subfolder="unet", device=device)
    config = tc.LoraConfig(r=RANK, lora_alpha=RANK, target_modules=list(SDXL.targets))
    adapter = model.add_adapter(config)
    parameters = adapter.named_parameters()
    count = sum(var.numel() for var in parameters.values())
    print(f"{device}: {count / 1e6:.1f} M parameters in {len(parameters)} tensors", flush=True)
    optimizer = tc.optim.AdamW8bit(list(parameters.values()), lr=1e-4)
    dtype, side = ("bf16", 128) if on_gpu else ("f32", 8)
    # Widths of the embeddings of tokens and of the pooled embedding.
    width, pooled = (2048, 1280) if on_gpu else (128, 64)
    values = {
        "sample": tc.randn((1, 4, side, side), device=device).to(dtype),
        "text": tc.randn((1, TOKENS, width), device=device).to(dtype),
        "pooled": tc.randn((1, pooled), device=device).to(dtype),
        "target": tc.randn((1, 4, side, side), device=device),
        "times": tc.full((1,), 500.0, device=device),
        "sizes": tc.full((1, 6), 1024.0, device=device),
    }

    def loss(given: dict[str, tc.Tensor]) -> tc.Tensor:
        conditions = {"text_embeds": given["pooled"], "time_ids": given["sizes"]}
        found = model(given["sample"], given["times"], given["text"], **conditions)
        return tc.nn.functional.mse_loss(found.to("f32"), given["target"])

    clock = Clock()
    trainer: Trainer[int] = Trainer(
        loss,
        parameters,
        optimizer,
        Indices(),
        inputs=lambda _: values,
        cuda_graphs=2,  # the most batch shapes that get graphs; here there is one shape
        steps=STEPS,
        output=folder / "run",
        save_every=SAVE_EVERY,
        keep_checkpoints=1,
        callbacks=[clock],
    )
    return trainer, adapter, clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N or cpu")
    parser.add_argument("--folder", help="an existing folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        run, adapter, clock = make_trainer(options.device, folder)
        run.train()
        gaps = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)]
        # gaps[n - 1] is the time from the end of step n to the end of the next. The first
        # SAVE_EVERY steps are left out, because some of them record graphs.
        saving = gaps[SAVE_EVERY - 1 :: SAVE_EVERY]
        others = [gap for n, gap in enumerate(gaps, 1) if n > SAVE_EVERY and n % SAVE_EVERY]
        step = statistics.median(others)
        print(
            f"training: a step {1e3 * step:.1f} ms; a step after a checkpoint "
            f"{1e3 * statistics.median(saving):.1f} ms, at most {1e3 * max(saving):.1f} ms",
            flush=True,
        )

        facts = state.RunState(step=STEPS, batches=STEPS, scaler=None, settings={})
        # The run has saved a checkpoint after step STEPS; this path is not in use.
        checkpoint = state.checkpoint_path(folder / "run", STEPS + 1)

        def write_checkpoint(snapshot: state.Snapshot) -> Path:
            draft = state.Draft(checkpoint)
            draft.write(snapshot)
            draft.finish()
            return checkpoint

        def write_adapter(file: Any) -> Path:
            file.write()
            return folder / "adapter.safetensors"

        compare(
            "checkpoint",
            lambda: state.Snapshot.of(run.parameters, run.optimizer, facts),
            write_checkpoint,
            options.rounds,
            folder,
        )
        compare(
            "adapter",
            lambda: tc.prepare_adapters(folder / "adapter.safetensors", [adapter]),
            write_adapter,
            options.rounds,
            folder,
        )


if __name__ == "__main__":
    main()
