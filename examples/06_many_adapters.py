"""Use two adapters at once, in four ways.

The script loads both adapters, each with its scale; joins them into one file; reduces this file to
a lower rank; and merges both adapters into the checkpoint. The adapters are two LoRAs of the tiny
SDXL, each trained for a few steps on photographs of one subject. The script takes about a minute on
two cores:

    python examples/06_many_adapters.py [FOLDER]
"""

import shutil
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

import trainable_candle as tc
from trainable_candle import families
from trainable_candle.lora import LoraFile, combine, resize
from trainable_candle.run import train_adapter
from trainable_candle.tasks.latent import SampleOptions

PHOTOS = Path(__file__).parent / "photos"
SUBJECTS = {"coffee": "coffee*", "raccoon": "raccoon*"}
"""The subjects by name, each with the pattern of its files in `PHOTOS`."""
STEPS = 100
SCALES = (1.0, 0.5)
"""The factor of each adapter's effect, in the order of `SUBJECTS`."""
OPTIONS = SampleOptions(steps=10, seed=0)
PROMPT = "a photo of a cup of coffee"

Pixels = npt.NDArray[np.uint8]


def train(name: str, folder: Path, steps: int) -> Path:
    """Train a LoRA on the photographs of one subject; returns its file."""
    images = folder / f"{name}-photos"
    images.mkdir(parents=True, exist_ok=True)
    for file in PHOTOS.glob(SUBJECTS[name]):
        shutil.copy(file, images)
    config = tc.train.TrainConfig(
        model="sdxl",
        dataset=str(images),
        output=str(folder / name),
        rank=8,
        steps=steps,
        batch_size=2,
        learning_rate=2e-3,
    )
    return train_adapter(config, progress=False, report=lambda _: None).adapter_path


def draw(*adapters: tuple[Path, float]) -> Pixels:
    """Draw an image with the built-in SDXL and adapters: files, each with its scale."""
    task = families.load("sdxl", weights=None, dtype="f32", device="cpu")
    if adapters:
        task.load_adapters(list(adapters))
    return task.draw([PROMPT], OPTIONS)[0]


def distance(one: Pixels, other: Pixels) -> float:
    """Return the mean absolute difference of two images, from 0 to 255."""
    return float(np.abs(one.astype(float) - other.astype(float)).mean())


def main(folder: Path, steps: int = STEPS) -> dict[str, float]:
    """Train both adapters and draw with them in four ways.

    Returns:
        The `distance` between the image that is drawn with both adapters loaded and each of these
        images: "joined", "rank 8" and "merged", drawn in the three other ways, and "without any",
        drawn without adapters.
    """
    files = [train(name, folder, steps) for name in SUBJECTS]
    both_loaded = draw(*zip(files, SCALES, strict=True))

    # One file with the effect of both adapters: each layer's rank is the sum of the ranks, 8 + 8.
    joined = combine([LoraFile.read(file) for file in files], SCALES)
    joined.write(folder / "joined.safetensors")

    # The LoRA of rank 8 that is nearest to the joined one, by singular values.
    resize(joined, rank=8).write(folder / "small.safetensors")

    # A checkpoint whose weights contain both adapters.
    task = families.load("sdxl", weights=None, dtype="f32", device="cpu")
    task.load_adapters(list(zip(files, SCALES, strict=True)))
    task.save_merged(folder / "merged")
    task = families.load("sdxl", weights=folder / "merged", dtype="f32", device="cpu")
    merged = task.draw([PROMPT], OPTIONS)[0]

    distances = {
        "without any": distance(both_loaded, draw()),
        "joined": distance(both_loaded, draw((folder / "joined.safetensors", 1.0))),
        "rank 8": distance(both_loaded, draw((folder / "small.safetensors", 1.0))),
        "merged": distance(both_loaded, merged),
    }
    for name, value in distances.items():
        print(f"{name}: differs by {value:.2f} of 255 from the image with both adapters loaded")
    return distances


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "many-adapters"))
