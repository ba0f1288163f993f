"""The effect of quantization-aware training on a small image model's losses.

python benches/rounded_images.py [--steps 300] [--seeds 3] [--rate 3e-3]

The small SDXL that ships with the package learns the hearts of the package's demo, with a LoRA of
rank 16 on the linear layers of its blocks. Inference servers quantize these layers.
Losses are measured on hearts drawn with another seed, for three forms of the trained model: the
training base with the adapter unmerged, weights merged in f32, and these weights rounded to a
format.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rounded_training import GRIDS, report, rounded

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.demo import hearts
from trainable_candle.families.pipeline.family import PipelineFamily
from trainable_candle.run import train_adapter
from trainable_candle.tasks.latent import LatentTask
from trainable_candle.tasks.task import Split

if TYPE_CHECKING:
    from trainable_candle.settings import TrainConfig
    from trainable_candle.tasks.task import Task

NAME = "sdxl"
OUTSIDE = ("linear_1", "linear_2")
"""The linear layers outside the blocks: they embed the time, the sizes and the pooled text."""
HELD_OUT = 7_000
"""A run's held-out images are drawn with the seed of the run plus this number."""
UNET = Path("unet", "diffusion_pytorch_model.safetensors")


class HeldOut:
    """The loss of a UNet on held-out images, with the same noise for every UNet."""

    def __init__(self, config: TrainConfig, dataset: Path) -> None:
        self._config = config.with_(dataset=str(dataset))
        self._task = self._load()
        assert isinstance(self._task.family, PipelineFamily)
        self._family = self._task.family
        data = Split(self._family.dataset(str(dataset)), None)
        self._images = self._task.prepare(data, lambda _: None).train

    def apart(self, task: Task) -> float:
        """The loss of a trained model whose adapter is not merged into its base."""
        assert isinstance(task, LatentTask)
        assert isinstance(task.family, PipelineFamily)
        self._family.model = task.family.model
        return self._images.validation_loss()

    def _load(self) -> LatentTask:
        weights = families.weights_of(NAME, None)
        task = families.load(NAME, weights, "f32", "cpu", self._config)
        assert isinstance(task, LatentTask)
        return task

    def losses(self, adapter: Path) -> dict[str, float]:
        """Losses of the UNet with the adapter merged in f32: not rounded, and in each format."""
        with tempfile.TemporaryDirectory() as place:
            merged = Path(place, "merged")
            task = self._load()
            adapted = task.load_adapter(adapter, 1.0).named_parameters()
            layers = {name.replace("lora_A.", "") for name in adapted}
            task.save_merged(merged)
            values = tc.load_file(merged / UNET)
            found = {}
            for grid in (None, *GRIDS):
                tc.save_file(rounded(values, grid, layers.__contains__, adapter), merged / UNET)
                self._family.use_model(merged)
                found[grid or "merged"] = self._images.validation_loss()
            return found


def trained(given: argparse.Namespace, seed: int, work: Path) -> dict[str, dict[str, float]]:
    """Train in each way, and return the held-out losses: `{way: {form of the model: loss}}`."""
    dataset, other = work / hearts.DATASET, work / "held_out"
    hearts.write_dataset(dataset, seed)
    hearts.write_dataset(other, seed + HELD_OUT)
    cases: dict[str, dict[str, Any]] = {"plain": {}, "on nf4": {"base_precision": "nf4"}}
    cases |= {f"qat {grid}": {"qat": grid} for grid in GRIDS}
    held_out, found = None, {}
    for name, more in cases.items():
        output = work / name
        config = hearts.configuration(output, seed=seed).with_(
            dataset=str(dataset),
            precision="f32",
            device="cpu",
            steps=given.steps,
            learning_rate=given.rate,
            target_modules=["all-linear"],
            exclude_modules=list(OUTSIDE),
            **more,
        )
        run = train_adapter(config, progress=False, report=lambda _: None)
        held_out = held_out or HeldOut(config, other)
        found[name] = {"apart": held_out.apart(run.task), **held_out.losses(run.adapter_path)}
        shutil.rmtree(output)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    given = parser.parse_args()
    rows = []
    for seed in range(given.seeds):
        with tempfile.TemporaryDirectory() as work:
            rows.append(trained(given, seed, Path(work)))
        print(json.dumps(rows[-1]), flush=True)
    report(rows)


if __name__ == "__main__":
    main()
