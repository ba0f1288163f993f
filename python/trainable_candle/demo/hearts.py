"""The demo of SDXL: teaches a small model that was trained only on flowers to draw hearts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from PIL import Image

import trainable_candle as tc
from trainable_candle.demo import shapes
from trainable_candle.demo.folder import VERDICT, begin
from trainable_candle.files import write_atomically
from trainable_candle.plot import save_png
from trainable_candle.run import train_adapter
from trainable_candle.settings import TrainConfig
from trainable_candle.tasks.latent import LatentTask, SampleOptions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy.typing as npt

DATASET: Final = "dataset"
BEFORE: Final = "before.png"
AFTER: Final = "after.png"
IMAGES: Final = 10
"""The number of training images of each colour."""
UNSEEN: Final = "orange"
"""The colour that no training image has."""
DRAWN: Final = 4
"""The number of images of each colour that the model draws without the LoRA, and again with it."""
MOST_BEFORE: Final = 0.2
"""The largest `Verdict.before` that passes."""
LEAST_AFTER: Final = 0.6
"""The smallest `Verdict.after` that passes."""


@dataclass(frozen=True)
class Verdict:
    """The judge's findings, each a share (0 to 1)."""

    before: float
    """The share of hearts among the images that the base draws."""
    after: float
    """The share of hearts among the images that the base draws with the LoRA."""
    unseen: float
    """The share of hearts in the right colour among the images that the base draws with the LoRA if
    the prompt names `UNSEEN`."""
    judge_accuracy: float
    """The share of right answers that the judge gives about shapes that it was not fitted on."""

    @property
    def passed(self) -> bool:
        """Whether the base draws few hearts, and the base with the LoRA many."""
        return self.before <= MOST_BEFORE and self.after >= LEAST_AFTER

    def __str__(self) -> str:
        rows = [
            ("images without the LoRA", self.before, f"at most {MOST_BEFORE:.0%}"),
            ("images with the LoRA", self.after, f"at least {LEAST_AFTER:.0%}"),
            (f"{UNSEEN} hearts, not trained on", self.unseen, "-"),
        ]
        lines = [f"  {what:34}{found:7.1%}  (expected: {wanted})" for what, found, wanted in rows]
        head = f"A judge, which is right on {self.judge_accuracy:.1%} of shapes, looks for hearts:"
        return "\n".join([head, *lines])


def run_demo(
    output: Path,
    *,
    seed: int = 0,
    threads: int | None = None,
    progress: bool = True,
    report: Callable[[str], None] = print,
) -> Verdict | None:
    """Train a LoRA on drawn hearts, draw images with and without it, and judge them.

    Args:
        output: the folder for the data set and the results; created if missing.
        seed: the seed of the images, the training and the samples.
        threads: CPU threads; default all.
        progress: whether to show a progress bar.
        report: gets a line at each stage.

    Returns:
        The judgement; None if the training was interrupted.

    Raises:
        OSError: the folder cannot be written.
        ConfigError: the folder has checkpoints of a run that is no demo.
    """
    begin(output)
    if threads is not None:
        tc.set_num_threads(threads)
    write_dataset(output / DATASET, seed)
    report("base: draws five kinds of flowers; it has never seen a heart")
    config = configuration(output, seed=seed, threads=threads)
    training = train_adapter(config, progress=progress, report=report)
    task = training.task
    assert isinstance(task, LatentTask)
    if not training.completed:
        return None
    after = _draw(task, seed)
    training.adapter.set_enabled(False)
    before = _draw(task, seed)
    for images, name in ((before, BEFORE), (after, AFTER)):
        save_png(_grid(images), output / name)
        report(f"samples: {output / name}")

    judge = shapes.Judge(seed)
    hearts = judge.hearts(after)
    unseen = slice(-DRAWN, None)  # `_draw` draws this colour last.
    coloured = [shapes.is_colour(image, UNSEEN) for image in after[unseen]]
    result = Verdict(
        before=float(np.mean(judge.hearts(before))),
        after=float(np.mean(hearts)),
        unseen=float(np.mean(hearts[unseen] & np.array(coloured))),
        judge_accuracy=judge.accuracy,
    )
    write_atomically(output / VERDICT, json.dumps(asdict(result), indent=2) + "\n")
    return result


def configuration(output: Path, *, seed: int = 0, threads: int | None = None) -> TrainConfig:
    """Return the settings of a run that trains on `output/dataset` and writes to `output`."""
    return TrainConfig(
        # Without `weights`: the package's tiny SDXL, which was trained only on flowers.
        model="sdxl",
        dataset=str(output / DATASET),
        output=str(output),
        rank=16,
        target_modules=["all-linear", "all-conv"],
        steps=300,
        batch_size=4,
        learning_rate=3e-3,
        optimizer="adamw",
        weight_decay=0.0,
        lr_scheduler="cosine",
        warmup_steps=20,
        cache="memory",
        save_every=0,
        seed=seed,
        threads=threads,
    )


def write_dataset(folder: Path, seed: int) -> None:
    """Write the training images as PNG files, each with its caption in a `.txt` file beside it.

    Raises:
        OSError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # The seeds of the judge's images end in 1 and 2.
    random = np.random.default_rng([seed, 0])
    for colour in shapes.COLOURS:
        if colour == UNSEEN:
            continue
        for number in range(IMAGES):
            path = folder / f"{colour}-{number}.png"
            save_png(shapes.draw(shapes.HEART, colour, random), path)
            write_atomically(path.with_suffix(".txt"), caption(colour) + "\n")


def caption(colour: str) -> str:
    """Return the caption of a heart in this colour, for training images and as a prompt."""
    return f"a {colour} {shapes.HEART}"


def _draw(task: LatentTask, seed: int) -> npt.NDArray[np.uint8]:
    """Let the model draw hearts: `DRAWN` of each colour, `UNSEEN` last.

    The result has the shape (n, height, width, 3) with n = `DRAWN` times the number of colours.
    """
    colours = [*(colour for colour in shapes.COLOURS if colour != UNSEEN), UNSEEN]
    prompts = [caption(colour) for colour in colours for _ in range(DRAWN)]
    side = (shapes.SIDE, shapes.SIDE)
    # This seed differs from that of the training, so no image starts from noise of the training.
    options = SampleOptions(steps=14, seed=seed + 1000, guidance=4.0, size=side, sampler="dpmpp_2m")
    return task.draw(prompts, options)


def _grid(images: npt.NDArray[np.uint8]) -> Image.Image:
    """Return one image with all `images` in a grid that has a row for each colour."""
    rows = images.reshape(-1, DRAWN, *images.shape[1:])
    return Image.fromarray(np.concatenate([np.concatenate(row, 1) for row in rows], 0))
