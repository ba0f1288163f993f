"""The effect of quantization-aware training on a small image model's losses.

python benches/rounded_images.py [--steps 300] [--seeds 3] [--rate 3e-3]

The small SDXL that ships with the package learns the hearts of the package's demo, with a LoRA of
rank 16 on the linear layers of its blocks, which are the layers that inference servers quantize. It
learns in several ways: over an f32 base ("plain"), over an nf4 base ("on nf4"), and with
quantization-aware training for each format of `rounded_training.FORMATS` ("qat FORMAT"). The losses
are measured on hearts of another seed, for three forms of the trained model: the base as in
training with the adapter unmerged ("apart"), weights merged in f32 ("merged"), and these weights
rounded to each format.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rounded_training import FORMATS, report, rounded

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
HELD_OUT_SEED = 7_000
"""The seed of a run's held-out images is the seed of the run plus this number."""
UNET = Path("unet", "diffusion_pytorch_model.safetensors")


class HeldOut:
    """Measures the loss of UNets on held-out images, with the same noise for every UNet."""

    def __init__(self, config: TrainConfig, dataset: Path) -> None:
        self._config = config.with_(dataset=str(dataset))
        self._task = self._load()
        assert isinstance(self._task.family, PipelineFamily)
        self._family = self._task.family
        # The held-out images are the task's only data; they have no validation part of their own.
        data = Split(self._family.dataset(str(dataset)), None)
        self._images = self._task.prepare(data, lambda _: None).train

    def apart(self, task: Task) -> float:
        """Return the loss of a trained model whose adapter is not merged into its base."""
        assert isinstance(task, LatentTask)
        assert isinstance(task.family, PipelineFamily)
        # The validation loss is that of the family's current model.
        self._family.model = task.family.model
        return self._images.validation_loss()

    def _load(self) -> LatentTask:
        weights = families.weights_of(NAME, None)
        task = families.load(NAME, weights, "f32", "cpu", self._config)
        assert isinstance(task, LatentTask)
        return task

    def losses(self, adapter: Path) -> dict[str, float]:
        """Return losses of the UNet with the adapter merged in f32: by format, and unrounded.

        The key of the loss without rounding is "merged".
        """
        with tempfile.TemporaryDirectory() as folder:
            merged = Path(folder, "merged")
            task = self._load()
            factors = task.load_adapter(adapter, scale=1.0).named_parameters()
            # The names of the adapted weights: those of the factors A without "lora_A".
            adapted = {name.replace("lora_A.", "") for name in factors}
            task.save_merged(merged)
            weights = tc.load_file(merged / UNET)
            losses = {}
            for grid in (None, *FORMATS):
                # From `adapter`, `rounded` takes factors that the run learned for scales. The runs
                # here learn none.
                tc.save_file(rounded(weights, grid, adapted.__contains__, adapter), merged / UNET)
                self._family.use_parts(merged, {self._family.component})
                losses[grid or "merged"] = self._images.validation_loss()
            return losses


def trained(given: argparse.Namespace, seed: int, work: Path) -> dict[str, dict[str, float]]:
    """Train in each way; return the held-out losses, by way and by form of the model."""
    dataset, held_out_dataset = work / hearts.DATASET, work / "held_out"
    hearts.write_dataset(dataset, seed)
    hearts.write_dataset(held_out_dataset, seed + HELD_OUT_SEED)
    cases: dict[str, dict[str, Any]] = {"plain": {}, "on nf4": {"base_precision": "nf4"}}
    cases |= {f"qat {grid}": {"qat": grid} for grid in FORMATS}
    held_out, losses = None, {}
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
        # Made from the configuration of the first case, "plain", so that its base is not quantized.
        held_out = held_out or HeldOut(config, held_out_dataset)
        losses[name] = {"apart": held_out.apart(run.task), **held_out.losses(run.adapter_path)}
        shutil.rmtree(output)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="training steps of a run")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    given = parser.parse_args()
    results = []
    for seed in range(given.seeds):
        with tempfile.TemporaryDirectory() as work:
            results.append(trained(given, seed, Path(work)))
        print(json.dumps(results[-1]), flush=True)
    report(results)


if __name__ == "__main__":
    main()
