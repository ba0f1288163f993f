"""The demo of digits: teaches the built-in model a digit that it has never seen."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image

import trainable_candle as tc
from trainable_candle.demo import digits
from trainable_candle.demo.folder import VERDICT, begin
from trainable_candle.demo.judge import Judge, Verdict, verdict
from trainable_candle.errors import InternalError
from trainable_candle.families.digits import BASE, SIDE, Digits
from trainable_candle.files import write_atomically
from trainable_candle.plot import image_grid, save_png
from trainable_candle.run import train_adapter
from trainable_candle.settings import TrainConfig
from trainable_candle.tasks.latent import LatentTask, SampleOptions
from trainable_candle.tasks.latent.objectives import FLOW_TIMES

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt

    from trainable_candle.models import DigitsTransformer

SAMPLES: Final = 256
"""The number of images that are drawn without the LoRA, and again with it."""
SAMPLING_STEPS: Final = 25
DATASET: Final = "dataset"
BEFORE: Final = "before.png"
AFTER: Final = "after.png"
_SHOWN: Final = 64
"""The number of the drawn images that `before.png` shows, and `after.png` too."""


@dataclass(frozen=True)
class DemoResult:
    """The results of the demo."""

    output: Path
    """The folder with the files of the training run, its images in `dataset`, the samples in
    `before.png` and `after.png`, and `verdict.json`."""
    verdict: Verdict | None
    """The judgement of the samples; None if the training was interrupted."""


def run_demo(output: Path, *, seed: int = 0, threads: int | None = None) -> int:
    """Run `trainable-candle demo`; returns its exit status.

    The status is 0 if the judge accepts the result; 1 if not, or if the training was interrupted.

    Args:
        output: the folder for the data set and the results; created if missing.
        seed: the seed of the training and of the samples.
        threads: CPU threads; default all.

    Raises:
        OSError: the folder cannot be written.
        ConfigError: the folder has checkpoints of a run that is no demo.
    """
    result = run(output, seed=seed, threads=threads)
    if result.verdict is None:
        return 1
    print(f"\n{result.verdict}\n\nEverything is in {output}")
    return 0 if result.verdict.passed else 1


def run(
    output: Path,
    *,
    seed: int = 0,
    threads: int | None = None,
    progress: bool = True,
    report: Callable[[str], None] = print,
) -> DemoResult:
    """Train a LoRA on real images of the unseen digit; judge samples without it and with it.

    Args:
        output: the folder for the data set and the results; created if missing.
        seed: the seed of the training and of the samples.
        threads: CPU threads; default all.
        progress: whether to show a progress bar.
        report: gets a line at each stage.

    Raises:
        OSError: the folder cannot be written.
        ConfigError: the folder has checkpoints of a run that is no demo.
    """
    # Real images. The LoRA learns from `train`, the judge from `held_out`; `train` tests the judge.
    train, held_out = digits.split(digits.load())
    judge = Judge(held_out)
    config = configuration(output, seed=seed, threads=threads)
    begin(output)
    write_dataset(train.only(digits.UNSEEN), output / DATASET)
    if threads is not None:
        tc.set_num_threads(threads)

    family = Digits(BASE, config.precision, config.device)
    report(f"base: draws every handwritten digit but {digits.UNSEEN}, which it has never seen")
    untouched = _velocity(family.model)
    before = _sample(family.task(), seed)
    _save_grid(before, output / BEFORE, report)

    training = train_adapter(config, progress=progress, report=report)
    assert isinstance(training.task, LatentTask)
    trained = training.task.family
    assert isinstance(trained, Digits)
    if not training.completed:
        return DemoResult(output, None)
    after = _sample(training.task, seed)
    _save_grid(after, output / AFTER, report)

    training.adapter.set_enabled(False)
    if not np.array_equal(_velocity(trained.model), untouched):
        raise InternalError("demo: the model without its adapter is no longer the base")
    result = verdict(judge, digits.UNSEEN, digits.from_grey(before), digits.from_grey(after), train)
    write_atomically(output / VERDICT, json.dumps(asdict(result), indent=2) + "\n")
    return DemoResult(output, result)


def configuration(output: Path, *, seed: int = 0, threads: int | None = None) -> TrainConfig:
    """Return the settings of a run that trains on `output/dataset` and writes to `output`."""
    return TrainConfig(
        model="digits",
        dataset=str(output / DATASET),
        output=str(output),
        device="cpu",
        precision="f32",
        rank=8,
        steps=300,
        batch_size=64,
        learning_rate=2e-3,
        optimizer="adamw",
        weight_decay=0.0,
        lr_scheduler="cosine",
        warmup_steps=20,
        save_every=0,
        log_every=1,
        seed=seed,
        threads=threads,
    )


def write_dataset(images: digits.Digits, folder: Path) -> None:
    """Write images as PNG files, each with its caption in a `.txt` file beside it.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    labelled = zip(digits.to_grey(images.pixels), images.labels, strict=True)
    for number, (grey, label) in enumerate(labelled):
        path = folder / f"{number:03d}.png"
        save_png(Image.fromarray(grey), path)
        write_atomically(path.with_suffix(".txt"), caption(int(label)) + "\n")


def caption(digit: int) -> str:
    """Return the caption of an image of this digit, for training images and as a prompt."""
    return f"a handwritten {digit}"


def _sample(task: LatentTask, seed: int) -> npt.NDArray[np.uint8]:
    """Draw images of the unseen digit in grey; shape (`SAMPLES`, 8, 8)."""
    prompts = [caption(digits.UNSEEN)] * SAMPLES
    return task.draw(prompts, SampleOptions(steps=SAMPLING_STEPS, seed=seed))[..., 0]


@tc.no_grad()
def _velocity(model: DigitsTransformer) -> npt.NDArray[np.float32]:
    """Return the model's velocities for a blank image half way to noise, one for each class."""
    images = tc.zeros((digits.CLASSES, 1, SIDE, SIDE))
    velocity = model(images, tc.full((digits.CLASSES,), FLOW_TIMES / 2), tc.arange(digits.CLASSES))
    array: npt.NDArray[np.float32] = velocity.numpy()
    return array


def _save_grid(grey: npt.NDArray[np.uint8], path: Path, report: Callable[[str], None]) -> None:
    """Save the first `_SHOWN` images as one image, and report its path."""
    save_png(image_grid(grey[:_SHOWN], scale=6), path)
    report(f"samples: {path}")
