"""The demo: fine-tune the image generator in the package on the digit it has never seen, and judge the result."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image

import trainable_candle as tc
from trainable_candle.demo import digits
from trainable_candle.demo.judge import Judge, Verdict, verdict
from trainable_candle.errors import InternalError
from trainable_candle.files import write_atomically
from trainable_candle.plot import image_grid, save_png
from trainable_candle.recipes.digits import SIDE, TIMESTEPS, DigitsRecipe
from trainable_candle.train.config import TrainConfig
from trainable_candle.train.run import train_adapter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt

    from trainable_candle.models import DigitsTransformer

UNSEEN: Final = 0
"""The digit that the base in the package was not trained on.

Zero, because it is the fairest to judge: its empty middle sets it apart from every mixture of the other
digits, so neither the base nor the judge takes something else for it.
"""

SAMPLES: Final = 256
SAMPLING_STEPS: Final = 25
_SHOWN: Final = 64


@dataclass(frozen=True)
class DemoResult:
    """What the demo made."""

    output: Path
    """Holds what training writes, the pictures that it trained on in `dataset`, the samples in
    `before.png` and `after.png`, and `verdict.json`."""
    verdict: Verdict | None
    """None if the training was interrupted."""


def configuration(dataset: Path, output: Path, seed: int = 0) -> TrainConfig:
    """The settings of the demo's training run."""
    return TrainConfig(
        model="digits",
        dataset=str(dataset),
        output=str(output),
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
    )


def run(
    output: Path, *, seed: int = 0, progress: bool = True, report: Callable[[str], None] = print
) -> DemoResult:
    """Train a LoRA on real pictures of the unseen digit, sample before and after, and judge.

    Args:
        output: the folder for everything; made if need be.
        seed: of the training and of the samples.
        progress: whether to show a progress bar.
        report: gets a line at each stage.

    Raises:
        OSError: the folder cannot be written.
    """
    train, held_out = digits.split(digits.load())
    judge = Judge(held_out)
    dataset = output / "dataset"
    write_dataset(train.only(UNSEEN), dataset)
    report(f"base: draws every handwritten digit but {UNSEEN}, which it has never seen")

    before = _sample(DigitsRecipe.load(DigitsRecipe.default_weights(), "f32", "cpu"), seed)
    _save_grid(before, output / "before.png", report)
    training = train_adapter(configuration(dataset, output, seed), progress=progress, report=report)
    if not training.completed:
        return DemoResult(output, None)
    after = _sample(training.recipe, seed)
    _save_grid(after, output / "after.png", report)

    training.adapter.set_enabled(False)
    if not np.array_equal(_sample(training.recipe, seed), before):
        raise InternalError("demo: the model without its adapter is no longer the base")

    result = verdict(judge, UNSEEN, digits.from_grey(before), digits.from_grey(after), train)
    write_atomically(output / "verdict.json", json.dumps(asdict(result), indent=2) + "\n")
    return DemoResult(output, result)


def write_dataset(pictures: digits.Digits, folder: Path) -> None:
    """One PNG a picture with its caption beside it, as a user would lay them out.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, (grey, label) in enumerate(
        zip(digits.to_grey(pictures.pixels), pictures.labels, strict=True)
    ):
        path = folder / f"{number:03d}.png"
        save_png(Image.fromarray(grey), path)
        write_atomically(path.with_suffix(".txt"), caption(int(label)) + "\n")


def caption(digit: int) -> str:
    """What the demo's pictures are called."""
    return f"a handwritten {digit}"


def _sample(recipe: DigitsRecipe, seed: int) -> npt.NDArray[np.uint8]:
    """Grey pictures of the unseen digit, or what the model takes for it; shape (n, 8, 8)."""
    prompts = [caption(UNSEEN)] * SAMPLES
    return recipe.sample(prompts, steps=SAMPLING_STEPS, seed=seed)[..., 0]


def _save_grid(grey: npt.NDArray[np.uint8], path: Path, report: Callable[[str], None]) -> None:
    save_png(image_grid(grey[:_SHOWN], scale=6), path)
    report(f"samples: {path}")
